"""Values that are numbers: a NaN or an infinity in a weight spoils all rows, or gives other tokens in silence."""

from typing import Any

import numpy as np
from kernel_muster.models.checkpoints.checkpoint import Checkpoint
from kernel_muster.models.checkpoints.errors import CheckpointError
from numpy.typing import NDArray

# Bits of the exponent: all of them are set in NaN and infinities, and in nothing else.
_EXPONENT: dict[int, np.uint16 | np.uint32] = {2: np.uint16(0x7F80), 4: np.uint32(0x7F800000)}
# Elements looked at together: their masked copy stays in the cache, and a table of 2 GB costs no second one.
_CHUNK = 1 << 20


def check_finite(checkpoint: Checkpoint, name: str, value: NDArray[Any], allowed: float | None = None) -> None:
    """Refuse NaN and infinities in a BF16 or FP32 tensor; ``allowed`` may stand in it. CheckpointError says where."""
    exponent = _EXPONENT[value.dtype.itemsize]
    bits = np.ascontiguousarray(value).reshape(-1).view(exponent.dtype)
    for start in range(0, bits.size, _CHUNK):
        part = bits[start : start + _CHUNK]
        if (part & exponent).max() != exponent:
            continue
        values = part.view(value.dtype).astype(np.float32)
        wrong = ~np.isfinite(values) if allowed is None else ~(np.isfinite(values) | (values == allowed))
        if wrong.any():
            at = int(np.argmax(wrong))
            place = [int(i) for i in np.unravel_index(start + at, value.shape)]
            file = checkpoint.entry(name).file
            raise CheckpointError(file, name, "finite numbers", f"{values[at]} at {place}")
