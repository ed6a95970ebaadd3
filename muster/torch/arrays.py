"""Tensors and arrays as each other, always without a copy."""

from typing import Any

import numpy as np
import torch
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.errors import UsageError

# NumPy has neither type: it sees their bits, and ml_dtypes gives those their meaning.
_BITS = {torch.bfloat16: (torch.int16, "bf16"), torch.float8_e4m3fn: (torch.uint8, "e4m3")}
_PLAIN = frozenset(
    {
        torch.float16, torch.float32, torch.float64, torch.int32, torch.int64,
        torch.uint8, torch.uint32, torch.bool,
    }
)  # fmt: skip


def host_array(tensor: torch.Tensor) -> Any:
    """Return a NumPy view of a tensor in host memory. Any other tensor stays unchanged, for a contract to refuse."""
    if tensor.device.type != "cpu":
        return tensor
    tensor = tensor.detach()
    if tensor.dtype in _BITS:
        bits, name = _BITS[tensor.dtype]
        return tensor.view(bits).numpy().view(numpy_dtype(name))
    return tensor.numpy() if tensor.dtype in _PLAIN else tensor


def tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of an array: NumPy's, CuPy's, torch's, or a DLPack object."""
    if isinstance(array, torch.Tensor):
        return array
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if not array.flags.writeable:
        raise UsageError(f"an array of shape {array.shape} is read-only, which no tensor can be: copy it")
    for dtype, (bits, name) in _BITS.items():
        if array.dtype == numpy_dtype(name):
            return torch.from_numpy(array.view(str(bits).removeprefix("torch."))).view(dtype)
    return torch.from_numpy(array)


def is_array(value: object) -> bool:
    """Whether a value is an array with axes. An array without axes is a number."""
    return isinstance(value, torch.Tensor | np.ndarray) or (hasattr(value, "__dlpack__") and hasattr(value, "shape"))


def prepared_array(tensor: torch.Tensor) -> Any:
    """Return the array for a kernel's ``prepare``: NumPy's on the host, CuPy's on a device."""
    if tensor.device.type == "cpu":
        return host_array(tensor)
    import cupy

    return cupy.from_dlpack(tensor.detach())
