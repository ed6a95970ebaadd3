"""Host kernels of the grouped experts."""

from itertools import pairwise
from typing import Any

import numpy as np
from kernel_muster.plugins._reference import (
    Array,
    project,
    silu_mul,
)
from kernel_muster.plugins.moe.experts.cpu import check_slots, gate_up
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


def _groups(offsets: Array) -> list[tuple[int, slice]]:
    """Return each expert that has slots, with its rows in sorted order."""
    bounds = [int(offset) for offset in offsets]
    return [(e, slice(*rows)) for e, rows in enumerate(pairwise(bounds)) if rows[0] < rows[1]]


def _check_order(owner: str, slots: Array, offsets: Array, work: Array) -> None:
    check_slots(owner, slots)
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
