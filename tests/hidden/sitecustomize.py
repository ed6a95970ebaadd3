"""Run by every interpreter with this folder on its path: it hides some distributions."""

import os
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, MetadataPathFinder
from typing import Any

#: The variable with the distributions, by the paths of their metadata.
HIDDEN = "KERNEL_MUSTER_TESTS_HIDE"


def hide(places: Iterable[str]) -> None:
    """Leave distributions whose metadata lies at these places out of what ``importlib.metadata`` finds."""
    hidden, find = frozenset(places), MetadataPathFinder.find_distributions

    def seen(*arguments: Any, **options: Any) -> Iterator[Distribution]:
        return (one for one in find(*arguments, **options) if str(getattr(one, "_path", "")) not in hidden)

    MetadataPathFinder.find_distributions = staticmethod(seen)


hide(filter(None, os.environ.get(HIDDEN, "").split(os.pathsep)))
