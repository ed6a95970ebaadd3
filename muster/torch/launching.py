"""From the arguments of an operator to a launch: on the host at once, on a device in torch's current stream."""

from collections.abc import Sequence
from typing import Any

import torch
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.torch.arrays import host_array


class TorchMemory:
    """Device memory of torch's allocator in its current stream: inside a capture it belongs to the graph."""

    def __init__(self, ordinal: int) -> None:
        self._device = torch.device("cuda", ordinal)

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Return bytes that hold anything."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def zeros(self, size_bytes: int) -> torch.Tensor:
        """Return bytes that are zero before what follows in the stream."""
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)


_MEMORIES: dict[int, TorchMemory] = {}


def launch_on_host(handle: AnyHandle, arguments: Sequence[Any]) -> None:
    """Run a host kernel on NumPy views of tensors; ContractError for a tensor that lies elsewhere."""
    handle(*(host_array(one) if isinstance(one, torch.Tensor) else one for one in arguments))


def launch_on_device(handle: AnyHandle, arguments: Sequence[Any], ordinal: int) -> None:
    """Enqueue in torch's current stream of a device, with scratch and counters of torch's allocator."""
    memory = _MEMORIES.get(ordinal)
    if memory is None:
        memory = _MEMORIES[ordinal] = TorchMemory(ordinal)
    stream = torch.cuda.current_stream(ordinal).cuda_stream
    if torch.cuda.current_device() == ordinal:
        handle.enqueue(arguments, stream, memory)
        return
    with torch.cuda.device(ordinal):
        handle.enqueue(arguments, stream, memory)


def launch(handle: AnyHandle, arguments: Sequence[Any], ordinal: int | None) -> None:
    """Launch on a device, or on the host where ``ordinal`` is None."""
    if ordinal is None:
        launch_on_host(handle, arguments)
    else:
        launch_on_device(handle, arguments, ordinal)
