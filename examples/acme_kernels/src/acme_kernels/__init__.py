"""Kernels and a model of a third party."""
