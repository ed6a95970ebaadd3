"""One safetensors file: its header is checked by the format's own library, its values are memory-mapped views.

The library's NumPy face cannot return FP8 and copies what it returns; the header's offsets are therefore read here,
after the library has accepted them (types, sizes, no gap, no overlap, nothing beyond the end). What it lets pass, a
tensor that stands twice in a header, is refused here. Format: https://huggingface.co/docs/safetensors.
"""

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from kernel_muster.models.checkpoints.documents import regular_size, unique
from kernel_muster.models.checkpoints.errors import CheckpointError
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.plugin_code.regular_files import open_regular
from kernel_muster.registry.values import frozen
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

#: Size and time of the last change.
FileState = tuple[int, int]
_LENGTH_BYTES = 8
#: Element types of the format that a weight of ours can have, and the NumPy type that carries each.
CARRIERS = {"U8": "u8", "BF16": "bf16", "F8_E4M3": "e4m3", "F32": "f32"}


@frozen
class TensorEntry:
    """Where a tensor lies: type as the format names it, shape, its bytes in the file, and which state of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    state: FileState

    def described(self) -> str:
        """Say type and shape."""
        return f"{self.dtype} {list(self.shape)}"


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the entries of one file; CheckpointError if it is truncated or malformed."""
    regular_size(file)
    try:
        with safe_open(file, framework="np"):
            pass
        with file.open("rb") as stream:
            state = _state(stream.fileno())
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            table = json.loads(stream.read(length), object_pairs_hook=unique)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(file, None, "a whole safetensors file", str(error)) from None
    table.pop("__metadata__", None)
    return {name: _entry(name, file, row, _LENGTH_BYTES + length, state) for name, row in table.items()}


def _entry(name: str, file: Path, row: dict[str, Any], base: int, state: FileState) -> TensorEntry:
    begin, end = row["data_offsets"]
    return TensorEntry(name, file, row["dtype"], tuple(row["shape"]), base + begin, end - begin, state)


def _state(handle: int) -> FileState:
    status = os.fstat(handle)
    return status.st_size, status.st_mtime_ns


class MappedFile:
    """A file mapped once, read-only; a tensor is a view of it and costs no memory until it is read."""

    def __init__(self, file: Path) -> None:
        handle = open_regular(file)  # what stood there when its header was read may be a pipe by now
        try:
            self._state = _state(handle)
            self._map = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        self.file = file

    def view(self, entry: TensorEntry) -> NDArray[Any]:
        """Return a tensor, read-only; only one that the file holds unaligned is copied."""
        if self._state != entry.state:
            wanted, got = (f"{size} bytes last written at {at / 1e9:.6f}" for size, at in (entry.state, self._state))
            raise CheckpointError(self.file, entry.name, wanted, f"{got}: the file changed since it was opened")
        dtype = numpy_dtype(CARRIERS[entry.dtype])
        count = entry.size_bytes // dtype.itemsize
        flat = np.frombuffer(self._map, dtype, count, entry.start) if count else np.empty(0, dtype)
        aligned = flat if flat.flags.aligned else flat.copy()
        return aligned.reshape(entry.shape)
