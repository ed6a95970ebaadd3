"""Rounding noise of one unit in the last place, as a yardstick for differences."""
