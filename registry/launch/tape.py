"""Tapes: launches recorded as they run, to be enqueued again without a check, or captured into a graph.

While a tape is open in this thread (or task), every call of a handle is prepared once, enqueued, and kept. The
arguments are arrays, not values: write new values into the same arrays before enqueuing the tape again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol, Self

from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.launch.runners import Launch

_OPEN: ContextVar["Tape | None"] = ContextVar("tape", default=None)
_BLOCK: ContextVar["SideBlock | None"] = ContextVar("side_block", default=None)


class SideStream(Protocol):
    """A second stream, forked from the stream of a tape and joined to it again."""

    @property
    def stream(self) -> object:
        """The second stream."""

    def fork(self, stream: object | None) -> None:
        """Make later work on the second stream wait for the work on the first."""

    def join(self, stream: object | None) -> None:
        """Make the first stream wait for the second."""


class Tape:
    """Launches in order. With ``overlap``, each may begin while the one before it still runs.

    It keeps the arguments' memory alive.

    ``make_scratch(bytes)`` makes one workspace for all launches, which follow each other on one stream. Without it each
    launch has its own. ``follows`` is a tape that is always enqueued right before this one. :func:`on_side_stream` puts
    its launches on ``side_stream``; without one they stay in line. ``keeping()`` is a context for memory that must
    outlive the arguments: counters that a launch keeps from one run to the next.
    """

    def __init__(
        self,
        *,
        overlap: bool = False,
        make_scratch: Callable[[int], Any] | None = None,
        follows: "Tape | None" = None,
        side_stream: "SideStream | None" = None,
        keeping: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._overlap, self._make_scratch, self.side_stream, self.keeping = overlap, make_scratch, side_stream, keeping
        self._scratch: Any = None
        self._scratch_bytes = 0
        self.is_behind_kernel: bool = follows is not None and follows.is_behind_kernel
        self._token: Token[Tape | None] | None = None
        self.unjoined: SideBlock | None = None
        self.launches: list[Launch] = []

    def __len__(self) -> int:
        """The number of launches, those on the side stream included."""
        aside = [len(launch.tape) - 1 for launch in self.launches if isinstance(launch, _Fork)]
        joins = sum(isinstance(launch, _Join) for launch in self.launches)
        return len(self.launches) + sum(aside) - joins

    def __enter__(self) -> Self:
        if self._token is not None:
            raise UsageError("this tape is open already: leave its block first, or record on another tape")
        self._token = _OPEN.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _OPEN.reset(self._token)
            self._token = None
        if error is None and self.unjoined is not None:
            raise UsageError(
                "the tape ends before join(): launches of the side stream are not waited for. Call join() first"
            )

    def __call__(self, stream: object | None = None) -> None:
        """Enqueue everything again."""
        for launch in self.launches:
            launch(stream)

    @property
    def overlap(self) -> bool:
        """Whether the next kernel may begin early: only behind a kernel, never behind a copy."""
        return self._overlap and self.is_behind_kernel

    def scratch(self, size_bytes: int) -> Any | None:
        """Return workspace of at least so many bytes, or None. It grows to the largest request."""
        if self._make_scratch is None or not size_bytes:
            return None
        if size_bytes > self._scratch_bytes:
            self._scratch, self._scratch_bytes = self._make_scratch(size_bytes), size_bytes
        return self._scratch

    def release(self) -> None:
        """Drop the arguments once a graph has captured the launches; launches that own memory stay."""
        for launch in self.launches:
            if isinstance(launch, _Fork):
                launch.tape.release()
        self.launches = [one for one in self.launches if isinstance(one, _Fork) or getattr(one, "owns_memory", False)]

    def child(self) -> "Tape":
        """Return a tape for the side stream: it shares no workspace with this one."""
        return Tape(overlap=self._overlap, make_scratch=self._make_scratch, keeping=self.keeping)

    def add(self, launch: Launch, *, is_kernel: bool) -> None:
        """Keep a launch."""
        self.launches.append(launch)
        self.is_behind_kernel = is_kernel


class _Fork:
    """Launches that begin here, on the side stream."""

    def __init__(self, side_stream: SideStream, tape: Tape) -> None:
        self.side_stream, self.tape = side_stream, tape

    def __call__(self, stream: object | None = None) -> None:
        self.side_stream.fork(stream)
        self.tape(self.side_stream.stream)


class _Join:
    """The point where the first stream waits for the side stream."""

    def __init__(self, side_stream: SideStream) -> None:
        self._side_stream = side_stream

    def __call__(self, stream: object | None = None) -> None:
        self._side_stream.join(stream)


class SideBlock:
    """Launches on the side stream until :meth:`join`."""

    def __init__(self) -> None:
        self._is_ended = False
        self._tape: Tape | None = None
        self.is_joined = False

    def end(self, tape: Tape | None = None) -> None:
        """End the block; ``tape`` is where its launches fork off."""
        self._is_ended, self._tape = True, tape

    def join(self) -> None:
        """Make later launches wait for them. Call it once, before anything reads their outputs."""
        if not self._is_ended:
            raise UsageError("join() inside the block of on_side_stream(): leave the block first")
        self.is_joined = True
        tape, self._tape = self._tape, None
        if tape is not None and tape.side_stream is not None:
            tape.unjoined = None
            # What comes next waits for both streams in full: it does not begin early behind one of them.
            tape.add(_Join(tape.side_stream), is_kernel=False)


@contextmanager
def on_side_stream() -> Iterator[SideBlock]:
    """Run the block's launches on the side stream until ``join()``; one block at a time.

    They wait for all launches before the block. Launches between the block and the join must not write the block's
    inputs nor touch its outputs: the caller ensures that. Without a tape that has a side stream, everything runs in
    line. UsageError where a join is missing or comes too early.
    """
    tape, block = _OPEN.get(), SideBlock()
    if tape is None or tape.side_stream is None:
        with _in_block(block):
            yield block
        block.end()
        return
    if tape.unjoined is not None:
        raise UsageError("the side stream is in use: call join() before the next block of on_side_stream()")
    with tape.child() as child, _in_block(block):
        yield block
    tape.launches.append(_Fork(tape.side_stream, child))
    tape.unjoined = block
    block.end(tape)


@contextmanager
def _in_block(block: SideBlock) -> Iterator[None]:
    token = _BLOCK.set(block)
    try:
        yield
    finally:
        _BLOCK.reset(token)


def open_block() -> SideBlock | None:
    """Return the open block of :func:`on_side_stream`; None outside of one.

    The answer is the same without a side stream, where everything runs in line, so that races are found there too.
    """
    return _BLOCK.get()


def open_tape() -> Tape | None:
    """Return the tape that is open here, if any."""
    return _OPEN.get()


def enqueue(launch: Launch, stream: object | None = None) -> None:
    """Enqueue a launch that is not a kernel, such as a copy, and keep it on the open tape."""
    tape = _OPEN.get()
    if tape is not None:
        tape.add(launch, is_kernel=False)
    launch(stream)
