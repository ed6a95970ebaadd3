"""What a plugin declares: contracts, specs, builders, and the types of their arguments."""
