"""The policy of dispatch: pure functions from shapes to arms, each threshold with its measurements beside it."""
