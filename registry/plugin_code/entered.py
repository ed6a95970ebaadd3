"""Whose code runs: told to somebody who is there when the process is not, for that code may end it."""

import contextlib
from collections.abc import Callable, Iterator

_listener: Callable[[str], object] | None = None
_guest_listener: Callable[[str], object] | None = None
_now = ""


def tell(listener: Callable[[str], object], of_guests: Callable[[str], object] | None = None) -> None:
    """Let a listener hear whose code begins to run; an empty text says that it is ours again.

    ``of_guests`` hears which plugins of other distributions begin to load: from then on their threads may run whenever.
    """
    global _listener, _guest_listener
    _listener, _guest_listener = listener, of_guests


def tell_guest(plugin: str) -> None:
    """Say that a plugin of another distribution begins to load."""
    if _guest_listener is not None:
        _guest_listener(plugin)


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
