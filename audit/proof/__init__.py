"""Proofs: kernels run on the cases of their contracts."""
