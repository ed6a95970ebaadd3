"""Which arm serves which shape: pure functions, each threshold with its measurements beside it."""
