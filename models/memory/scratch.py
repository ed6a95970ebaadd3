"""Scratch memory: planned with lifetimes while layers are built, leased while they run, never clamped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.errors import ScratchError
from kernel_muster.registry.launch.tape import SideBlock, open_block
from kernel_muster.registry.values import frozen


@frozen
class ScratchUse:
    """One user of a buffer inside a scope (a layer): how many bytes, and its steps from first to last, inclusive."""

    scope: str
    user: str
    buffer: str
    size_bytes: int
    first: int
    last: int


class ScratchPlan:
    """Collects the users of each buffer and their times. Scopes run one after the other, so they share buffers."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = limit_bytes
        self._uses: dict[tuple[str, str], list[ScratchUse]] = {}
        self._sizes: dict[str, int] = {}
        self._users: dict[tuple[str, str], int] = {}

    def use(self, scope: str, user: str, buffer: str, size_bytes: int, steps: tuple[int, int] = (0, 0)) -> None:
        """Plan a use. ScratchError if another use of the scope is alive then, or the limit is exceeded."""
        new = ScratchUse(scope, user, buffer, size_bytes, *steps)
        if new.last < new.first or size_bytes < 0:
            raise ScratchError(f"{scope}: {user} uses {buffer} for {size_bytes} bytes in steps {steps}")
        uses = self._uses.setdefault((scope, buffer), [])
        for old in uses:
            if old.first <= new.last and new.first <= old.last:
                raise ScratchError(
                    f"{scope}: {buffer} is used by {old.user} in steps {old.first}..{old.last} "
                    f"and by {user} in steps {new.first}..{new.last}; give one of them another buffer"
                )
        uses.append(new)
        self._sizes[buffer] = max(self._sizes.get(buffer, 0), size_bytes)
        self._users[buffer, user] = max(self._users.get((buffer, user), 0), size_bytes)
        if self._limit is not None and self.total_bytes > self._limit:
            raise ScratchError(
                f"scratch needs {self.total_bytes} bytes with {buffer} for {user}, the limit is {self._limit}"
            )

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(self._sizes.values())

    @property
    def buffers(self) -> dict[str, int]:
        """The size of each buffer, by name."""
        return dict(sorted(self._sizes.items()))

    def planned_bytes(self, buffer: str, user: str) -> int:
        """Return the bytes that a user may lease of a buffer. ScratchError without a plan."""
        if (buffer, user) not in self._users:
            raise ScratchError(f"{user} leases {buffer}, which it did not plan")
        return self._users[buffer, user]


def _host_bytes(size: int) -> Any:
    return np.empty(size, np.uint8)


class Scratch:
    """The buffers of a plan. Each has one live user at a time, and no two streams use it without waiting.

    A lease belongs to a stream: the side stream inside ``on_side_stream()``, else the main stream.
    """

    def __init__(self, plan: ScratchPlan, allocate: Callable[[int], Any] = _host_bytes) -> None:
        self.plan, self._allocate = plan, allocate
        self._buffers: dict[str, Any] = {}
        self._live: dict[str, str] = {}
        self._last: dict[str, tuple[str, object | None]] = {}  # user and stream

    @contextmanager
    def lease(
        self, buffer: str, user: str, shape: tuple[int, ...], dtype: str = "bf16", stream: object | None = None
    ) -> Iterator[Any]:
        """Lend a contiguous array during a block. ScratchError if it is taken, too small, or raced for."""
        carrier = numpy_dtype(dtype)
        needed = int(np.prod(shape, dtype=np.int64)) * carrier.itemsize
        planned = self.plan.planned_bytes(buffer, user)
        if needed > planned:
            raise ScratchError(f"{buffer}: {user} needs {needed} bytes for {dtype} {shape}, planned were {planned}")
        if buffer in self._live:
            raise ScratchError(f"{buffer}: {user} wants it while {self._live[buffer]} uses it")
        stream = open_block() if stream is None else stream
        before, last = self._last.get(buffer, (user, stream))
        if not _waits(stream, last):
            raise ScratchError(
                f"{buffer}: {user} uses it on a second stream, beside {before}, which nothing waits for; "
                "join first, or give one of them another buffer"
            )
        self._last[buffer] = user, stream
        self._live[buffer] = user
        try:
            yield self._storage(buffer)[:needed].view(carrier).reshape(shape)
        finally:
            del self._live[buffer]

    def _storage(self, buffer: str) -> Any:
        if buffer not in self._buffers:
            self._buffers[buffer] = self._allocate(self.plan.buffers[buffer])
        return self._buffers[buffer]


def _waits(stream: object | None, last: object | None) -> bool:
    """Whether launches on a stream run after those on the last one: a block begins behind the first stream."""
    if stream is last or (last is None and isinstance(stream, SideBlock)):
        return True
    return isinstance(last, SideBlock) and last.is_joined
