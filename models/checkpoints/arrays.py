"""Small plain tensors: norms, gates, convolutions, decay rates."""

import math
from typing import Any

import numpy as np
from kernel_muster.models.checkpoints.checkpoint import Checkpoint
from kernel_muster.models.checkpoints.errors import CheckpointError
from kernel_muster.models.checkpoints.finite import check_finite
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.contract.dtypes import numpy_dtype
from numpy.typing import NDArray

# Kernels read these in FP32 (a BF16 value is one exactly); the gated norm's weight they read in either type.
_FP32 = (".A_log", ".dt_bias")
_EITHER = (".linear_attn.norm.weight",)


def read_array(checkpoint: Checkpoint, name: str, spec: WeightSpec) -> NDArray[Any]:
    """Return a tensor as BF16 (FP32 where kernels read that), in the shape asked for; axes of size 1 may differ.

    NaN and infinities are refused.
    FP32 becomes BF16 only where every value is one exactly; CheckpointError otherwise: nothing is rounded silently.
    """
    entry = checkpoint.entry(name)
    value = checkpoint.tensor(name, ("BF16", "F32"))
    if spec.quant != "array":
        raise CheckpointError(entry.file, name, f"{spec.quant} {spec.shape} for {spec.name}", "a plain array")
    if _squeezed(value.shape) != _squeezed(spec.shape):
        wanted = f"shape {list(spec.shape)} for {spec.name}"
        raise CheckpointError(entry.file, name, wanted, entry.described())
    # A rate of zero has this logarithm: its state forgets nothing.
    check_finite(checkpoint, name, value, allowed=-math.inf if name.endswith(".A_log") else None)
    value = value.reshape(spec.shape)
    if name.endswith(_FP32):
        return value.astype(np.float32)
    if entry.dtype == "BF16" or name.endswith(_EITHER):
        return value
    narrow = value.astype(numpy_dtype("bf16"))
    if not np.array_equal(narrow.astype(np.float32), value):
        raise CheckpointError(entry.file, name, "BF16, or FP32 values that are BF16 exactly", entry.described())
    return narrow


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
