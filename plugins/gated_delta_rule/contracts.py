"""Contracts of the gated delta rule; each row tier is a contract of its own, because its limit is."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import (
    BF16_ROUNDING,
    F32_ROUNDING,
    F64,
    Array,
    Dims,
    exact_sigmoid,
    f64,
    random_cu_rows,
    random_slots,
)
from kernel_muster.plugins._rows import after_each_row, row_after_row, rows_of_sequences, single_rows
from kernel_muster.plugins.ssm_preprocess.contracts import HEAD_SCALARS, KEYS, VALUES, head_dims
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import Dim, Param, ScalarParam, Signature, TensorParam

_POOL = ("value_heads", "key_dim", "value_dim")
_STATE = TensorParam("state", "f32", ("R", *_POOL), "inout")
_OUT_STATES = TensorParam("out_states", "f32", ("M", *_POOL), "out")
_CU_ROWS = TensorParam("cu_rows", "i32", ("S + 1",))
_GROUPS: tuple[tuple[Dim, Dim], ...] = (("value_heads", "key_heads"),)

_DEEPEST = 128


def _state_tolerance(steps: int) -> Tolerance:
    """Bound a state after some steps. No step enlarges an earlier error: its matrix has norm below 1."""
    return Tolerance(
        relative=4 * F32_ROUNDING,
        absolute=steps * 4 * (_DEEPEST + 16) * 2 * _DEEPEST**0.5 * F32_ROUNDING,
        derivation=f"{steps} steps, each a dot product of Dk <= {_DEEPEST} terms of a unit key and a column below 2 "
        "sqrt(Dk), in any order: Dk * 2^-24 * |k| |s|; as much for the delta's product, the key's length, and the "
        "update; 16 FP32 operations",
    )


def _out_absolute(steps: int) -> float:
    """Return the state's bound times the length of a query, ``Dk^-0.5``."""
    return _state_tolerance(steps).absolute / float(np.sqrt(_DEEPEST))


def _out_tolerance(steps: int) -> Tolerance:
    return Tolerance(
        relative=BF16_ROUNDING,
        absolute=_out_absolute(steps),
        derivation="one rounding to BF16 (2^-8); a query of length Dk^-0.5 times what a column of the state errs by: "
        + _state_tolerance(steps).derivation,
    )


# Of the draws below, each head's root mean square is above 1/32, and |weight * silu(gate)| below 6.
_NORM_TOLERANCE = Tolerance(
    relative=3 * BF16_ROUNDING,
    absolute=6 * 32 * _out_absolute(1),
    derivation="the mixed value rounded to BF16, which its mean square repeats, and the output: three times 2^-8; the "
    "step's error over a root mean square above 1/32, times a weight and gate below 6",
)


def _exact_step(row: F64, decay: F64, beta: F64, dims: Dims, memory: F64) -> tuple[F64, F64]:
    """Return state and output of one row, as one matrix ``decay (I - beta k k^T)`` a head."""
    keys = dims["key_heads"] * dims["key_dim"]
    q, k = (part.reshape(dims["key_heads"], -1) for part in (row[:keys], row[keys : 2 * keys]))
    v = row[2 * keys :].reshape(dims["value_heads"], -1)
    states, outs = np.empty_like(memory), np.empty_like(v)
    for head in range(dims["value_heads"]):
        of = head * dims["key_heads"] // dims["value_heads"]
        key, query = k[of] / np.sqrt(k[of] @ k[of] + 1e-6), q[of] / np.sqrt(q[of] @ q[of] + 1e-6)
        keep = decay[head] * (np.eye(len(key)) - beta[head] * np.outer(key, key))
        states[head] = keep @ memory[head] + beta[head] * np.outer(key, v[head])
        outs[head] = query @ states[head] / np.sqrt(dims["key_dim"])
    return states, outs.ravel()


def _exact_rows(arguments: Arguments, dims: Dims, cu_rows: Array) -> dict[str, Any]:
    """Return every output for rows that ``cu_rows`` divides into sequences."""
    qkv, decay, beta = (f64(arguments[name]) for name in ("qkv", "decay", "beta"))
    state = f64(arguments["state"])
    out = np.zeros((len(qkv), dims["value_heads"] * dims["value_dim"]))
    states = np.zeros((len(qkv), *state.shape[1:]))
    for slot, start, stop in zip(arguments["slots"], cu_rows[:-1], cu_rows[1:], strict=True):
        for row in range(start, stop if slot >= 0 else start):
            state[slot], out[row] = _exact_step(qkv[row], decay[row], beta[row], dims, state[slot])
            states[row] = state[slot]
    return {"state": state, "out": out, "out_states": states}


