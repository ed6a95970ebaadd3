"""Host kernels of the norm family."""

import numpy as np
from kernel_muster.plugins._reference import F32, Array, f32, ordered_sum, silu_mul


def _normalised(row: Array, eps: np.float32) -> F32:
    """Return one row ``[H]`` divided by its root mean square, in FP32."""
    wide = f32(row)
    mean = ordered_sum(wide * wide) / np.float32(wide.size)
    normalised: F32 = wide * (np.float32(1) / np.sqrt(mean + eps))
    return normalised


def rms_norm(x: Array, weight: Array, eps: np.float32, weight_offset: np.float32, out: Array) -> None:
    """Write ``out [M, H]`` BF16, the norm of ``x [M, H]`` BF16 times ``weight_offset + weight [H]`` BF16."""
    scale = weight_offset + f32(weight)
    for row in range(x.shape[0]):
        out[row] = _normalised(x[row], eps) * scale


def rms_norm_residual(
    x: Array, residual: Array, weight: Array, eps: np.float32, weight_offset: np.float32, out: Array
) -> None:
    """Add ``x`` to ``residual [M, H]`` BF16 in place, and write the norm of the rounded sum to ``out``."""
    for row in range(x.shape[0]):
        residual[row] = f32(residual[row]) + f32(x[row])
    rms_norm(residual, weight, eps, weight_offset, out)


def rms_norm_gated(x: Array, gate: Array, weight: Array, eps: np.float32, out: Array) -> None:
    """Write ``out [M, H]`` BF16, the norm of ``x`` times ``weight [H]`` (FP32 or BF16) times ``silu(gate)``."""
    for row in range(x.shape[0]):
        out[row] = silu_mul(gate[row], _normalised(x[row], eps) * f32(weight))
