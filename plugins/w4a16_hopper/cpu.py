"""The host kernel of the Hopper family."""

from typing import Any

from kernel_muster.plugins._reference import Array, project


def w4a16_hopper_gemm(x: Array, w: Any, out: Array) -> None:
    """Write ``out = x w^T``: ``x [M, K]`` BF16, ``w (N, K)`` NVFP4, ``out [M, N]`` BF16."""
    out[...] = project(x, w)
