"""From installed entry points to a catalog of registered kernels."""
