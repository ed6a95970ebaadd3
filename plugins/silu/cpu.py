"""The host kernel of the silu family."""

from kernel_muster.plugins._reference import Array, silu_mul


def silu_mul_rows(gate: Array, up: Array, out: Array) -> None:
    """Write ``out = silu(gate) * up``, all ``[M, I]`` BF16, FP32 inside."""
    for row in range(gate.shape[0]):
        out[row] = silu_mul(gate[row], up[row])
