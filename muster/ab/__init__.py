"""A/B: two arms decode the same prompts with the same weights, and what differs is judged."""
