"""Host kernels of routing: scores, the choice of experts, and the order by expert."""

from typing import Any

import numpy as np
from kernel_muster.plugins._reference import F32, Array, check_indices, f32, ordered_sum, project, sigmoid
from kernel_muster.registry.errors import ContractError


def moe_router_logits_f32(x: Array, w: Any, out: Array) -> None:
    """Write ``out [M, E]`` FP32 ``= x w^T``: ``x [M, H]`` BF16, ``w (E, H)`` BF16."""
    out[...] = project(x, w)


def moe_topk_softmax(logits: Array, top_k: int, out_ids: Array, out_weights: Array) -> None:
    """Choose the ``top_k`` largest of each row of ``logits [M, E]`` (BF16 or FP32), of equal ones the lowest index.

    The softmax is monotonous, so the choice is made on the logits, where rounding makes no ties. Weights ``[M, T]``
    FP32 are the softmax over all E in FP32, renormalised to sum 1; ids ``[M, T]`` int32 in falling order. A row with
    NaN or +infinity, or without a finite value, raises ContractError.
    """
    rows = f32(logits)
    _check_scores("moe_topk_softmax", rows)
    for row, values in enumerate(rows):
        chosen = _largest(values, top_k)
        powers = np.exp(values.astype(np.float64) - np.float64(values.max())).astype(np.float32)
        out_ids[row] = chosen
        out_weights[row] = _renormalised((powers / ordered_sum(powers))[chosen])


def moe_topk_sigmoid(logits: Array, bias: Array | None, top_k: int, out_ids: Array, out_weights: Array) -> None:
    """Choose by sigmoid score, as :func:`moe_topk_softmax` does by softmax.

    ``bias [E]`` FP32 is added to the score for the choice only. Without one the choice is made on the logits, because
    the sigmoid of large logits rounds to one. If all chosen scores of a row are zero, ContractError follows.
    """
    rows = f32(logits)
    _check_scores("moe_topk_sigmoid", rows)
    for row, values in enumerate(rows):
        scores = sigmoid(values)
        chosen = _largest(values if bias is None else scores + bias, top_k)
        if not scores[chosen].any():
            raise ContractError(f"moe_topk_sigmoid: every chosen score of row {row} is zero, expected one above zero")
        out_ids[row] = chosen
        out_weights[row] = _renormalised(scores[chosen])


def moe_sort_by_expert(ids: Array, experts: int, out_slots: Array, out_offsets: Array, out_work: Array) -> None:
    """Write the slots of ``ids [M, T]`` int32 by expert, then by slot, and where each expert's slots begin.

    ``out_slots [M*T]`` and ``out_offsets [experts + 1]`` are int32, and so is the work list ``out_work [experts, 4]``:
    (expert, begin, end, count) for each of count experts that have slots, in order, then (-1, 0, 0, count). A slot of
    id -1 is left out; -1 fills the end. Any other id outside the experts raises ContractError.
    """
    check_ids("moe_sort_by_expert", ids, experts)
    start = 0
    for expert in range(experts):
        slots = np.flatnonzero(ids == expert)
        out_offsets[expert] = start
        out_slots[start : start + slots.size] = slots
        start += slots.size
    out_offsets[experts] = start
    out_slots[start:] = -1
    owners = np.flatnonzero(np.diff(out_offsets))
    out_work[...] = (-1, 0, 0, owners.size)
    out_work[: owners.size, :3] = np.stack([owners, out_offsets[owners], out_offsets[owners + 1]], axis=1)


def moe_local_ids(ids: Array, first: int, experts: int, out: Array) -> None:
    """Write ``out [M, T]`` int32: ``ids - first`` where that is one of ``experts``, else -1."""
    local = ids.astype(np.int64) - first
    out[...] = np.where((local >= 0) & (local < experts), local, -1)


def check_ids(owner: str, ids: Array, experts: int) -> None:
    """Raise ContractError for an id that is neither an expert nor -1 (no expert)."""
    check_indices(owner, "ids", np.where(ids == -1, 0, ids), experts)


def _check_scores(owner: str, rows: F32) -> None:
    for row, values in enumerate(rows):
        if not np.isfinite(values.max()):  # the largest is NaN if any is
            raise ContractError(f"{owner}: the largest logit of row {row} is {values.max()}, expected a finite number")


def _largest(values: F32, count: int) -> Array:
    """Return the indices of the ``count`` largest, largest first; a stable sort leaves ties in index order."""
    return np.argsort(-values, kind="stable")[:count]


def _renormalised(weights: F32) -> F32:
    """Divide by the sum, added in order of choice."""
    total = np.float32(0)
    for weight in weights:
        total += weight
    return weights / total
