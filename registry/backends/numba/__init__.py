"""Kernels written in Python with Numba-CUDA."""
