"""The decoders of a comparison, their prompts and weights."""
