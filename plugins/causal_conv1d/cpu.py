"""Host kernels of the causal_conv1d family. Kernels of many rows loop over the step of one row."""

import numpy as np
from kernel_muster.plugins._reference import Array, f32, ordered_sum, sigmoid
from kernel_muster.plugins._sequences import PADDING, check_slots, rows_of


def causal_conv1d_update(x: Array, weight: Array, state: Array, slots: Array, out: Array) -> None:
    """Advance one row a sequence: ``x, out [S, C]``, ``weight [C, W]``, ``state [R, C, W - 1]``, all BF16.

    ``out = silu(sum_w weight[c, w] window[c, w])`` over the sequence's last W inputs. The state in slot ``slots[s]``
    (int32) holds all but the newest, oldest first, and moves on by one. Products are exact in FP32, their sum and the
    silu are FP32, the result is rounded once. A slot of -1 is padding: its row of ``out`` is zero and no state moves.
    Other slots outside the pool, or named twice, raise ContractError before any write.
    """
    check_slots("causal_conv1d::causal_conv1d_update", slots, state.shape[0])
    for row, slot in enumerate(slots.tolist()):
        _step(x[row], weight, state, slot, out[row])


def causal_conv1d_update_prefill(
    x: Array, cu_rows: Array, weight: Array, state: Array, slots: Array, out: Array
) -> None:
    """Advance sequence s by its rows ``cu_rows[s]`` to ``cu_rows[s + 1]`` of ``x, out [M, C]``, one after the other.

    Bits, shapes and refusals are those of :func:`causal_conv1d_update` row by row.
    """
    owner = "causal_conv1d::causal_conv1d_update_prefill"
    check_slots(owner, slots, state.shape[0])
    for slot, rows in zip(slots.tolist(), rows_of(owner, cu_rows, x.shape[0]), strict=True):
        for row in rows:
            _step(x[row], weight, state, slot, out[row])


def causal_conv1d_verify_n(
    x: Array, cu_rows: Array, weight: Array, state: Array, slots: Array, out: Array, out_states: Array
) -> None:
    """Run :func:`causal_conv1d_update_prefill`, and write the state after each row to ``out_states``.

    To roll back a sequence to row r, copy ``out_states[r]`` (``[M, C, W - 1]`` BF16) to its slot.
    """
    owner = "causal_conv1d::causal_conv1d_verify_n"
    check_slots(owner, slots, state.shape[0])
    for slot, rows in zip(slots.tolist(), rows_of(owner, cu_rows, x.shape[0]), strict=True):
        for row in rows:
            _step(x[row], weight, state, slot, out[row])
            out_states[row] = 0 if slot == PADDING else state[slot]


def _step(x: Array, weight: Array, state: Array, slot: int, out: Array) -> None:
    """Advance one sequence by one row ``x, out [C]``."""
    if slot == PADDING:
        out[...] = 0
        return
    window = np.concatenate([state[slot], x[:, None]], axis=1)
    total = ordered_sum(f32(window) * f32(weight))
    out[...] = total * sigmoid(total)
    state[slot] = window[:, 1:]
