"""Splits of fused projections whose rows are grouped by head. Assignments only, so any array library serves."""

from typing import Any


def split_qg(fused: Any, head_dim: int, out_q: Any, out_gate: Any) -> None:
    """Split ``(M, 2Q)`` rows, per head ``[q(D) | gate(D)]``, into q ``(M, Q)`` and gate ``(M, Q)``."""
    rows = fused.shape[0]
    heads = fused.reshape(rows, fused.shape[1] // (2 * head_dim), 2, head_dim)
    out_q[...] = heads[:, :, 0].reshape(rows, -1)
    out_gate[...] = heads[:, :, 1].reshape(rows, -1)


def split_qkvz(
    fused: Any, key_heads: int, key_dim: int, value_heads: int, value_dim: int, out_qkv: Any, out_z: Any
) -> None:  # fmt: skip
    """Split rows, per key head ``[q | k | v of its value heads | z of them]``.

    ``out_qkv (M, 2*key_heads*key_dim + value_heads*value_dim)`` becomes ``[q all heads | k all | v all]``, ``out_z
    (M, value_heads*value_dim)`` all of z. The order is that of in_proj_qkvz in the Qwen3-Next checkpoints.
    """
    rows, values = fused.shape[0], value_heads // key_heads * value_dim
    groups = fused.reshape(rows, key_heads, 2 * key_dim + 2 * values)
    keys = key_heads * key_dim
    out_qkv[:, :keys] = groups[:, :, :key_dim].reshape(rows, -1)
    out_qkv[:, keys : 2 * keys] = groups[:, :, key_dim : 2 * key_dim].reshape(rows, -1)
    out_qkv[:, 2 * keys :] = groups[:, :, 2 * key_dim : 2 * key_dim + values].reshape(rows, -1)
    out_z[...] = groups[:, :, 2 * key_dim + values :].reshape(rows, -1)
