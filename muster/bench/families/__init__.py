"""The kernels measured by ``muster bench``, one module for each family."""
