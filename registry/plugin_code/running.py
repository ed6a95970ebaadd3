"""The plugin whose code runs now, reported to a listener in another process: that code may end this one."""

import contextlib
from collections.abc import Callable, Iterator

_listener: Callable[[str], object] | None = None
_guest_listener: Callable[[str], object] | None = None
_now = ""


def listen(listener: Callable[[str], object], of_guests: Callable[[str], object] | None = None) -> None:
    """Call a listener when other code begins to run; with an empty text when it is ours again.

    ``of_guests`` is called when a plugin of another distribution begins to load: its threads may run from then on.
    """
    global _listener, _guest_listener
    _listener, _guest_listener = listener, of_guests


def report_guest(plugin: str) -> None:
    """Report that a plugin of another distribution begins to load."""
    if _guest_listener is not None:
        _guest_listener(plugin)


@contextlib.contextmanager
def running(who: str) -> Iterator[None]:
    """Report the owner of the code that runs in the block: ``plugin acme``."""
    before = _now
    _report(who)
    try:
        yield
    finally:
        _report(before)


def _report(who: str) -> None:
    global _now
    _now = who
    if _listener is not None:
        _listener(who)
