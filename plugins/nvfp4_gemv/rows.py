"""The row order of fused projections, and the division of their outputs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def qkvz_rows(
    key_heads: int, key_dim: int, value_heads: int, value_dim: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows of the fused weight in the order ``[q of all heads | k of all | v of all]``, and those of z.

    The weight is grouped by key head, each group ``[q (key_dim) | k (key_dim) | v | z]``, where v and z hold
    ``value_heads / key_heads`` heads of ``value_dim`` each. Source: ``in_proj_qkvz`` of Qwen3-Next.
    """
    values = value_heads // key_heads * value_dim
    rows = np.arange(key_heads * (2 * key_dim + 2 * values)).reshape(key_heads, -1)
    q, k, v, z = np.split(rows, [key_dim, 2 * key_dim, 2 * key_dim + values], axis=1)
    return np.concatenate([q.ravel(), k.ravel(), v.ravel()]), z.ravel()


def split_qg(qg: Array, head_dim: int, out_q: Array, out_gate: Array) -> None:
    """Copy ``qg [M, 2Q]``, by head ``[q (head_dim) | gate (head_dim)]``, to ``out_q`` and ``out_gate [M, Q]``."""
    for start in range(0, out_q.shape[1], head_dim):
        stop = start + head_dim
        out_q[:, start:stop] = qg[:, 2 * start : start + stop]
        out_gate[:, start:stop] = qg[:, start + stop : 2 * stop]


def split_qkvz(
    qkvz: Array, key_heads: int, key_dim: int, value_heads: int, value_dim: int, out_qkv: Array, out_z: Array
) -> None:
    """Copy ``qkvz [M, 2 keys + 2 values]``, grouped as in :func:`qkvz_rows`, to ``out_qkv`` and ``out_z``.

    ``out_qkv [M, 2 keys + values]`` and ``out_z [M, values]``, where keys is ``key_heads * key_dim`` and values is
    ``value_heads * value_dim``.
    """
    keys = key_heads * key_dim
    each = value_heads * value_dim // key_heads
    group = 2 * key_dim + 2 * each
    for head in range(key_heads):
        at, key, value = head * group, head * key_dim, head * each
        out_qkv[:, key : key + key_dim] = qkvz[:, at : at + key_dim]
        out_qkv[:, keys + key : keys + key + key_dim] = qkvz[:, at + key_dim : at + 2 * key_dim]
        at += 2 * key_dim
        out_qkv[:, 2 * keys + value : 2 * keys + value + each] = qkvz[:, at : at + each]
        out_z[:, value : value + each] = qkvz[:, at + each : at + 2 * each]
