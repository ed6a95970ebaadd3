"""Triton kernels: compiled to a cubin for a named architecture, without a GPU, a driver or torch."""
