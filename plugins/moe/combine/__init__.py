"""Experts' results back to tokens, and the gated shared expert."""
