"""Other libraries' kernels for the same work."""
