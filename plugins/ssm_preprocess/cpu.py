"""Host kernels of the ssm_preprocess family."""

from kernel_muster.plugins._gates import gdn_gates
from kernel_muster.plugins._reference import Array
from kernel_muster.plugins.nvfp4_gemv.rows import split_qg, split_qkvz


def deinterleave_qg(qg: Array, head_dim: int, out_q: Array, out_gate: Array) -> None:
    """Copy ``qg [M, 2Q]``, by head ``[q (head_dim) | gate (head_dim)]``, to ``out_q, out_gate [M, Q]``, all BF16."""
    split_qg(qg, head_dim, out_q, out_gate)


def deinterleave_qkvz(
    qkvz: Array, key_heads: int, key_dim: int, value_heads: int, value_dim: int, out_qkv: Array, out_z: Array
) -> None:
    """Copy ``qkvz [M, 2 keys + 2 values]`` to ``out_qkv [M, 2 keys + values]`` and ``out_z [M, values]``, all BF16.

    The input is grouped by key head, ``[q | k | v | z]`` a group; ``out_qkv`` is all q, then all k, then all v. keys is
    ``key_heads * key_dim``, values is ``value_heads * value_dim``.
    """
    split_qkvz(qkvz, key_heads, key_dim, value_heads, value_dim, out_qkv, out_z)


def compute_gdn_gates(a: Array, b: Array, a_log: Array, dt_bias: Array, out_decay: Array, out_beta: Array) -> None:
    """Write ``out_decay = exp(-exp(a_log) softplus(a + dt_bias))`` and ``out_beta = sigmoid(b)``, FP32 ``[M, Hv]``.

    ``a, b [M, Hv]`` are BF16, ``a_log, dt_bias [Hv]`` FP32; each row is :func:`gdn_gates`, rounded once.
    """
    for row in range(a.shape[0]):
        out_decay[row], out_beta[row] = gdn_gates(a[row], b[row], a_log, dt_bias)