def _exact_decode(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    exact = _exact_rows(arguments, dims, np.arange(dims["S"] + 1))
    return {name: exact[name] for name in ("state", "out")}


def _exact_decode_norm(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    exact = _exact_decode(arguments, dims)
    by_head = (dims["S"], dims["value_heads"], dims["value_dim"])
    mixed, gate = exact["out"].reshape(by_head), f64(arguments["gate"]).reshape(by_head)
    root = np.sqrt(np.mean(mixed**2, axis=-1, keepdims=True) + np.float64(np.float32(arguments["eps"])))
    out = mixed / root * f64(arguments["norm_weight"]) * gate * exact_sigmoid(gate)
    return {"state": exact["state"], "out": out.reshape(exact["out"].shape)}


def _exact_prefill(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    exact = _exact_rows(arguments, dims, arguments["cu_rows"])
    return {name: exact[name] for name in ("state", "out")}


def _exact_verify(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    return _exact_rows(arguments, dims, arguments["cu_rows"])


def _exact_chunk(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    return _exact_rows(arguments, dims, np.array([0, dims["M"]]))


def _gates(rows: int, dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Decay and beta between 0 and 1, some of them exactly 0 or 1."""
    shape = (rows, dims["value_heads"])
    decay, beta = rng.uniform(0.3, 1.0, shape).astype(np.float32), rng.random(shape).astype(np.float32)
    decay.ravel()[3::11], beta.ravel()[5::7] = 1.0, 0.0
    return {"decay": decay, "beta": beta}


def _decode_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    weight = (1.0 + 0.1 * rng.standard_normal(dims["value_dim"])).astype(np.float32)
    return {**_gates(dims["S"], dims, rng), "slots": random_slots(dims, rng), "norm_weight": weight}


def _plain_decode_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    made = _decode_inputs(dims, rng)
    del made["norm_weight"]
    return made


def _ragged_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    return {
        **_gates(dims["M"], dims, rng),
        "slots": random_slots(dims, rng),
        "cu_rows": random_cu_rows(dims, rng),
    }


def _chunk_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    return {**_gates(dims["M"], dims, rng), "slots": rng.integers(0, dims["R"], 1, np.int32)}


def _params(rows: str, slots: Dim, first: tuple[Param, ...] = (), last: tuple[Param, ...] = ()) -> tuple[Param, ...]:
    """Return the parameters of a contract; ``first`` follows qkv, ``last`` precedes the state."""
    return (
        TensorParam("qkv", "bf16", (rows, f"2*{KEYS} + {VALUES}")),
        *first,
        TensorParam("decay", "f32", (rows, "value_heads")),
        TensorParam("beta", "f32", (rows, "value_heads")),
        *HEAD_SCALARS,
        *last,
        _STATE,
        TensorParam("slots", "i32", (slots,)),
        TensorParam("out", "bf16", (rows, VALUES), "out"),
    )


# The heads of the models: 32 or 48 value heads over 16 key heads, all of 128.
_MODEL_35B, _MODEL_27B = head_dims(16, _DEEPEST, 32, _DEEPEST), head_dims(16, _DEEPEST, 48, _DEEPEST)
_ONE = (
    Case("one_row", {"S": 1, "R": 2, **head_dims(1, _DEEPEST, 2, 64)}),
    Case("three_values_a_key", {"S": 1, "R": 1, **head_dims(2, 5, 6, 7)}),
    Case("one_value", {"S": 1, "R": 3, **head_dims(1, 1, 1, 1)}),
    Case("model_27b", {"S": 1, "R": 2, **_MODEL_27B}),
    Case("no_sequences", {"S": 0, "R": 2, **head_dims(2, 8, 4, 8)}),
)
_MANY = (
    *_ONE,
    Case("sequences_2", {"S": 2, "R": 2, **head_dims(2, 16, 2, 16)}),
    Case("sequences_7", {"S": 7, "R": 9, **head_dims(2, 33, 4, 17)}),
    Case("model_35b", {"S": 7, "R": 7, **_MODEL_35B}),
)
_NORMED = tuple(Case(case.name, case.dims, {"eps": 1e-6}) for case in _MANY if case.name != "one_value")

_BY_ROW = ("qkv", "decay", "beta", "out")

DECODE = Contract(
    "gated_delta_rule_decode",
    "one row of one sequence: the state decays, learns beta (v - k . state) at k, and is read at q",
    Signature(_params("S", "S"), _GROUPS, (("S", 1),)),
    _exact_decode,
    _ONE,
    _out_tolerance(1),
    inputs=_plain_decode_inputs,
    output_tolerances={"state": _state_tolerance(1)},
)
DECODE_STRIDED = Contract(
    "gated_delta_rule_decode_strided",
    "one row a sequence, each with its slot of the state pool; slot -1 is padding",
    Signature(_params("S", "S"), _GROUPS),
    _exact_decode,
    _MANY,
    _out_tolerance(1),
    inputs=_plain_decode_inputs,
    output_tolerances={"state": _state_tolerance(1)},
    by_rows={DECODE.name: row_after_row(_BY_ROW)},
)
_NORM = (
    TensorParam("gate", "bf16", ("S", VALUES)),
    TensorParam("norm_weight", "f32|bf16", ("value_dim",)),
    ScalarParam("eps", "f32", minimum=0.0),
)
DECODE_NORM_STRIDED = Contract(
    "gated_delta_rule_decode_norm_strided",
    "gated_delta_rule_decode_strided with rms_norm_gated of each head's result: the bits of both, zeros for padding",
    Signature(_params("S", "S", last=_NORM), _GROUPS),
    _exact_decode_norm,
    _NORMED,
    _NORM_TOLERANCE,
    inputs=_decode_inputs,
    output_tolerances={"state": _state_tolerance(1)},
)

_LONGEST = 37
_RAGGED = (
    Case("one_row", {"M": 1, "S": 1, "R": 2, **head_dims(1, _DEEPEST, 2, 64)}),
    Case("one_sequence", {"M": _LONGEST, "S": 1, "R": 2, **head_dims(1, 16, 2, 8)}),
    Case("ragged", {"M": 23, "S": 6, "R": 7, **head_dims(2, 5, 6, 7)}),
    Case("model_35b", {"M": 9, "S": 3, "R": 3, **_MODEL_35B}),
    Case("more_sequences_than_rows", {"M": 2, "S": 4, "R": 4, **head_dims(2, 8, 2, 8)}),
    Case("no_rows", {"M": 0, "S": 2, "R": 2, **head_dims(1, 8, 1, 8)}),
)
_RAGGED_TOLERANCES = {name: _state_tolerance(_LONGEST) for name in ("state", "out_states")}

# What a row may err by in chunks, in units of 2^-24, by six standard deviations: terms of random sign add up as roots
# of sums of squares. v - k . S, of a unit key, a Gaussian state and a Gaussian v, is below 12 and so is what a row
# learns; entries of T are below 1, and |T row| below sqrt(2), since sums of beta (k . steps . k)^2 are below 1.
_PAIR = 2**6  # an FP32 operand as two BF16: 2^-18
_ROW_SPREADS = {
    "k S, its entries below 6": 6 * _PAIR,
    "T (v - k S)": 3 * _PAIR * 12 * 2**0.5,
    "the product of keys, 8 + 4 sums, at 64 rows before": 24 * 12 * 64**0.5,
    "forward substitution, 64 sums of terms below 1, twice": 64**0.5 * 64**0.5 * 12,
    "what a row learns as a pair": 12 * _PAIR,
}
# Sums of tensor cores cut off, by 2^-23 a step: 16 steps of k S below 2 sqrt(Dk), 12 of T (v - k S), 8 of the state.
_ROW_CUTS = 2 * (16 * 2 * _DEEPEST**0.5 + 12 * 12 * 2**0.5 + 8 * 2 * _DEEPEST**0.5)
_ROW_ERROR = (6 * sum(_ROW_SPREADS.values()) + _ROW_CUTS) * F32_ROUNDING


def _chunked_tolerances(rows: int) -> tuple[Tolerance, Tolerance]:
    """Return the bounds of outputs and state after some rows. No later row enlarges these errors."""
    state = rows**0.5 * _ROW_ERROR
    parts = ", ".join(f"{name} {spread:.0f}" for name, spread in _ROW_SPREADS.items())
    why = (
        f"a row errs by six times, in units of 2^-24: {parts}; and by sums of tensor cores, {_ROW_CUTS:.0f}; {rows} "
        "rows of random sign"
    )
    outs = (rows**0.5 + 3) * _ROW_ERROR / _DEEPEST**0.5
    of_outs = f"one rounding to BF16 (2^-8); a query of length Dk^-0.5: {why}; its own, as three rows"
    return Tolerance(BF16_ROUNDING, outs, of_outs), Tolerance(4 * F32_ROUNDING, state, why)


_LONGEST_CHUNKED = 200
_ONE_HEAD, _TWO_A_KEY = head_dims(1, _DEEPEST, 1, 32), head_dims(2, _DEEPEST, 4, 64)
_CHUNKED = (
    Case("one_row", {"M": 1, "S": 1, "R": 2, **_ONE_HEAD}),
    Case("one_chunk", {"M": 64, "S": 1, "R": 2, **_ONE_HEAD}),
    Case("one_above_a_chunk", {"M": 65, "S": 1, "R": 2, **_ONE_HEAD}),
    Case("four_chunks", {"M": _LONGEST_CHUNKED, "S": 1, "R": 1, **head_dims(1, _DEEPEST, 2, 96)}),
    Case("ragged", {"M": _LONGEST_CHUNKED, "S": 6, "R": 7, **_TWO_A_KEY}),
    Case("model_35b", {"M": 9, "S": 3, "R": 3, **_MODEL_35B}),
    Case("more_sequences_than_rows", {"M": 2, "S": 4, "R": 4, **_ONE_HEAD}),
    Case("no_rows", {"M": 0, "S": 2, "R": 2, **_ONE_HEAD}),
)
_CHUNKED_OUT, _CHUNKED_STATE = _chunked_tolerances(_LONGEST_CHUNKED)

PREFILL = Contract(
    "gated_delta_rule_prefill",
    "the step of one row, for all rows of each sequence in their order",
    Signature(_params("M", "S", first=(_CU_ROWS,)), _GROUPS),
    _exact_prefill,
    _RAGGED,
    _out_tolerance(_LONGEST),
    inputs=_ragged_inputs,
    output_tolerances={"state": _state_tolerance(_LONGEST)},
    by_rows={DECODE.name: rows_of_sequences(_BY_ROW)},
)
PREFILL_CHUNKED = Contract(
    "gated_delta_rule_prefill_chunked",
    "as gated_delta_rule_prefill, within a bound: rows are taken together; key_dim is 128, value_dim a multiple of 32",
    Signature(_params("M", "S", first=(_CU_ROWS,)), _GROUPS),
    _exact_prefill,
    _CHUNKED,
    _CHUNKED_OUT,
    inputs=_ragged_inputs,
    output_tolerances={"state": _CHUNKED_STATE},
)
VERIFY = Contract(
    "gated_delta_rule_verify_n",
    "as gated_delta_rule_prefill, with the state after each row, so that rejected rows can be taken back",
    Signature((*_params("M", "S", first=(_CU_ROWS,)), _OUT_STATES), _GROUPS),
    _exact_verify,
    _RAGGED,
    _out_tolerance(_LONGEST),
    inputs=_ragged_inputs,
    output_tolerances=_RAGGED_TOLERANCES,
    by_rows={PREFILL.name: after_each_row(_BY_ROW)},
)


def _chunk(rows: int) -> Contract:
    sizes = (
        ("one_row", 1, (2, 8, 4, 8)),
        ("deep", rows, (1, _DEEPEST, 2, 64)),
        ("odd", rows, (2, 5, 6, 7)),
        ("model_27b", rows, (16, _DEEPEST, 48, _DEEPEST)),
    )
    cases = [Case(name, {"M": m, "R": 3, **head_dims(*heads)}) for name, m, heads in sizes]
    return Contract(
        f"gated_delta_rule_chunk{rows}",
        f"at most {rows} rows of one sequence in one launch, with the state after each row",
        Signature((*_params("M", 1), _OUT_STATES), _GROUPS, (("M", rows),)),
        _exact_chunk,
        (*cases, Case("no_rows", {"M": 0, "R": 2, **head_dims(1, 8, 1, 8)})),
        _out_tolerance(rows),
        inputs=_chunk_inputs,
        output_tolerances={name: _state_tolerance(rows) for name in ("state", "out_states")},
        by_rows={DECODE.name: single_rows(_BY_ROW)},
    )


CHUNK2, CHUNK3 = _chunk(2), _chunk(3)
