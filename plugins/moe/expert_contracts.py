"""Contracts of the experts, grouped and pairwise, and of the shared expert."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import (
    BF16_ROUNDING,
    F32_ROUNDING,
    F64,
    Dims,
    exact_sigmoid,
    exact_weight,
    f64,
    silu_mul_contract,
)
from kernel_muster.plugins.moe.router_contracts import exact_sort, exact_work, random_ids
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam, WeightParam

_DEEPEST = 272
_IDS = TensorParam("ids", "i32", ("M", "T"))
_WEIGHTS = TensorParam("weights", "f32", ("M", "T"))
_W_GATE, _W_UP = (WeightParam(name, "nvfp4", ("E", "I", "H")) for name in ("w_gate", "w_up"))
_W_DOWN = WeightParam("w_down", "nvfp4", ("E", "H", "I"))
_OFFSETS, _WORK = TensorParam("offsets", "i32", ("E + 1",)), TensorParam("work", "i32", ("E", 4))
_WHOLE_H, _WHOLE_I = (("H", nvfp4.GROUP),), (("I", nvfp4.GROUP),)

# Inputs are scaled so that gate, up and an expert's result are unit Gaussians; five deviations bound them.
_LARGEST = 5.0


def dot_error(depth: int) -> float:
    """Bound the error of ``depth`` FP32 additions, as :func:`dot_tolerance`, for inputs scaled by 1/sqrt(depth)."""
    return float(36 * np.sqrt(depth) * F32_ROUNDING)


DOT = "FP32 sums of K products scaled by 1/sqrt(K) err by 36 sqrt(K) * 2^-24 (dot_tolerance)"


def activation_tolerance(depth: int) -> Tolerance:
    """Bound the error of ``silu(gate) * up`` of unit Gaussians that are sums over a depth."""
    return Tolerance(
        relative=4 * BF16_ROUNDING,
        absolute=_LARGEST * (0.25 * BF16_ROUNDING + 2 * dot_error(depth)),
        derivation="gate, up and output are rounded to BF16 (2^-8 each); silu'(g) * g is below 1.28 silu(g) for g > 0 "
        f"and below 0.25 for g < 0, there times |up| < 5; {DOT}, K = {depth}",
    )


def _down(depth: int) -> Tolerance:
    return Tolerance(
        relative=BF16_ROUNDING,
        absolute=dot_error(depth),
        derivation=f"one rounding to BF16; {DOT}, K = {depth}",
    )


def _reduction(depth: int) -> Tolerance:
    return Tolerance(
        relative=BF16_ROUNDING,
        absolute=_LARGEST * (BF16_ROUNDING + 16 * F32_ROUNDING) + dot_error(depth),
        derivation="output rounded to BF16; each expert's result, below 5, rounded to BF16 (2^-8) and weighted, "
        f"weights sum to 1; at most 16 FP32 additions over the choices; {DOT}, K = {depth}",
    )


def _cases(rows: tuple[int, ...], bound: Callable[[int], Tolerance], depth: str) -> tuple[Case, ...]:
    """Return cases for some rows; ``depth`` names the dimension that is summed over, which the bound depends on.

    Deep cases have few features: what they are for is every split of K, not many tiles.
    """
    most = max(rows)
    sizes = (
        ("one_group", (most, 4, 2, 16, 16)),
        ("many_experts", (most, 16, 4, 32, 48)),
        ("one_expert", (most, 1, 1, 48, 16)),
        ("all_experts", (most, 3, 3, 80, 64)),
        ("deep_k", (1, 4, 2, _DEEPEST, _DEEPEST)),
    )
    cases = [Case(name, _dims(*size)) for name, size in sizes]
    cases += [Case(f"rows_{m}", _dims(m, 8, 2, 48, 32)) for m in rows if m != most]
    hard = (("all_on_one", (most, 5, 1, 48, 32)), ("one_each", (most, most, 1, 48, 32)))
    cases += [Case(name, {**_dims(*size), name: 1}) for name, size in (*hard, ("some_absent", (most, 8, 4, 48, 32)))]
    few = min(most, 9)
    deep = (
        ("depth_512_one_token", (1, 12, 8), 512, 144),
        ("depth_512", (few, 6, 4), 512, 144),  # more than eight rows of one expert, where there are nine tokens
        ("depth_2048_one_token", (1, 12, 8), 2048, 48),
        ("depth_2048", (few, 6, 4), 2048, 48),
        ("four_supertiles", (min(few, 5), 3, 2), 784, 80),
        ("nine_supertiles", (min(few, 3), 3, 2), 2064, 32),
        ("model_35b", (min(few, 2), 3, 2), *((2048, 512) if depth == "H" else (512, 2048))),
    )
    for name, routing, size, features in deep:
        dims = _dims(*routing, *((size, features) if depth == "H" else (features, size)))
        cases.append(Case(name, dims, tolerance=bound(size)))
    if most > few:  # many rows of an expert
        size = 2048 if depth == "H" else 512
        dims = _dims(41, 5, 2, *((size, 152) if depth == "H" else (152, size)))
        cases.append(Case("many_rows", dims, tolerance=bound(size)))
        cases.append(Case("many_rows_some_absent", {**dims, "some_absent": 1}, tolerance=bound(size)))
    return tuple(cases)


def _dims(tokens: int, experts: int, choices: int, hidden: int, intermediate: int) -> dict[str, int]:
    return {"M": tokens, "E": experts, "T": choices, "top_k": choices, "H": hidden, "I": intermediate}


_GROUPED_ROWS = (0, 1, 2, 17, 64, 128)


def _slot_cases(bound: Callable[[int], Tolerance]) -> tuple[Case, ...]:
    """Return the grouped cases of a kernel that goes from I to H."""
    cases = _cases(_GROUPED_ROWS, bound, "I")
    return tuple(replace(case, dims={**case.dims, "S": case.dims["M"] * case.dims["T"]}) for case in cases)


def _scaled(rng: "np.random.Generator", *shape: int) -> Any:
    """BF16 Gaussians whose dot product with a unit Gaussian row is a unit Gaussian."""
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(numpy_dtype("bf16"))


def random_routing(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Ids, the order they give, and weights that sum to 1: who needs which picks it."""
    ids = random_ids(dims, rng)
    slots, offsets = exact_sort(ids, dims["E"])
    weights = rng.random(ids.shape) + 0.1
    return {
        "ids": ids,
        "slots": slots.astype(np.int32),
        "offsets": offsets.astype(np.int32),
        "work": exact_work(offsets).astype(np.int32),
        "weights": (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32),
    }


