"""Host kernels of the experts: grouped, pairwise, and the shared expert.

Both paths round gate and up to BF16 before the activation, and an expert's result before the weighted sum, so that
they give the same bits whichever the dispatch chooses.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from kernel_muster.plugins._reference import (
    F32,
    Array,
    bf16,
    check_indices,
    f32,
    ordered_sum,
    project,
    sigmoid,
    silu_mul,
)
from kernel_muster.plugins.moe.router_cpu import check_ids
from kernel_muster.registry.errors import ContractError


def grouped_gate_up(
    x: Array, w_gate: Any, w_up: Any, slots: Array, offsets: Array, work: Array, top_k: int, out: Array
) -> None:
    """Write ``out [S, I]`` BF16 in sorted order: ``silu(x w_gate^T) * (x w_up^T)`` of each slot's token and expert.

    ``x [M, H]`` BF16; weights ``(E, I, H)`` NVFP4; ``slots [S]``, ``offsets [E + 1]`` and ``work [E, 4]`` int32 as
    ``moe_sort_by_expert`` makes them, S = M * top_k; anything else there raises ContractError. Rows of no expert are
    zeros.
    """
    _check_order("moe_w4a16_grouped_gate_up", slots, offsets, work)
    out[offsets[-1] :] = 0
    for expert, rows in _groups(offsets):
        out[rows] = gate_up(x[slots[rows] // top_k], w_gate[expert], w_up[expert])


def grouped_down(h: Array, w_down: Any, slots: Array, offsets: Array, work: Array, out: Array) -> None:
    """Write ``out [S, H]`` BF16 in sorted order: ``h [S, I]`` BF16 times its expert of ``w_down (E, H, I)`` NVFP4.

    Rows of no expert are zeros.
    """
    _check_order("moe_w4a16_grouped_down", slots, offsets, work)
    out[offsets[-1] :] = 0
    for expert, rows in _groups(offsets):
        out[rows] = project(h[rows], w_down[expert])


def grouped_down_atomic(
    h: Array, w_down: Any, slots: Array, offsets: Array, work: Array, weights: Array, out: Array
) -> None:
    """Write ``out [M, H]`` BF16: the sum of every slot's down projection times its weight of ``weights [M, T]`` FP32.

    On a device the additions are atomic, in no fixed order; here they run by expert.
    """
    _check_order("moe_w4a16_grouped_down_atomic_c4", slots, offsets, work)
    choices = weights.shape[1]
    total = np.zeros(out.shape, np.float32)
    for expert, rows in _groups(offsets):
        for slot, y in zip(slots[rows], project(h[rows], w_down[expert]), strict=True):
            total[slot // choices] += weights[slot // choices, slot % choices] * y
    out[...] = total


def moe_silu_mul(gate: Array, up: Array, out: Array) -> None:
    """Write ``out = silu(gate) * up``, all ``[M, I]`` BF16, one row a slot."""
    for row in range(gate.shape[0]):
        out[row] = silu_mul(gate[row], up[row])


def unpermute_reduce(y: Array, slots: Array, weights: Array, out: Array) -> None:
    """Write ``out [M, H]`` BF16, the sum over t, in order of t, of ``weights [M, T]`` FP32 times ``y [S, H]`` BF16.

    Row ``i`` of ``y`` belongs to slot ``slots[i]``; -1 stands for none, and a slot that is not there counts nothing. A
    slot that is there twice raises ContractError.
    """
    _check_slots("moe_unpermute_reduce_indexed", slots)
    position = np.full(slots.size, -1)
    position[slots[slots >= 0]] = np.flatnonzero(slots >= 0)
    for token, places in enumerate(position.reshape(weights.shape)):
        is_there = places >= 0
        out[token] = _weighted_sum(y[places[is_there]], weights[token][is_there])


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
    counts nothing.
    """
    check_ids("moe_fused down", ids, w_down.shape[0])
    for token in range(out.shape[0]):
        choices = np.flatnonzero(ids[token] >= 0)
        y = np.empty((choices.size, out.shape[1]), out.dtype)
        for row, choice in enumerate(choices):
            y[row] = project(h[token, choice : choice + 1], w_down[ids[token, choice]])[0]
        out[token] = _weighted_sum(y, weights[token][choices])


def moe_shared_gate_add(x: Array, gate_weight: Array, shared: Array, out: Array) -> None:
    """Add ``sigmoid(x . gate_weight) * shared`` to ``out [M, H]`` BF16 in place.

    ``x``, ``shared [M, H]`` and ``gate_weight [H]`` are BF16; the dot product is FP32.
    """
    for row in range(out.shape[0]):
        out[row] = f32(out[row]) + shared_gate(x[row], gate_weight) * f32(shared[row])


def unpermute_shared_add(
    y: Array, slots: Array, weights: Array, x: Array, gate_weight: Array, shared: Array, out: Array
) -> None:
    """Write ``out [M, H]`` BF16: what ``unpermute_reduce`` writes, with what ``moe_shared_gate_add`` adds to it."""
    unpermute_reduce(y, slots, weights, out)
    moe_shared_gate_add(x, gate_weight, shared, out)


def shared_gate(x: Array, gate_weight: Array) -> F32:
    """Return ``sigmoid(x . gate_weight)`` of one row, FP32."""
    return sigmoid(ordered_sum(f32(x) * f32(gate_weight)))


def gate_up(x: Array, w_gate: Any, w_up: Any) -> F32:
    """Return ``silu(x w_gate^T) * (x w_up^T)``, gate and up rounded to BF16 first."""
    gate, up = bf16(project(x, w_gate)), bf16(project(x, w_up))
    return np.array([silu_mul(*rows) for rows in zip(gate, up, strict=True)], np.float32)


def _weighted_sum(y: Array, weights: Array) -> F32:
    total = np.zeros(y.shape[1], np.float32)
    for row, weight in zip(y, weights, strict=True):
        total += f32(row) * weight
    return total


def _groups(offsets: Array) -> list[tuple[int, slice]]:
    """Return each expert that has slots, with its rows in sorted order."""
    bounds = [int(offset) for offset in offsets]
    return [(e, slice(*rows)) for e, rows in enumerate(pairwise(bounds)) if rows[0] < rows[1]]


def _check_slots(owner: str, slots: Array) -> None:
    """Refuse a slot that is neither one of them nor -1, and one that is there twice (ContractError)."""
    check_indices(owner, "slots", np.where(slots == -1, 0, slots), slots.size)
    named = slots[slots >= 0]
    if np.unique(named).size != named.size:
        raise ContractError(f"{owner}: slots names a slot twice, expected each of 0 to {slots.size - 1} at most once")


def _check_order(owner: str, slots: Array, offsets: Array, work: Array) -> None:
    _check_slots(owner, slots)
    count = int((slots >= 0).sum())
    if (slots[:count] < 0).any():
        raise ContractError(f"{owner}: slots has a -1 before place {count}, expected those of no expert at the end")
    if offsets[0] != 0 or offsets[-1] != count or (np.diff(offsets) < 0).any():
        text = np.array2string(offsets, threshold=16)
        raise ContractError(f"{owner}: offsets is {text}, expected to rise from 0 to the {count} slots")
    owners = np.flatnonzero(np.diff(offsets))
    listed = np.stack([owners, offsets[owners], offsets[owners + 1]], axis=1)
    if (
        (work[: owners.size, :3] != listed).any()
        or (work[owners.size :, 0] != -1).any()
        or (work[:, 3] != owners.size).any()
    ):
        raise ContractError(f"{owner}: work does not list the {owners.size} experts that offsets give slots")
