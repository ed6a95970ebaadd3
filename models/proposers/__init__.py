"""What drafts tokens for a model to verify: one proposer a kind, with a state of its own for each sequence."""
