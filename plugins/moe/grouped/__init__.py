"""Grouped experts: all rows of an expert together, its weights read once."""
