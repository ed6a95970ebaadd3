"""Host kernels of the NVFP4 GEMV. All are :func:`project`, with the result divided among the outputs."""

from typing import Any

import numpy as np
from kernel_muster.plugins._gates import gdn_gates
from kernel_muster.plugins._reference import Array, bf16, project, silu_mul
from kernel_muster.plugins.causal_conv1d.cpu import causal_conv1d_update
from kernel_muster.plugins.nvfp4_gemv.rows import split_qg, split_qkvz
from kernel_muster.registry.contract.weights import Bf16Weight


def w4a16_gemv(x: Array, w: Any, out: Array) -> None:
    """Write ``out = x w^T``: ``x [M, K]`` BF16, ``w (N, K)`` NVFP4, ``out [M, N]`` BF16."""
    out[...] = project(x, w)


def w4a16_gemv_qg(x: Array, w: Any, head_dim: int, out_q: Array, out_gate: Array) -> None:
    """Write query and gate ``[M, Q]`` BF16 of ``w (2Q, K)`` NVFP4. Its rows alternate by head: q, gate, q, ..."""
    split_qg(project(x, w), head_dim, out_q, out_gate)


def w4a16_gemv_dual(x: Array, w_a: Any, w_b: Any, out_a: Array, out_b: Array) -> None:
    """Write ``out_a = x w_a^T`` and ``out_b = x w_b^T``: BF16 ``[M, A]`` and ``[M, B]`` of NVFP4 weights."""
    out_a[...] = project(x, w_a)
    out_b[...] = project(x, w_b)


def w4a16_gemv_qgkv(
    x: Array,
    w: Any,
    w_a: Any,
    w_b: Any,
    head_dim: int,
    out_q: Array,
    out_gate: Array,
    out_a: Array,
    out_b: Array,
) -> None:
    """Run :func:`w4a16_gemv_qg` and :func:`w4a16_gemv_dual`."""
    w4a16_gemv_qg(x, w, head_dim, out_q, out_gate)
    w4a16_gemv_dual(x, w_a, w_b, out_a, out_b)


def w4a16_gemv_dual_silu(x: Array, w_gate: Any, w_up: Any, out: Array) -> None:
    """Write ``out = silu(x w_gate^T) * (x w_up^T)``, ``[M, N]`` BF16 of NVFP4 weights; both rounded to BF16 first."""
    gate, up = bf16(project(x, w_gate)), bf16(project(x, w_up))
    for row in range(x.shape[0]):
        out[row] = silu_mul(gate[row], up[row])


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
    """Write ``out_qkv [M, 2 keys + values]`` and ``out_z [M, values]`` BF16; layout of ``w``: :func:`qkvz_rows`."""
    split_qkvz(project(x, w), key_heads, key_dim, value_heads, value_dim, out_qkv, out_z)


def w4a16_gemv_gdn_in(
    x: Array,
    w: Any,
    w_ba: Array,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    a_log: Array,
    dt_bias: Array,
    conv_weight: Array,
    state: Array,
    slots: Array,
    out_qkv: Array,
    out_z: Array,
    out_decay: Array,
    out_beta: Array,
) -> None:
    """Run :func:`w4a16_gemv_qkvz`, the convolution of q, k and v, and the gates of ``x w_ba^T``.

    ``x [M, K]``, ``w_ba [2 Hv, K]`` (beta of all value heads, then alpha), ``conv_weight [C, 4]``, ``state [R, C, 3]``
    and the first two outputs are BF16; ``a_log, dt_bias [Hv]`` and the gates ``[M, Hv]`` FP32; ``slots [M]`` int32.
    Projections are rounded to BF16 first. A slot of -1 is padding: q, k and v are zeros, and no state
    moves.
    """
    qkv = np.empty_like(out_qkv)
    split_qkvz(project(x, w), key_heads, key_dim, value_heads, value_dim, qkv, out_z)
    causal_conv1d_update(qkv, conv_weight, state, slots, out_qkv)
    ba = bf16(project(x, Bf16Weight(w_ba)))
    for row in range(x.shape[0]):
        beta, alpha = np.split(ba[row], 2)
        out_decay[row], out_beta[row] = gdn_gates(alpha, beta, a_log, dt_bias)
