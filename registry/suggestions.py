"""Which of the known names a misspelt one is meant for, at a bounded cost.

Names come from files that anybody writes: thousands may be unknown, among thousands that are known. A report helps
with the first of them, and a reader who corrects those finds the rest.
"""

import difflib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property

#: How alike a name must be to be suggested.
ALIKE = 0.72
#: The names that one is compared with. Of more, those that stand next to it in order of their first or last letters.
MOST_COMPARED = 100
#: The pairs of letters that one index compares at most: 0.1 s for names of 30 letters, 2 s for the worst of 100.
MOST_PAIRS = 8_000_000
#: Longer names are nobody's spelling.
LONGEST = 100


class Allowance:
    """What suggestions may still cost; several indexes may share one."""

    def __init__(self, pairs: int = MOST_PAIRS) -> None:
        self.pairs = pairs

    def take(self, pairs: int) -> bool:
        """Take so many pairs of letters, if so many are left."""
        if pairs > self.pairs:
            return False
        self.pairs -= pairs
        return True


class Names:
    """Known names. A ``prefix`` that all of them share does not make them alike."""

    def __init__(self, known: Iterable[str], prefix: str = "", allowance: Allowance | None = None) -> None:
        self._prefix, self._known = prefix, known
        self._allowance = Allowance() if allowance is None else allowance
        self._found: dict[tuple[str, float], list[str]] = {}

    def near(self, name: str, most: int = 3, cutoff: float = ALIKE) -> list[str]:
        """Return the known names that look most like ``name``, best first; none where the allowance is used up."""
        found = self._found.get((name, cutoff))
        if found is None:
            found = self._found[name, cutoff] = self._near(name.removeprefix(self._prefix), cutoff)
        return found[:most]

    def did_you_mean(self, name: str) -> str:
        """Return ``; did you mean ...?``, or an empty string."""
        return named(self.near(name))

    def _near(self, name: str, cutoff: float) -> list[str]:
        if not name or len(name) > LONGEST or not self._allowance.pairs:
            return []
        some = self._candidates(name)
        if not self._allowance.take(len(name) * sum(map(len, some))):
            self._allowance.pairs = 0  # nor any later one: which ones get suggestions shall be easy to say
            return []
        return [self._prefix + other for other in difflib.get_close_matches(name, some, n=3, cutoff=cutoff)]

    @cached_property
    def _forwards(self) -> list[str]:
        bare = {other.removeprefix(self._prefix) for other in self._known}
        return sorted(other for other in bare if len(other) <= LONGEST)

    @cached_property
    def _backwards(self) -> list[str]:
        return sorted(other[::-1] for other in self._forwards)

    def _candidates(self, name: str) -> Sequence[str]:
        """Return all names, or those that share the most letters with one before a slip in it, or behind it."""
        if len(self._forwards) <= MOST_COMPARED:
            return self._forwards
        behind = (other[::-1] for other in _beside(name[::-1], self._backwards))
        return sorted({*_beside(name, self._forwards), *behind})


def _beside(name: str, names: Sequence[str]) -> Sequence[str]:
    at = bisect_left(names, name)
    return names[max(0, at - MOST_COMPARED // 4) : at + MOST_COMPARED // 4]


def named(names: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` of these names, or an empty string."""
    text = " or ".join(names)
    return f"; did you mean {text}?" if text else ""
