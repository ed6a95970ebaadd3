"""Host kernels of the GEMV family. All are :func:`project` with the result split as the form says."""

from typing import Any

from kernel_muster.plugins._reference import Array, project


def w4a16_gemv(x: Array, w: Any, out: Array) -> None:
    """Write ``out = x w^T``: ``x [M, K]`` BF16, ``w (N, K)`` NVFP4, ``out [M, N]`` BF16."""
    out[...] = project(x, w)


def w4a16_gemv_qg(x: Array, w: Any, head_dim: int, out_q: Array, out_gate: Array) -> None:
    """Write query and gate ``[M, Q]`` BF16 of ``w (2Q, K)`` NVFP4, whose rows alternate by head: q, gate, q, ..."""
    y = project(x, w)
    for start in range(0, out_q.shape[1], head_dim):
        stop = start + head_dim
        out_q[:, start:stop] = y[:, 2 * start : start + stop]
        out_gate[:, start:stop] = y[:, start + stop : 2 * stop]


def w4a16_gemv_dual(x: Array, w_a: Any, w_b: Any, out_a: Array, out_b: Array) -> None:
    """Write ``out_a = x w_a^T`` and ``out_b = x w_b^T``: BF16 ``[M, A]`` and ``[M, B]`` of NVFP4 weights."""
    out_a[...] = project(x, w_a)
    out_b[...] = project(x, w_b)


def w4a16_gemv_qkvz(
    x: Array,
    w: Any,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    out_qkv: Array,
    out_z: Array,
) -> None:
    """Write ``out_qkv [M, 2 keys + values]`` and ``out_z [M, values]`` BF16; ``w`` is as :func:`qkvz_rows` says."""
    y = project(x, w)
    keys, values = key_heads * key_dim, value_heads * value_dim
    each = values // key_heads
    group = 2 * key_dim + 2 * each
    for head in range(key_heads):
        at, key, value = head * group, head * key_dim, head * each
        out_qkv[:, key : key + key_dim] = y[:, at : at + key_dim]
        out_qkv[:, keys + key : keys + key + key_dim] = y[:, at + key_dim : at + 2 * key_dim]
        at += 2 * key_dim
        out_qkv[:, 2 * keys + value : 2 * keys + value + each] = y[:, at : at + each]
        out_z[:, value : value + each] = y[:, at + each : at + 2 * each]


def dense_bf16(x: Array, w: Any, out: Array) -> None:
    """Write ``out = x w^T``: ``x [M, K]`` BF16, ``w (N, K)`` BF16, ``out [M, N]`` BF16."""
    out[...] = project(x, w)
