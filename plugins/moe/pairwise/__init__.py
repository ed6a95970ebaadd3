"""Pairwise experts: each token by each of its experts; and the same fused with router and shared expert."""
