"""Whose code runs: told to somebody who is there when the process is not, for that code may end it."""

import contextlib
from collections.abc import Callable, Iterator

_listener: Callable[[str], object] | None = None
_now = ""


def tell(listener: Callable[[str], object]) -> None:
    """Let a listener hear whose code begins to run; an empty text says that it is ours again."""
    global _listener
    _listener = listener


@contextlib.contextmanager
def entered(who: str) -> Iterator[None]:
    """Say whose code runs in the block: ``plugin acme``."""
    before = _now
    _say(who)
    try:
        yield
    finally:
        _say(before)


def _say(who: str) -> None:
    global _now
    _now = who
    if _listener is not None:
        _listener(who)
