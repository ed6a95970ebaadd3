"""Rounding noise of one unit in the last place, as a scale for differences."""
