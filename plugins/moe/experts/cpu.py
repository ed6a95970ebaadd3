"""Host code that the grouped and the pairwise experts share.

Both paths round gate and up to BF16 before the activation, and an expert's result before the weighted sum, so that
they give the same bits whichever the dispatch chooses.
"""

from typing import Any

import numpy as np
from kernel_muster.plugins._reference import (
    F32,
    Array,
    bf16,
    check_indices,
    f32,
    project,
    silu_mul,
)
from kernel_muster.registry.errors import ContractError


def gate_up(x: Array, w_gate: Any, w_up: Any) -> F32:
    """Return ``silu(x w_gate^T) * (x w_up^T)``, gate and up rounded to BF16 first."""
    gate, up = bf16(project(x, w_gate)), bf16(project(x, w_up))
    return np.array([silu_mul(*rows) for rows in zip(gate, up, strict=True)], np.float32)


def weighted_sum(y: Array, weights: Array) -> F32:
    """Return the sum of the rows of ``y [T, H]`` BF16 times ``weights [T]`` FP32, in order, FP32."""
    total = np.zeros(y.shape[1], np.float32)
    for row, weight in zip(y, weights, strict=True):
        total += f32(row) * weight
    return total


def check_slots(owner: str, slots: Array) -> None:
    """Refuse a slot that is neither one of them nor -1, and one that is there twice (ContractError)."""
    check_indices(owner, "slots", np.where(slots == -1, 0, slots), slots.size)
    named = slots[slots >= 0]
    if np.unique(named).size != named.size:
        raise ContractError(f"{owner}: slots names a slot twice, expected each of 0 to {slots.size - 1} at most once")
