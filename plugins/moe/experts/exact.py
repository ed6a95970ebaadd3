"""Exact results of experts, in float64."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import (
    F64,
    Dims,
    exact_sigmoid,
    exact_weight,
    f64,
)
from kernel_muster.registry.contract.contracts import Arguments


def expert_of_rows(offsets: Any, slots: int) -> Any:
    """Return the expert of each row in sorted order; rows without an expert are at the end, with -1."""
    expert = np.full(slots, -1)
    expert[: offsets[-1]] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return expert


def exact_rows(x: F64, weight: Any, expert: Any) -> F64:
    """Return each row of ``x [S, K]`` times its expert of a weight ``(E, N, K)``; zeros for expert -1."""
    out = np.zeros((len(x), weight.shape[-2]))
    for e in np.unique(expert[expert >= 0]):
        rows = expert == e
        out[rows] = x[rows] @ exact_weight(weight[int(e)]).T
    return out


def exact_activation(x: F64, arguments: Arguments, expert: Any) -> F64:
    """Return ``silu(gate) * up`` for a row of ``x`` and an expert each."""
    gate, up = (exact_rows(x, arguments[name], expert) for name in ("w_gate", "w_up"))
    return gate * exact_sigmoid(gate) * up


def exact_reduced(y: F64, arguments: Arguments, dims: Dims) -> F64:
    """Return ``y [S, H]`` in sorted order, put back to its slots and summed with weights to ``[M, H]``."""
    by_slot, slots = np.zeros_like(y), arguments["slots"]
    by_slot[slots[slots >= 0]] = y[slots >= 0]
    weights = f64(arguments["weights"])
    reduced: F64 = np.einsum("mt,mth->mh", weights, by_slot.reshape(*weights.shape, dims["H"]))
    return reduced
