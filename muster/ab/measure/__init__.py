"""Measurements of an arm: logits, kernel times, launches."""
