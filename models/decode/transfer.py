"""Small copies between the host and a model's memory that neither allocate nor wait: rings of pinned buffers.

On the host a transfer is a plain copy. A slot of a ring is reused after the copy from or to it has run. A kernel writes
the results to the host: behind a graph a copy engine takes 7 us longer to begin (H200).
"""

from collections import deque
from typing import Any, Protocol

import numpy as np
from kernel_muster.models.memory.memory import DeviceMemory, Memory

#: Copies in flight: one running, one enqueued, one being filled by the host.
DEPTH = 3


class Upload(Protocol):
    """Sends i32 words to one array: fill the array of :meth:`stage`, then call :meth:`send`."""

    def stage(self) -> Any:
        """Return a host array to fill. It holds the data of an earlier call."""

    def send(self, words: int) -> None:
        """Enqueue the copy of the first words."""


class Download(Protocol):
    """Fetches i32 words of one array in the order of enqueued copies."""

    def begin(self, words: int) -> None:
        """Enqueue the copy of the first words."""

    def finish(self) -> Any:
        """Wait for the oldest copy and return it. Valid until ``DEPTH`` more were begun."""

    def drop(self) -> None:
        """Drop all copies in flight."""

    def __len__(self) -> int:
        """Return the number of copies in flight."""


class _HostUpload:
    def __init__(self, into: Any) -> None:
        self._into, self._words = into, np.zeros_like(into)

    def stage(self) -> Any:
        return self._words

    def send(self, words: int) -> None:
        self._into[:words] = self._words[:words]


class _HostDownload:
    def __init__(self, source: Any) -> None:
        self._source = source
        self._taken: deque[Any] = deque()

    def begin(self, words: int) -> None:
        self._taken.append(self._source[:words].copy())

    def finish(self) -> Any:
        return self._taken.popleft()

    def drop(self) -> None:
        self._taken.clear()

    def __len__(self) -> int:
        return len(self._taken)


class _Ring:
    """Pinned buffers of i32 words, and the event behind each one's last copy."""

    def __init__(self, memory: DeviceMemory, words: int) -> None:
        import cupy

        self._memory, self._at = memory, -1
        self._pinned = [cupy.cuda.alloc_pinned_memory(4 * words) for _ in range(DEPTH)]
        self.arrays = [np.frombuffer(one, np.int32, words) for one in self._pinned]
        with memory.active():
            self.events = [cupy.cuda.Event(disable_timing=True) for _ in range(DEPTH)]
        for array in self.arrays:
            array[:] = 0

    def next(self) -> int:
        """Wait until the next slot's copy has run, and return the slot."""
        self._at = (self._at + 1) % DEPTH
        self.events[self._at].synchronize()
        return self._at

    def on_device(self, slot: int) -> Any:
        """Return a slot's buffer as the device sees it."""
        import cupy

        pinned, words = self._pinned[slot], self.arrays[slot].size
        with self._memory.active():
            memory = cupy.cuda.UnownedMemory(pinned.ptr, 4 * words, pinned, cupy.cuda.Device().id)
            return cupy.ndarray((words,), np.int32, cupy.cuda.MemoryPointer(memory, 0))

    def mark(self, slot: int) -> None:
        """Put the slot's event after all enqueued work."""
        self.events[slot].record(self._memory.stream)


class _DeviceUpload:
    def __init__(self, memory: DeviceMemory, into: Any) -> None:
        self._memory, self._ring, self._into, self._slot = memory, _Ring(memory, into.size), into, 0

    def stage(self) -> Any:
        self._slot = self._ring.next()
        return self._ring.arrays[self._slot]

    def send(self, words: int) -> None:
        import cupy

        of = self._ring.arrays[self._slot].ctypes.data
        runtime, stream = cupy.cuda.runtime, self._memory.stream
        runtime.memcpyAsync(self._into.data.ptr, of, 4 * words, runtime.memcpyHostToDevice, stream.ptr)
        self._ring.mark(self._slot)


class _DeviceDownload:
    def __init__(self, memory: DeviceMemory, source: Any) -> None:
        import cupy

        self._memory, self._ring, self._source = memory, _Ring(memory, source.size), source
        self._slots = [self._ring.on_device(slot) for slot in range(DEPTH)]
        self._move = cupy.ElementwiseKernel("int32 source", "int32 into", "into = source", "muster_fetch_words")
        self._begun: deque[tuple[int, int]] = deque()
        # Compiled now, and not in the first step.
        self._enqueue(0, source.size)
        memory.wait()

    def _enqueue(self, slot: int, words: int) -> None:
        with self._memory.active():
            self._move(self._source[:words], self._slots[slot][:words], stream=self._memory.stream)
        self._ring.mark(slot)

    def begin(self, words: int) -> None:
        slot = self._ring.next()
        self._enqueue(slot, words)
        self._begun.append((slot, words))

    def finish(self) -> Any:
        slot, words = self._begun.popleft()
        self._ring.events[slot].synchronize()
        return self._ring.arrays[slot][:words]

    def drop(self) -> None:
        self._begun.clear()  # a running copy is awaited when its slot is used again

    def __len__(self) -> int:
        return len(self._begun)


def upload_to(memory: Memory, into: Any) -> Upload:
    """Return an upload to a contiguous i32 array of a memory."""
    return _DeviceUpload(memory, into) if isinstance(memory, DeviceMemory) else _HostUpload(into)


def download_from(memory: Memory, source: Any) -> Download:
    """Return a download from a contiguous i32 array of a memory."""
    return _DeviceDownload(memory, source) if isinstance(memory, DeviceMemory) else _HostDownload(source)
