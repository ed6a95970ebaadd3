"""Tapes: launches recorded as they run, to be enqueued again without a check, or captured into a graph.

While a tape is open in this thread (or task), every call of a handle is prepared once, enqueued, and kept. The
arguments are arrays, not values: whoever enqueues the tape again writes new values into the same arrays first.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol, Self

from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.launch.runners import Launch

_OPEN: ContextVar["Tape | None"] = ContextVar("tape", default=None)
_BESIDE: ContextVar["Beside | None"] = ContextVar("beside", default=None)


class Lane(Protocol):
    """A second stream beside the one that a tape is enqueued on."""

    @property
    def stream(self) -> object:
        """The second stream."""

    def fork(self, stream: object | None) -> None:
        """Let what is enqueued on the second stream from now on wait for what is on the first."""

    def join(self, stream: object | None) -> None:
        """Let the first stream wait for the second."""


class Tape:
    """Launches in order. With ``overlap``, each may begin while the one before it still runs.

    It keeps the arguments' memory alive. ``make_scratch(bytes)`` gives the launches on it a workspace that they share:
    they follow each other on one stream. Without it each launch has its own. ``follows`` is a tape that is always
    enqueued right before this one. ``lane`` is where :func:`beside` puts its launches; without it they stay in line.
    ``keeping()`` is a context in which a launch gets memory of its own: counters, which must stay what they are from
    one time to the next, whatever becomes of the arguments' memory.
    """

    def __init__(
        self,
        *,
        overlap: bool = False,
        make_scratch: Callable[[int], Any] | None = None,
        follows: "Tape | None" = None,
        lane: "Lane | None" = None,
        keeping: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._overlap, self._make_scratch, self.lane, self.keeping = overlap, make_scratch, lane, keeping
        self._scratch: Any = None
        self._scratch_bytes = 0
        self.is_behind_kernel: bool = follows is not None and follows.is_behind_kernel
        self._token: Token[Tape | None] | None = None
        self.unjoined: Beside | None = None
        self.launches: list[Launch] = []

    def __len__(self) -> int:
        """The number of launches, those beside the others too."""
        beside = [len(launch.tape) - 1 for launch in self.launches if isinstance(launch, _Fork)]
        joins = sum(isinstance(launch, _Join) for launch in self.launches)
        return len(self.launches) + sum(beside) - joins

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
            raise UsageError("the tape ends, and nothing on it waits for launches beside: call join() before its end")

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

    def release(self) -> None:
        """Keep only launches that own memory, once a graph holds what all of them do: arguments are let go."""
        for launch in self.launches:
            if isinstance(launch, _Fork):
                launch.tape.release()
        self.launches = [one for one in self.launches if isinstance(one, _Fork) or getattr(one, "owns_memory", False)]

    def child(self) -> "Tape":
        """Return a tape for launches beside this one's: they share no workspace with it."""
        return Tape(overlap=self._overlap, make_scratch=self._make_scratch, keeping=self.keeping)

    def add(self, launch: Launch, *, is_kernel: bool) -> None:
        """Keep a launch."""
        self.launches.append(launch)
        self.is_behind_kernel = is_kernel


class _Fork:
    """Launches that begin here and run beside what follows."""

    def __init__(self, lane: Lane, tape: Tape) -> None:
        self.lane, self.tape = lane, tape

    def __call__(self, stream: object | None = None) -> None:
        self.lane.fork(stream)
        self.tape(self.lane.stream)


class _Join:
    """The end of what ran beside."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def __call__(self, stream: object | None = None) -> None:
        self._lane.join(stream)


class Beside:
    """Launches that run beside others until :meth:`join`."""

    def __init__(self) -> None:
        self._is_ended = False
        self._tape: Tape | None = None
        self.is_joined = False

    def end(self, tape: Tape | None = None) -> None:
        """End the block; ``tape`` is where its launches fork off."""
        self._is_ended, self._tape = True, tape

    def join(self) -> None:
        """Let what follows wait for them; once, and before anything reads what they write."""
        if not self._is_ended:
            raise UsageError("join() in the block of beside(): leave the block first, what follows it is to wait")
        self.is_joined = True
        tape, self._tape = self._tape, None
        if tape is not None and tape.lane is not None:
            tape.unjoined = None
            # What comes next waits for both streams in full: it does not begin early behind one of them.
            tape.add(_Join(tape.lane), is_kernel=False)


@contextmanager
def beside() -> Iterator[Beside]:
    """Put the block's launches beside what follows it, until ``join()``; one block at a time.

    They depend on what was enqueued before the block. Whoever uses it sees to it that what follows, up to the join,
    neither writes what they read nor touches what they write. Without a tape that has a lane, and while one is
    recorded, everything runs in line. UsageError where a join is missing, or comes too early.
    """
    tape, block = _OPEN.get(), Beside()
    if tape is None or tape.lane is None:
        with _in_block(block):
            yield block
        block.end()
        return
    if tape.unjoined is not None:
        raise UsageError("launches run beside already: call join() before the next block of beside()")
    with tape.child() as child, _in_block(block):
        yield block
    tape.launches.append(_Fork(tape.lane, child))
    tape.unjoined = block
    block.end(tape)


@contextmanager
def _in_block(block: Beside) -> Iterator[None]:
    token = _BESIDE.set(block)
    try:
        yield
    finally:
        _BESIDE.reset(token)


def open_block() -> Beside | None:
    """Return the block of :func:`beside` whose launches these are; None on the first stream.

    It is the same without a second stream, where everything runs in line: what would race is then known there too.
    """
    return _BESIDE.get()


def open_tape() -> Tape | None:
    """Return the tape that is open here, if any."""
    return _OPEN.get()


def enqueue(launch: Launch, stream: object | None = None) -> None:
    """Enqueue something that is no kernel, a copy for instance, and keep it on the open tape."""
    tape = _OPEN.get()
    if tape is not None:
        tape.add(launch, is_kernel=False)
    launch(stream)
