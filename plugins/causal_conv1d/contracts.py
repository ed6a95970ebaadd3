"""Contracts of the short causal convolution."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import (
    BF16_ROUNDING,
    EXACT,
    F32_ROUNDING,
    Array,
    Dims,
    exact_sigmoid,
    f64,
    random_cu_rows,
    random_slots,
)
from kernel_muster.plugins._rows import after_each_row, rows_of_sequences
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import Signature, TensorParam

_WEIGHT = TensorParam("weight", "bf16", ("C", "W"))
_STATE = TensorParam("state", "bf16", ("R", "C", "W - 1"), "inout")
_SLOTS = TensorParam("slots", "i32", ("S",))
_CU_ROWS = TensorParam("cu_rows", "i32", ("S + 1",))
_OUT_STATES = TensorParam("out_states", "bf16", ("M", "C", "W - 1"), "out")

_WIDEST = 8
# W products of unit Gaussians, each below 16 for as many draws as a case has, added in any order; silu' < 1.1.
_TOLERANCE = Tolerance(
    relative=BF16_ROUNDING + 16 * F32_ROUNDING,
    absolute=1.1 * 16.0 * _WIDEST**2 * F32_ROUNDING,
    derivation=f"one rounding to BF16 (2^-8); {_WIDEST} FP32 additions in any order of products below 16, passed "
    "through a silu whose slope is below 1.1; 16 FP32 roundings for the silu",
)


def _exact_windows(history: Array, count: int) -> Array:
    """Return the windows ``[count, C, W]`` that end at each of the last ``count`` columns of ``history [C, T]``."""
    width = history.shape[1] - count + 1
    return np.array([history[:, at : at + width] for at in range(count)]).reshape(count, len(history), width)


def _exact_rows(arguments: Arguments, cu_rows: Array) -> dict[str, Any]:
    """Return every output for rows that ``cu_rows`` divides into sequences."""
    x, weight, state = arguments["x"], f64(arguments["weight"]), arguments["state"].copy()
    out, states = np.zeros(x.shape), np.zeros((len(x), *state.shape[1:]), state.dtype)
    for slot, start, stop in zip(arguments["slots"], cu_rows[:-1], cu_rows[1:], strict=True):
        if slot < 0 or start == stop:
            continue
        history = np.concatenate([state[slot], x[start:stop].T], axis=1)
        windows = _exact_windows(history, stop - start)
        total = np.einsum("mcw,cw->mc", f64(windows), weight)
        out[start:stop] = total * exact_sigmoid(total)
        states[start:stop] = windows[:, :, 1:]
        state[slot] = states[stop - 1]
    return {"out": out, "state": f64(state), "out_states": f64(states)}


def _exact_update(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    exact = _exact_rows(arguments, np.arange(dims["S"] + 1))
    return {name: exact[name] for name in ("state", "out")}


def _exact_prefill(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    exact = _exact_rows(arguments, arguments["cu_rows"])
    return {name: exact[name] for name in ("state", "out")}


def _exact_verify(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    return _exact_rows(arguments, arguments["cu_rows"])


def _inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    return {"slots": random_slots(dims, rng)}


def _ragged_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    return {"slots": random_slots(dims, rng), "cu_rows": random_cu_rows(dims, rng)}


UPDATE = Contract(
    "causal_conv1d_update",
    "one row a sequence: silu of the convolution of its last W inputs, and its state moved on; slot -1 is padding",
    Signature(
        (
            TensorParam("x", "bf16", ("S", "C")),
            _WEIGHT,
            _STATE,
            _SLOTS,
            TensorParam("out", "bf16", ("S", "C"), "out"),
        )
    ),
    _exact_update,
    (
        Case("one_row", {"S": 1, "C": 128, "W": 4, "R": 1}),
        Case("model_channels", {"S": 3, "C": 10240, "W": 4, "R": 4}),
        Case("odd_channels", {"S": 5, "C": 257, "W": 4, "R": 9}),
        Case("no_memory", {"S": 2, "C": 16, "W": 1, "R": 3}),
        Case("one_step_of_memory", {"S": 3, "C": 7, "W": 2, "R": 3}),
        Case("wide_window", {"S": 17, "C": 33, "W": _WIDEST, "R": 20}),
        Case("no_sequences", {"S": 0, "C": 16, "W": 4, "R": 2}),
    ),
    _TOLERANCE,
    inputs=_inputs,
    output_tolerances={"state": EXACT},
)

_RAGGED_PARAMS = (
    TensorParam("x", "bf16", ("M", "C")),
    _CU_ROWS,
    _WEIGHT,
    _STATE,
    _SLOTS,
    TensorParam("out", "bf16", ("M", "C"), "out"),
)
_RAGGED_CASES = (
    Case("one_row", {"M": 1, "S": 1, "C": 128, "W": 4, "R": 1}),
    Case("model_channels", {"M": 5, "S": 2, "C": 8192, "W": 4, "R": 2}),
    Case("long_and_short", {"M": 75, "S": 4, "C": 72, "W": 4, "R": 5}),
    Case("one_sequence", {"M": 17, "S": 1, "C": 65, "W": 4, "R": 3}),
    Case("ragged", {"M": 23, "S": 6, "C": 33, "W": 4, "R": 7}),
    Case("shorter_than_the_window", {"M": 5, "S": 4, "C": 16, "W": _WIDEST, "R": 4}),
    Case("no_memory", {"M": 3, "S": 2, "C": 5, "W": 1, "R": 2}),
    Case("no_rows", {"M": 0, "S": 2, "C": 16, "W": 4, "R": 3}),
)
PREFILL = Contract(
    "causal_conv1d_update_prefill",
    "the update of one row, for all rows of each sequence in their order",
    Signature(_RAGGED_PARAMS),
    _exact_prefill,
    _RAGGED_CASES,
    _TOLERANCE,
    inputs=_ragged_inputs,
    output_tolerances={"state": EXACT},
    by_rows={UPDATE.name: rows_of_sequences(("x", "out"))},
)
VERIFY = Contract(
    "causal_conv1d_verify_n",
    "as causal_conv1d_update_prefill, with the state after each row, so that rejected rows can be taken back",
    Signature((*_RAGGED_PARAMS, _OUT_STATES)),
    _exact_verify,
    _RAGGED_CASES,
    _TOLERANCE,
    inputs=_ragged_inputs,
    output_tolerances={"state": EXACT, "out_states": EXACT},
    by_rows={PREFILL.name: after_each_row(("x", "out"))},
)