def _inputs(name: str, shape: tuple[str, ...], *routing: str) -> Any:
    """Return an ``inputs`` function: one scaled tensor, and the named parts of a routing."""

    def make(dims: Dims, rng: "np.random.Generator") -> Arguments:
        parts = random_routing(dims, rng)
        sizes = {**dims, "S": dims["M"] * dims["T"]}
        return {name: _scaled(rng, *(sizes[dim] for dim in shape)), **{part: parts[part] for part in routing}}

    return make


def _expert_of(offsets: Any, slots: int) -> Any:
    """Return the expert of each row in sorted order, -1 at the end for those of none."""
    expert = np.full(slots, -1)
    expert[: offsets[-1]] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return expert


def _exact_rows(x: F64, weight: Any, expert: Any) -> F64:
    """Return each row of ``x [S, K]`` times its expert of a weight ``(E, N, K)``; zeros where there is none (-1)."""
    out = np.zeros((len(x), weight.shape[-2]))
    for e in np.unique(expert[expert >= 0]):
        rows = expert == e
        out[rows] = x[rows] @ exact_weight(weight[int(e)]).T
    return out


def _exact_act(x: F64, arguments: Arguments, expert: Any) -> F64:
    """Return ``silu(gate) * up`` for a row of ``x`` and an expert each."""
    gate, up = (_exact_rows(x, arguments[name], expert) for name in ("w_gate", "w_up"))
    return gate * exact_sigmoid(gate) * up


