"""Host kernels of the residual_add family."""

from kernel_muster.plugins._reference import Array, f32, sigmoid


def bf16_residual_add(x: Array, residual: Array) -> None:
    """Add ``x [M, H]`` BF16 to ``residual [M, H]`` BF16 in place, in FP32."""
    for row in range(x.shape[0]):
        residual[row] = f32(residual[row]) + f32(x[row])


def sigmoid_gate_mul(x: Array, gate: Array, out: Array) -> None:
    """Write ``out = x * sigmoid(gate)``, all ``[M, H]`` BF16, FP32 inside."""
    for row in range(x.shape[0]):
        out[row] = f32(x[row]) * sigmoid(f32(gate[row]))
