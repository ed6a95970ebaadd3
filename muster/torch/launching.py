"""From the arguments of an operator to a launch: on the host at once, on a device in torch's current stream.

Torch's allocator gives a program the same addresses again and again. A launch is therefore kept under the addresses of
its arguments and all other checked values, and enqueued again if all are equal.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from kernel_muster.registry.launch.prepared import InOrder, PreparedLaunch
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.torch.arrays import host_array

Key = tuple[Any, ...]
_MOST_KEPT = 8192


class TorchMemory:
    """Device memory of torch's allocator in its current stream: inside a capture it belongs to the graph."""

    def __init__(self, ordinal: int) -> None:
        self._device = torch.device("cuda", ordinal)

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Return uninitialised bytes."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def zeros(self, size_bytes: int) -> torch.Tensor:
        """Return bytes that are zero before later work in the stream."""
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)


class KeptLaunches:
    """Launches by all their inputs: kernel, stream, and every argument.

    They keep no argument alive: a caller has arguments at the same addresses. A launch with its own memory, such as
    scratch, is not kept, and no launch is kept inside a capture: a graph must own its memory.
    """

    def __init__(self, most: int = _MOST_KEPT) -> None:
        self._most = most
        self._kept: dict[Key, tuple[AnyHandle, Callable[[object], None]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of kept launches."""
        return len(self._kept)

    def enqueue(self, handle: AnyHandle, arguments: Sequence[Any], stream: int, memory: Any) -> None:
        """Enqueue a kept launch, or check the arguments, enqueue, and keep the launch."""
        key = key_of(handle, stream, arguments)
        found = self._kept.get(key) if key is not None else None
        if found is not None:
            found[1](stream)
            return
        launch = handle.borrow(arguments, stream, memory)
        launch(stream)
        if key is not None and isinstance(launch, PreparedLaunch | InOrder) and not launch.owns_memory:
            self._keep(key, handle, launch)

    def _keep(self, key: Key, handle: AnyHandle, launch: Callable[[object], None]) -> None:
        with self._lock:
            if len(self._kept) >= self._most:  # the older half has had its time
                for old in list(self._kept)[: self._most // 2]:
                    del self._kept[old]
            self._kept[key] = handle, launch  # the handle too: its identity is a part of the key


def key_of(handle: AnyHandle, stream: int, arguments: Sequence[Any]) -> Key | None:
    """Return all inputs of a launch as a key. None for an argument without equality."""
    parts: list[Any] = [id(handle), stream]
    try:
        for one in arguments:
            if isinstance(one, torch.Tensor):
                parts.append(_tensor_key(one))
            elif one is None or isinstance(one, int | float):
                parts.append(_number_key(one))
            else:
                parts.append(tuple((name, _part_key(value)) for name, value in vars(one).items()))
                parts.append(type(one))
        key = tuple(parts)
        hash(key)
    except TypeError:
        return None
    return key


def _tensor_key(tensor: torch.Tensor) -> Key:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _number_key(value: float | None) -> Key:
    # 1, 1.0 and True are equal, and 0.0 equals -0.0: none may replace another.
    return type(value), value, repr(value) if value == 0 else ""


def _part_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor_key(value)
    if isinstance(value, np.ndarray):
        if value.ndim:
            raise TypeError("an array of the host has no key: its values may change")
        return value.dtype, value.item()
    return value


_MEMORIES: dict[int, TorchMemory] = {}
_LAUNCHES = KeptLaunches()


def launch_on_host(handle: AnyHandle, arguments: Sequence[Any]) -> None:
    """Run a host kernel on NumPy views of tensors. ContractError for a tensor in other memory."""
    handle(*(host_array(one) if isinstance(one, torch.Tensor) else one for one in arguments))


def launch_on_device(handle: AnyHandle, arguments: Sequence[Any], ordinal: int) -> None:
    """Enqueue in torch's current stream of a device, with scratch and counters of torch's allocator."""
    if torch.cuda.current_device() != ordinal:
        with torch.cuda.device(ordinal):
            launch_on_device(handle, arguments, ordinal)
        return
    memory = _MEMORIES.get(ordinal)
    if memory is None:
        memory = _MEMORIES[ordinal] = TorchMemory(ordinal)
    stream = torch.cuda.current_stream(ordinal).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        handle.borrow(arguments, stream, memory)(stream)
    else:
        _LAUNCHES.enqueue(handle, arguments, stream, memory)


def launch(handle: AnyHandle, arguments: Sequence[Any], ordinal: int | None) -> None:
    """Launch on a device, or on the host if ``ordinal`` is None."""
    if ordinal is None:
        launch_on_host(handle, arguments)
    else:
        launch_on_device(handle, arguments, ordinal)
