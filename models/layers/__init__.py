"""Layers: they look their kernels up when they are built, hold the handles, and never look up in the hot path."""
