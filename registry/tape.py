"""Tapes: launches recorded as they run, to be enqueued again without a check, or captured into a graph.

While a tape is open in this thread (or task), every call of a handle is prepared once, enqueued, and kept. The
arguments are arrays, not values: whoever enqueues the tape again writes new values into the same arrays first.
"""

from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Self

from kernel_muster.registry.running import Launch

_OPEN: ContextVar["Tape | None"] = ContextVar("tape", default=None)


class Tape:
    """Launches in order. With ``overlap``, each may begin while the one before it still runs.

    It keeps the arguments' memory alive. ``make_scratch(bytes)`` gives the launches on it a workspace that they share:
    they follow each other on one stream. Without it each launch has its own. ``follows`` is a tape that is always
    enqueued right before this one.
    """

    def __init__(
        self, *, overlap: bool = False, make_scratch: Callable[[int], Any] | None = None, follows: "Tape | None" = None
    ) -> None:
        self._overlap, self._make_scratch = overlap, make_scratch
        self._scratch: Any = None
        self._scratch_bytes = 0
        self.is_behind_kernel: bool = follows is not None and follows.is_behind_kernel
        self._token: Token[Tape | None] | None = None
        self.launches: list[Launch] = []

    def __len__(self) -> int:
        return len(self.launches)

    def __enter__(self) -> Self:
        self._token = _OPEN.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _OPEN.reset(self._token)
            self._token = None

    def __call__(self, stream: object | None = None) -> None:
        """Enqueue everything again."""
        for launch in self.launches:
            launch(stream)

    @property
    def overlap(self) -> bool:
        """Whether the next kernel may begin early: only behind a kernel, never behind a copy."""
        return self._overlap and self.is_behind_kernel

    def scratch(self, size_bytes: int) -> Any | None:
        """Return workspace of at least so many bytes, or None: what launches share is as large as the largest asks."""
        if self._make_scratch is None or not size_bytes:
            return None
        if size_bytes > self._scratch_bytes:
            self._scratch, self._scratch_bytes = self._make_scratch(size_bytes), size_bytes
        return self._scratch

    def add(self, launch: Launch, *, is_kernel: bool) -> None:
        """Keep a launch."""
        self.launches.append(launch)
        self.is_behind_kernel = is_kernel


def open_tape() -> Tape | None:
    """Return the tape that is open here, if any."""
    return _OPEN.get()


def enqueue(launch: Launch, stream: object | None = None) -> None:
    """Enqueue something that is no kernel, a copy for instance, and keep it on the open tape."""
    tape = _OPEN.get()
    if tape is not None:
        tape.add(launch, is_kernel=False)
    launch(stream)
