"""The memory of a model's arrays: the host (NumPy) or one device (CuPy), and transfers between them.

Nothing here uses CuPy's arithmetic on BF16: its elementwise kernels are compiled at first use, 0.1 to 0.7 s each.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Protocol

import numpy as np
from kernel_muster.registry.contract.arrays import ArrayView, stream_pointer, view_of
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.errors import ContractError, UsageError
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.launch.tape import SideStream, enqueue


class Memory(Protocol):
    """Makes arrays of ``registry.dtypes`` names. ``with memory.active():`` puts work on its device and stream."""

    @property
    def is_host(self) -> bool:
        """Whether kernels run in this process, on NumPy arrays."""

    def active(self) -> Any:
        """Return a context: its device, its stream, and its pool for every allocation inside."""

    def recording(self) -> Any:
        """Return :meth:`active` for a recorded pass: only other recorded passes reuse its allocations."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an uninitialised array."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an array of zeros."""

    def put(self, array: Any) -> Any:
        """Return an array in this memory: itself, if it is already there."""

    def get(self, array: Any) -> Any:
        """Return a NumPy copy of an array. Waits for all earlier work."""

    def side_stream(self) -> SideStream | None:
        """Return a second stream for launches that may run beside others, if there is one."""

    def wait(self) -> None:
        """Wait for all enqueued work."""

    def used_bytes(self) -> int:
        """Return the bytes of live arrays in this memory."""

    def release(self) -> None:
        """Free unused memory. Live arrays keep theirs."""


class HostMemory:
    """NumPy arrays in this process."""

    is_host = True

    @contextmanager
    def active(self) -> Iterator[None]:
        """No effect: there is no stream."""
        yield

    recording = active

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an uninitialised array."""
        return np.empty(shape, numpy_dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return zeros."""
        return np.zeros(shape, numpy_dtype(dtype))

    def put(self, array: Any) -> Any:
        """Return the array itself."""
        return array

    def get(self, array: Any) -> Any:
        """Return a copy."""
        return np.array(array)

    def side_stream(self) -> None:
        """Return None: the host runs one launch after another."""

    def wait(self) -> None:
        """No effect: a launch returns after it has run."""

    def used_bytes(self) -> int:
        """Return 0: the host's memory is Python's to count."""
        return 0

    def release(self) -> None:
        """No effect."""


# Pools without a memory that refers to them. They must outlive their arrays: CuPy loses an array's memory if its
# pool has gone. Python's collection must not free them, because it may run during the capture of a stream.
_LEFT: list[Any] = []
_MEMORIES: "weakref.WeakSet[DeviceMemory]" = weakref.WeakSet()


def _free_left() -> None:
    """Free the device memory of earlier models."""
    if _MEMORIES:
        gc.collect()  # models refer to themselves
    for pool in tuple(_LEFT):
        pool.free_all_blocks()
        if not pool.total_bytes():
            _LEFT.remove(pool)


class DeviceMemory:
    """CuPy arrays of one device, from a separate pool, on one stream ordered with the default stream.

    The memory of a deleted model returns to the device when the next one's memory is made, or by ``release``.
    """

    is_host = False

    def __init__(self, ordinal: int) -> None:
        import cupy

        _free_left()
        self._cupy, self.device = cupy, cupy.cuda.Device(ordinal)
        self.pool = cupy.cuda.MemoryPool()
        # Recorded passes run one after the other, so they may share temporary memory.
        self._passes = cupy.cuda.MemoryPool()
        with self.device:
            self.stream = cupy.cuda.Stream()
        weakref.finalize(self, _LEFT.extend, (self.pool, self._passes)).atexit = False
        _MEMORIES.add(self)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Work on this device, its stream and its pool."""
        with self.device, self._cupy.cuda.using_allocator(self.pool.malloc), self.stream:
            yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Work on this device and its stream, in the memory shared by recorded passes."""
        with self.device, self._cupy.cuda.using_allocator(self._passes.malloc), self.stream:
            yield

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an uninitialised array."""
        with self.active():
            return self._cupy.empty(shape, numpy_dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return zeros."""
        with self.active():
            found = self._cupy.empty(shape, numpy_dtype(dtype))
            found.data.memset_async(0, found.nbytes, self.stream)
            return found

    def put(self, array: Any) -> Any:
        """Return a copy on the device of a NumPy array."""
        if not isinstance(array, np.ndarray):
            return array
        with self.active():
            return self._cupy.asarray(np.ascontiguousarray(array))

    def get(self, array: Any) -> Any:
        """Return a copy on the host. Waits for the stream."""
        if isinstance(array, np.ndarray):
            return np.array(array)
        with self.active():
            return self._cupy.asnumpy(array)

    def side_stream(self) -> "DeviceSideStream":
        """Return a second stream beside this memory's."""
        with self.device:
            return DeviceSideStream(self._cupy)

    def wait(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()

    def used_bytes(self) -> int:
        """Return the bytes of live arrays."""
        return int(self.pool.used_bytes() + self._passes.used_bytes())

    def release(self) -> None:
        """Wait, and return free memory to the device."""
        self.wait()
        _free_left()
        self.pool.free_all_blocks()
        if not self._passes.used_bytes():  # a recorded pass points to memory without an owner
            self._passes.free_all_blocks()


class DeviceSideStream:
    """A second stream, and the events that order it with the first."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.stream = cupy.cuda.Stream()
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]

    def fork(self, stream: Any) -> None:
        """Let the second stream wait for the first."""
        self._tie(stream or self._cupy.cuda.get_current_stream(), self.stream, self._events[0])

    def join(self, stream: Any) -> None:
        """Let the first stream wait for the second."""
        self._tie(self.stream, stream or self._cupy.cuda.get_current_stream(), self._events[1])

    def _tie(self, first: Any, then: Any, event: Any) -> None:
        event.record(first)
        then.wait_event(event)


def memory_of(target: Target) -> Memory:
    """Return the memory for kernels of a target. An architecture without a device uses the host's."""
    return HostMemory() if target.device is None else DeviceMemory(target.device.ordinal)


@contextmanager
def enough_memory(memory: Memory, what: str) -> Iterator[None]:
    """Turn a lack of memory into a UsageError with the purpose and the memory in use."""
    try:
        yield
    except MemoryError as error:
        held = f"{memory.used_bytes() / 2**30:.1f} GiB held by then"
        raise UsageError(
            f"{what} does not fit into memory ({held}): {error}; fewer sequences, pages or copies of weights need less"
        ) from error


def copy_rows(into: Any, source: Any) -> None:
    """Copy rows, with or without gaps between them, bit for bit. An open tape records the copy like a launch.

    Shapes and types are equal and the last axis is contiguous. ContractError otherwise.
    """
    to, of = view_of(into), view_of(source)
    if to.shape != of.shape or to.dtype != of.dtype or (to.device < 0) is not (of.device < 0):
        raise ContractError(f"copy_rows: {to.dtype} {to.shape} and {of.dtype} {of.shape} do not fit each other")
    if to.size == 0:
        return
    if to.device < 0:
        enqueue(lambda stream=None: np.copyto(into, source))
    else:
        enqueue(_DeviceCopy(to, of))


def zero(array: Any) -> None:
    """Fill a contiguous array with zero bytes."""
    if isinstance(array, np.ndarray):
        array[...] = 0
        return
    import cupy

    array.data.memset_async(0, array.nbytes, cupy.cuda.get_current_stream())


class _DeviceCopy:
    """One copy on a device, of rows with or without gaps."""

    __slots__ = ("_keep", "_places", "_size")

    def __init__(self, into: ArrayView, source: ArrayView) -> None:
        width, rows = _row_bytes(into), into.shape[0]
        if into.is_contiguous and source.is_contiguous:
            width, rows = width * rows, 1
        self._size = (width, rows)
        self._places = (into.pointer, _pitch(into, width), source.pointer, _pitch(source, width))
        self._keep = (into, source)

    def __call__(self, stream: object | None = None) -> None:
        import cupy

        pointer = stream_pointer(stream)
        runtime = cupy.cuda.runtime
        to, to_pitch, of, of_pitch = self._places
        if self._size[1] == 1:
            runtime.memcpyAsync(to, of, self._size[0], runtime.memcpyDeviceToDevice, pointer)
        else:
            runtime.memcpy2DAsync(to, to_pitch, of, of_pitch, *self._size, runtime.memcpyDeviceToDevice, pointer)


def _row_bytes(view: ArrayView) -> int:
    inner = ArrayView(view.pointer, view.dtype, view.shape[1:], view.strides[1:], view.device, True, view.owner)
    if not inner.is_contiguous:
        raise ContractError(
            f"copy_rows: shape {view.shape} has strides {view.strides}, expected gaps between rows only"
        )
    return prod(view.shape[1:]) * view.dtype.itemsize


def _pitch(view: ArrayView, width: int) -> int:
    return max(view.strides[0], width) if view.shape[0] > 1 else width


def need_device(target: Target, what: str) -> None:
    """Refuse an architecture without a device. UsageError names the purpose."""
    if not target.is_cpu and target.device is None:
        raise UsageError(f"{what}: {target} is an architecture without a device: build a plan, or name a device")
