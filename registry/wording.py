"""Lists in sentences: the first of many names stand for all."""

from collections.abc import Sequence

#: So many names are read in a sentence; what has more has one cause, and the rest is counted.
MOST_NAMED = 8


def listed(names: Sequence[object], most: int = MOST_NAMED, separator: str = ", ") -> str:
    """Return ``a, b, c``; of many names the first, and how many more there are: ``a, b and 40 more``."""
    if len(names) <= most + 1:  # "and 1 more" is no shorter than the name
        return separator.join(map(str, names))
    return f"{separator.join(map(str, names[:most]))} and {len(names) - most} more"
