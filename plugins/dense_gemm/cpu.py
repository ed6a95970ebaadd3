"""Host kernel of products with BF16 weights."""

from typing import Any

from kernel_muster.plugins._reference import Array, project


def dense_bf16(x: Array, w: Any, out: Array) -> None:
    """Write ``out = x w^T``: ``x [M, K]`` BF16, ``w (N, K)`` BF16, ``out [M, N]`` BF16."""
    out[...] = project(x, w)
