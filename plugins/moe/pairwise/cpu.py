"""Host kernels of the pairwise experts."""

from typing import Any

import numpy as np
from kernel_muster.plugins._reference import (
    Array,
    project,
)
from kernel_muster.plugins.moe.experts.cpu import gate_up, weighted_sum
from kernel_muster.plugins.moe.router.cpu import check_ids


def pairwise_gate_up(x: Array, ids: Array, w_gate: Any, w_up: Any, out: Array) -> None:
    """Write ``out [M, T, I]`` BF16: ``silu(x w_gate^T) * (x w_up^T)`` of each token and chosen expert.

    ``x [M, H]`` BF16, ``ids [M, T]`` int32, weights ``(E, I, H)`` NVFP4. A choice of id -1 is zeros; any other id
    outside the experts raises ContractError.
    """
    check_ids("moe_fused gate_up", ids, w_gate.shape[0])
    for token, choice in np.ndindex(*ids.shape):
        expert = ids[token, choice]
        if expert < 0:
            out[token, choice] = 0
            continue
        out[token, choice] = gate_up(x[token : token + 1], w_gate[expert], w_up[expert])[0]


def pairwise_down(h: Array, ids: Array, weights: Array, w_down: Any, out: Array) -> None:
    """Write ``out [M, H]`` BF16, the weighted sum of the chosen experts' down projections.

    ``h [M, T, I]`` BF16, ``ids [M, T]`` int32, ``weights [M, T]`` FP32, ``w_down (E, H, I)`` NVFP4. A choice of id -1
    counts as zero.
    """
    check_ids("moe_fused down", ids, w_down.shape[0])
    for token in range(out.shape[0]):
        choices = np.flatnonzero(ids[token] >= 0)
        y = np.empty((choices.size, out.shape[1]), out.dtype)
        for row, choice in enumerate(choices):
            y[row] = project(h[token, choice : choice + 1], w_down[ids[token, choice]])[0]
        out[token] = weighted_sum(y, weights[token][choices])
