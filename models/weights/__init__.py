"""Sources of weights, and the plan of their layouts."""
