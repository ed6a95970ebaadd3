"""In which order the rows of a fused GDN input projection stand."""

import numpy as np
from numpy.typing import NDArray


def qkvz_rows(
    key_heads: int, key_dim: int, value_heads: int, value_dim: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return which rows of the fused weight make ``[q of all heads | k of all heads | v of all heads]``, and which z.

    The weight is grouped by key head, each group ``[q (key_dim) | k (key_dim) | v | z]``, where v and z hold
    ``value_heads / key_heads`` heads of ``value_dim`` each. Source: ``in_proj_qkvz`` of Qwen3-Next.
    """
    values = value_heads // key_heads * value_dim
    rows = np.arange(key_heads * (2 * key_dim + 2 * values)).reshape(key_heads, -1)
    q, k, v, z = np.split(rows, [key_dim, 2 * key_dim, 2 * key_dim + values], axis=1)
    return np.concatenate([q.ravel(), k.ravel(), v.ravel()]), z.ravel()
