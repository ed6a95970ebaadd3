"""The kernels that ``muster bench`` measures, one module a family."""
