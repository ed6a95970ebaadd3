"""Proposers, which draft tokens for a model to verify: one for each kind, with a state for each sequence."""
