"""A/B: two arms decode the same prompts with the same weights, and checks judge the differences."""
