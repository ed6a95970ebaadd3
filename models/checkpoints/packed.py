"""NVFP4 tensors of both libraries as one logical weight: the same bytes, and a global scale that multiplies.

compressed-tensors ``nvfp4-pack-quantized``: ``weight_packed`` U8 ``[N, K/2]``, ``weight_scale`` F8_E4M3 ``[N, K/16]``,
``weight_global_scale`` F32 ``[1]`` = 6 * 448 / amax, the encode direction: FP32 1/x is taken, one rounding of at most
2^-24 relative. ModelOpt: ``weight`` U8, ``weight_scale`` F8_E4M3, ``weight_scale_2`` F32 ``[]`` = amax / (6 * 448), the
decode direction, taken as it is. Packed bytes hold the even k in the low nibble in both.
"""

import math

import numpy as np
from kernel_muster.models.checkpoints.checkpoint import Checkpoint
from kernel_muster.models.checkpoints.errors import CheckpointError
from kernel_muster.models.checkpoints.quant_config import Style
from kernel_muster.registry.contract.nvfp4 import GROUP, U8, Nvfp4Weight
from numpy.typing import NDArray

_PACKED = {"compressed-tensors": "weight_packed", "modelopt": "weight"}
_GLOBAL = {"compressed-tensors": "weight_global_scale", "modelopt": "weight_scale_2"}
_NAN, _NEGATIVE_ZERO = 0x7F, 0x80


def read_packed(checkpoint: Checkpoint, module: str, style: Style) -> Nvfp4Weight:
    """Read one module ``(N, K)``, its bytes memory-mapped; CheckpointError names the tensor that is not right."""
    name = f"{module}.{_PACKED[style]}"
    packed = checkpoint.tensor(name, ("U8",))
    entry = checkpoint.entry(name)
    if packed.ndim != 2 or packed.shape[1] % (GROUP // 2):
        raise CheckpointError(entry.file, name, f"U8 [N, K/2], K a multiple of {GROUP}", entry.described())
    scale = f"{module}.weight_scale"
    shape = (packed.shape[0], 2 * packed.shape[1] // GROUP)
    bits = checkpoint.tensor(scale, ("F8_E4M3",), shape).view(np.uint8)
    _check_scales(checkpoint, scale, bits)
    return Nvfp4Weight(packed, bits, global_scale_decode(checkpoint, module, style))


def global_scale_decode(checkpoint: Checkpoint, module: str, style: Style) -> NDArray[np.float32]:
    """Read the one FP32 scale of a module, in the direction that multiplies."""
    name = f"{module}.{_GLOBAL[style]}"
    entry = checkpoint.entry(name)
    value = checkpoint.tensor(name, ("F32",))
    if value.size != 1 or value.ndim > 1:
        raise CheckpointError(entry.file, name, "F32 [] or [1]", entry.described())
    stored = np.float32(value.reshape(()))
    if style == "modelopt":
        # Zero is what an all-zero weight has.
        if not (math.isfinite(stored) and stored >= 0):
            raise CheckpointError(entry.file, name, "a finite scale, zero or more", str(stored))
        return np.asarray(stored)
    # A subnormal 1/x would have lost bits, and an infinite one everything.
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        decode = np.float32(1) / stored
    if not np.finfo(np.float32).tiny <= decode <= np.finfo(np.float32).max:
        raise CheckpointError(entry.file, name, "a positive scale whose inverse is a normal FP32", str(stored))
    return np.asarray(decode)


def _check_scales(checkpoint: Checkpoint, name: str, bits: U8) -> None:
    """Refuse NaN and negative scales; negative zero is zero."""
    wrong = ((bits & _NAN) == _NAN) | (bits > _NEGATIVE_ZERO)
    if wrong.any():
        row, group = (int(i) for i in np.argwhere(wrong)[0])
        got = "NaN" if bits[row, group] & _NAN == _NAN else "a negative scale"
        file = checkpoint.entry(name).file
        raise CheckpointError(file, name, "scales of zero or more", f"{got} at [{row}, {group}], {wrong.sum()} in all")
