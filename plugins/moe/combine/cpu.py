"""Host kernels that reduce experts' results to tokens, and add the shared expert."""

import numpy as np
from kernel_muster.plugins._reference import (
    F32,
    Array,
    f32,
    ordered_sum,
    sigmoid,
)
from kernel_muster.plugins.moe.experts.cpu import check_slots, weighted_sum


def unpermute_reduce(y: Array, slots: Array, weights: Array, out: Array) -> None:
    """Write ``out [M, H]`` BF16, the sum over t, in order of t, of ``weights [M, T]`` FP32 times ``y [S, H]`` BF16.

    Row ``i`` of ``y`` belongs to slot ``slots[i]``, or to no slot if that is -1. Missing slots count as zero. A slot
    that is listed twice raises ContractError.
    """
    check_slots("moe_unpermute_reduce_indexed", slots)
    position = np.full(slots.size, -1)
    position[slots[slots >= 0]] = np.flatnonzero(slots >= 0)
    for token, places in enumerate(position.reshape(weights.shape)):
        is_there = places >= 0
        out[token] = weighted_sum(y[places[is_there]], weights[token][is_there])


def moe_shared_gate_add(x: Array, gate_weight: Array, shared: Array, out: Array) -> None:
    """Add ``sigmoid(x . gate_weight) * shared`` to ``out [M, H]`` BF16 in place.

    ``x``, ``shared [M, H]`` and ``gate_weight [H]`` are BF16; the dot product is FP32.
    """
    for row in range(out.shape[0]):
        out[row] = f32(out[row]) + shared_gate(x[row], gate_weight) * f32(shared[row])


def unpermute_shared_add(
    y: Array, slots: Array, weights: Array, x: Array, gate_weight: Array, shared: Array, out: Array
) -> None:
    """Write ``out [M, H]`` BF16: ``unpermute_reduce``, then ``moe_shared_gate_add``."""
    unpermute_reduce(y, slots, weights, out)
    moe_shared_gate_add(x, gate_weight, shared, out)


def shared_gate(x: Array, gate_weight: Array) -> F32:
    """Return ``sigmoid(x . gate_weight)`` of one row, FP32."""
    return sigmoid(ordered_sum(f32(x) * f32(gate_weight)))
