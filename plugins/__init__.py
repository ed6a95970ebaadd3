"""The built-in kernel families, found through the same entry points as anybody's."""
