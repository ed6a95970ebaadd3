"""Both ends of a model: embedding, LM head, draft heads, sampling."""
