"""Arrays of any library as one view: pointer, dtype, shape and strides, without a copy.

NumPy arrays are host memory. CuPy arrays, torch tensors, and whatever speaks ``__cuda_array_interface__`` or DLPack are
device memory. BF16 is recognised by its own dtype only: what a library hides behind a void type is refused.
"""

from math import prod
from typing import Any

import numpy as np
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.values import frozen

HOST = -1
# torch spells its dtypes; these are the ones that contracts use.
_TORCH_DTYPES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "f16",
    "torch.float32": "f32",
    "torch.float64": "f64",
    "torch.int32": "i32",
    "torch.int64": "i64",
    "torch.uint8": "u8",
    "torch.uint32": "u32",
    "torch.bool": "bool",
    "torch.float8_e4m3fn": "e4m3",
}


@frozen
class ArrayView:
    """What a contract and a launch need to know of an array. ``strides`` are bytes; ``device`` is HOST or an ordinal.

    ``owner`` is the array itself, or what was made of it, and must live as long as the pointer is used.
    """

    pointer: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int
    is_writable: bool
    owner: Any

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is row-major without gaps; axes of length one do not count."""
        step = self.dtype.itemsize
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length > 1 and stride != step:
                return self.size == 0
            step *= length
        return True


def view_of(value: Any) -> ArrayView:
    """Return the view of an array.

    ContractError, worded to follow the array's name, if it is none or of a dtype that nothing here knows.
    """
    if isinstance(value, np.ndarray):
        pointer = value.__array_interface__["data"][0]
        return ArrayView(pointer, value.dtype, value.shape, value.strides, HOST, value.flags.writeable, value)
    library = type(value).__module__.partition(".")[0]
    if library == "torch":
        return _torch_view(value)
    if library == "cupy":
        return _cupy_view(value)
    if hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
        return _foreign_view(value)
    raise ContractError(f"is {type(value).__name__}")


def dtype_of_torch(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype that carries one of torch's; ContractError, as of :func:`view_of`, if there is none."""
    name = _TORCH_DTYPES.get(str(dtype))
    if name is None:
        raise ContractError(f"has dtype {dtype}")
    return numpy_dtype(name)


def _torch_view(tensor: Any) -> ArrayView:
    dtype = dtype_of_torch(tensor.dtype)
    device = HOST if tensor.device.type == "cpu" else tensor.device.index
    if tensor.device.type not in ("cpu", "cuda"):
        raise ContractError(f"lies on {tensor.device}")
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    return ArrayView(tensor.data_ptr(), dtype, tuple(tensor.shape), strides, device, True, tensor)


def _cupy_view(array: Any) -> ArrayView:
    if array.dtype.type is np.void:  # BF16 has a type of its own, although its kind is void too
        raise ContractError(f"has dtype {array.dtype}, which hides what its values are (BF16 travels through DLPack)")
    return ArrayView(array.data.ptr, array.dtype, array.shape, array.strides, array.device.id, True, array)


def _foreign_view(value: Any) -> ArrayView:
    """Import through DLPack where it is spoken: unlike the older interface it knows BF16."""
    import cupy

    try:
        array = cupy.from_dlpack(value) if hasattr(value, "__dlpack__") else cupy.asarray(value)
    except Exception as error:  # noqa: BLE001  (producers raise whatever they like)
        raise ContractError(f"is {type(value).__name__}, which CuPy cannot import without a copy ({error})") from None
    return _cupy_view(array)


def stream_pointer(stream: object | None) -> int:
    """Return the driver's handle of a stream: CuPy's, torch's, a number, or None for CuPy's current one."""
    if stream is None:
        import cupy

        stream = cupy.cuda.get_current_stream()
    if isinstance(stream, int):
        return stream
    pointer = getattr(stream, "ptr", None)
    if pointer is None:
        pointer = getattr(stream, "cuda_stream", None)
    if pointer is None:
        raise ContractError(f"stream is {type(stream).__name__}, expected a CuPy or torch stream, or its address")
    return int(pointer)
