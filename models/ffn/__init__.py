"""Feed-forward layers: SwiGLU, router and experts."""
