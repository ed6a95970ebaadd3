"""Host kernels of a step's experts in two launches: exactly the kernels that compute each part alone."""

from typing import Any

import numpy as np
from kernel_muster.plugins._reference import Array, f32, project
from kernel_muster.plugins.moe.combine import cpu as combine
from kernel_muster.plugins.moe.experts.cpu import gate_up
from kernel_muster.plugins.moe.pairwise.cpu import pairwise_down, pairwise_gate_up
from kernel_muster.plugins.moe.router.cpu import moe_topk_softmax


def fused_gate_up(
    x: Array, logits: Array, w_gate: Any, w_up: Any, shared_gate: Any, shared_up: Any, gate_weight: Array,
    out_ids: Array, out_weights: Array, out: Array, out_shared: Array, out_gate: Array,
) -> None:  # fmt: skip
    """Choose by ``logits [M, E]``, and write ``silu(x w_gate^T) * (x w_up^T)`` of each choice and of the shared expert.

    ``x [M, H]`` BF16; experts' weights ``(E, I, H)``, the shared expert's ``(J, H)``, NVFP4; ``gate_weight [H]`` BF16.
    Ids i32 and weights f32 ``[M, T]``, ``out [M, T, I]`` and ``out_shared [M, J]`` BF16, ``out_gate [M]`` f32 the
    sigmoid of ``x . gate_weight``. Raises as ``moe_topk_softmax`` does.
    """
    moe_topk_softmax(logits, out_ids.shape[1], out_ids, out_weights)
    pairwise_gate_up(x, out_ids, w_gate, w_up, out)
    for row in range(x.shape[0]):
        out_shared[row] = gate_up(x[row : row + 1], shared_gate, shared_up)[0]
        out_gate[row] = combine.shared_gate(x[row], gate_weight)


def fused_down(
    h: Array, h_shared: Array, ids: Array, weights: Array, gate: Array, w_down: Any, shared_down: Any, out: Array
) -> None:
    """Write ``out [M, H]`` BF16: the weighted sum of the choices' down projections, plus the gated shared expert's.

    ``h [M, T, I]`` and ``h_shared [M, J]`` BF16, ``ids`` i32 and ``weights`` f32 ``[M, T]``, ``gate [M]`` f32; weights
    ``(E, H, I)`` and ``(H, J)`` NVFP4. A choice of id -1 counts as zero.
    """
    pairwise_down(h, ids, weights, w_down, out)
    shared = np.empty_like(out)
    for row in range(out.shape[0]):
        shared[row] = project(h_shared[row : row + 1], shared_down)[0]
        out[row] = f32(out[row]) + gate[row] * f32(shared[row])
