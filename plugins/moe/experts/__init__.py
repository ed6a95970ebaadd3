"""Shared by the grouped and the pairwise experts."""