def _exact_grouped_gate_up(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    x = f64(arguments["x"])[arguments["slots"] // dims["top_k"]]
    return {"out": _exact_act(x, arguments, _expert_of(arguments["offsets"], len(x)))}


def _exact_grouped_down(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    h = f64(arguments["h"])
    return {"out": _exact_rows(h, arguments["w_down"], _expert_of(arguments["offsets"], len(h)))}


def _exact_reduced(y: F64, arguments: Arguments, dims: Dims) -> F64:
    by_slot, slots = np.zeros_like(y), arguments["slots"]
    by_slot[slots[slots >= 0]] = y[slots >= 0]
    weights = f64(arguments["weights"])
    reduced: F64 = np.einsum("mt,mth->mh", weights, by_slot.reshape(*weights.shape, dims["H"]))
    return reduced


def _exact_atomic(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    y = _exact_grouped_down(arguments, dims)["out"]
    return {"out": _exact_reduced(y, arguments, dims)}


def _exact_unpermute(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    return {"out": _exact_reduced(f64(arguments["y"]), arguments, dims)}


def exact_pairwise_gate_up(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    """Return ``out [M, T, I]`` of the experts that ``ids`` name."""
    x = np.repeat(f64(arguments["x"]), dims["T"], axis=0)
    return {"out": _exact_act(x, arguments, arguments["ids"].ravel()).reshape(dims["M"], dims["T"], dims["I"])}


def exact_pairwise_down(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    """Return ``out [M, H]``, the weighted sum over the experts that ``ids`` name."""
    h = f64(arguments["h"]).reshape(-1, dims["I"])
    y = _exact_rows(h, arguments["w_down"], arguments["ids"].ravel()).reshape(dims["M"], dims["T"], dims["H"])
    return {"out": np.einsum("mt,mth->mh", f64(arguments["weights"]), y)}


def _exact_shared(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    gate = exact_sigmoid(f64(arguments["x"]) @ f64(arguments["gate_weight"]))
    return {"out": f64(arguments["out"]) + gate[:, None] * f64(arguments["shared"])}


GROUPED_GATE_UP = Contract(
    "moe_w4a16_grouped_gate_up",
    "silu(gate) * up of every slot, in sorted order, zeros for no expert; gate and up are rounded to BF16 first",
    Signature(
        (
            TensorParam("x", "bf16", ("M", "H")),
            _W_GATE,
            _W_UP,
            TensorParam("slots", "i32", ("M*top_k",)),
            _OFFSETS,
            _WORK,
            ScalarParam("top_k", "i32", minimum=1),
            TensorParam("out", "bf16", ("M*top_k", "I"), "out"),
        ),
        multiples=_WHOLE_H,
    ),
    _exact_grouped_gate_up,
    _cases(_GROUPED_ROWS, activation_tolerance, "H"),
    activation_tolerance(_DEEPEST),
    inputs=_inputs("x", ("M", "H"), "slots", "offsets", "work"),
)
GROUPED_DOWN = Contract(
    "moe_w4a16_grouped_down",
    "down projection of every slot, in sorted order, zeros for no expert",
    Signature(
        (
            TensorParam("h", "bf16", ("S", "I")),
            _W_DOWN,
            TensorParam("slots", "i32", ("S",)),
            _OFFSETS,
            _WORK,
            TensorParam("out", "bf16", ("S", "H"), "out"),
        ),
        multiples=_WHOLE_I,
    ),
    _exact_grouped_down,
    _slot_cases(_down),
    _down(_DEEPEST),
    inputs=_inputs("h", ("S", "I"), "slots", "offsets", "work"),
)
GROUPED_DOWN_ATOMIC = Contract(
    "moe_w4a16_grouped_down_atomic_c4",
    "out[m] = weighted sum of the down projections of m's slots, FP32 in no fixed order, rounded once",
    Signature(
        (
            TensorParam("h", "bf16", ("M*T", "I")),
            _W_DOWN,
            TensorParam("slots", "i32", ("M*T",)),
            _OFFSETS,
            _WORK,
            _WEIGHTS,
            TensorParam("out", "bf16", ("M", "H"), "out"),
        ),
        multiples=_WHOLE_I,
    ),
    _exact_atomic,
    _slot_cases(_reduction),
    _reduction(_DEEPEST),
    inputs=_inputs("h", ("S", "I"), "slots", "offsets", "work", "weights"),
)
UNPERMUTE_REDUCE = Contract(
    "moe_unpermute_reduce_indexed",
    "out[m] = sum over t, in order of t, of weights[m, t] * y of slot m*T + t where it is there, FP32, rounded once",
    Signature(
        (
            TensorParam("y", "bf16", ("M*T", "H")),
            TensorParam("slots", "i32", ("M*T",)),
            _WEIGHTS,
            TensorParam("out", "bf16", ("M", "H"), "out"),
        )
    ),
    _exact_unpermute,
    (
        *(Case(f"rows_{m}", _dims(m, 8, 2, 48, 16)) for m in _GROUPED_ROWS),
        Case("all_on_one", {**_dims(128, 5, 1, 48, 16), "all_on_one": 1}),
        Case("some_absent", {**_dims(33, 9, 4, 48, 16), "some_absent": 1}),
        Case("odd_width", _dims(9, 8, 3, 77, 16)),
        Case("model_35b", _dims(33, 256, 8, 2048, 16)),
        Case("wide", _dims(3, 8, 3, 2056, 16)),
    ),
    Tolerance(
        relative=BF16_ROUNDING,
        absolute=16 * _LARGEST * F32_ROUNDING,
        derivation="one rounding to BF16; at most 16 FP32 operations on terms that sum to less than 5",
    ),
    inputs=_inputs("y", ("S", "H"), "slots", "weights"),
)
SILU_MUL = silu_mul_contract("moe_silu_mul")


def _pairwise_gate_up(rows: int) -> Contract:
    params = (
        TensorParam("x", "bf16", ("M", "H")),
        _IDS,
        _W_GATE,
        _W_UP,
        TensorParam("out", "bf16", ("M", "T", "I"), "out"),
    )
    return Contract(
        f"moe_fused_batch{rows}_gate_up",
        f"silu(gate) * up of every token and choice, at most {rows} tokens; gate and up are rounded to BF16 first",
        Signature(params, multiples=_WHOLE_H, limits=(("M", rows),)),
        exact_pairwise_gate_up,
        _cases(tuple(range(rows + 1)), activation_tolerance, "H"),
        activation_tolerance(_DEEPEST),
        inputs=_inputs("x", ("M", "H"), "ids"),
    )


def _pairwise_down(rows: int) -> Contract:
    params = (
        TensorParam("h", "bf16", ("M", "T", "I")),
        _IDS,
        _WEIGHTS,
        _W_DOWN,
        TensorParam("out", "bf16", ("M", "H"), "out"),
    )
    return Contract(
        f"moe_fused_batch{rows}_down",
        f"weighted sum of the chosen experts' down projections, each rounded to BF16, at most {rows} tokens",
        Signature(params, multiples=_WHOLE_I, limits=(("M", rows),)),
        exact_pairwise_down,
        _cases(tuple(range(rows + 1)), _reduction, "I"),
        _reduction(_DEEPEST),
        inputs=_inputs("h", ("M", "T", "I"), "ids", "weights"),
    )


PAIRWISE_GATE_UP = (_pairwise_gate_up(2), _pairwise_gate_up(3))
PAIRWISE_DOWN = (_pairwise_down(2), _pairwise_down(3))

_WIDEST = 2048
SHARED_GATE_ADD = Contract(
    "moe_shared_gate_add",
    "out += sigmoid(x . gate_weight) * shared, one gate a token, FP32, rounded once",
    Signature(
        (
            TensorParam("x", "bf16", ("M", "H")),
            TensorParam("gate_weight", "bf16", ("H",)),
            TensorParam("shared", "bf16", ("M", "H")),
            TensorParam("out", "bf16", ("M", "H"), "inout"),
        )
    ),
    _exact_shared,
    tuple(
        Case(name, {"M": m, "H": h})
        for name, m, h in (
            ("one_row", 1, 64),
            ("odd", 17, 77),
            ("one_value", 2, 1),
            ("wide", 3, 1025),
            ("model_35b", 5, _WIDEST),
            ("no_rows", 0, 8),
        )
    ),
    Tolerance(
        relative=BF16_ROUNDING,
        absolute=_LARGEST * (_WIDEST**1.5 / 4 + 8) * F32_ROUNDING,
        derivation="one rounding to BF16; the dot product of inputs scaled by 1/sqrt(K) errs by K^1.5 * 2^-24, the "
        "sigmoid by a quarter of that and 8 roundings, times |shared| < 5",
    ),
    inputs=lambda dims, rng: {"x": _scaled(rng, dims["M"], dims["H"])},
)


def _exact_unpermute_shared(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    return _exact_shared({**arguments, **_exact_unpermute(arguments, dims)}, dims)


def _unpermute_shared_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    routed = _inputs("y", ("S", "H"), "slots", "weights")(dims, rng)
    return {**routed, "x": _scaled(rng, dims["M"], dims["H"])}


UNPERMUTE_SHARED_ADD = Contract(
    "moe_unpermute_shared_add",
    "moe_unpermute_reduce_indexed, its sum rounded to BF16, and what moe_shared_gate_add adds to it",
    Signature(
        (
            TensorParam("y", "bf16", ("M*T", "H")),
            TensorParam("slots", "i32", ("M*T",)),
            _WEIGHTS,
            TensorParam("x", "bf16", ("M", "H")),
            TensorParam("gate_weight", "bf16", ("H",)),
            TensorParam("shared", "bf16", ("M", "H")),
            TensorParam("out", "bf16", ("M", "H"), "out"),
        )
    ),
    _exact_unpermute_shared,
    tuple(case for case in UNPERMUTE_REDUCE.cases if case.name != "wide"),
    Tolerance(
        relative=BF16_ROUNDING,
        absolute=_LARGEST * (BF16_ROUNDING + (_WIDEST**1.5 / 4 + 24) * F32_ROUNDING),
        derivation="one rounding to BF16, and one of the sum over the choices, which is below 5; the gate as in "
        "moe_shared_gate_add; at most 16 FP32 operations on terms that sum to less than 5",
    ),
    inputs=_unpermute_shared_inputs,
)
