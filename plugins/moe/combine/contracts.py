"""Contracts of the reduction of experts' results to tokens, and of the gated shared expert."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import (
    BF16_ROUNDING,
    F32_ROUNDING,
    Dims,
    exact_sigmoid,
    f64,
)
from kernel_muster.plugins.moe.experts.cases import GROUPED_ROWS, dims_of, inputs_of, scaled
from kernel_muster.plugins.moe.experts.exact import exact_reduced
from kernel_muster.plugins.moe.experts.parameters import WEIGHTS
from kernel_muster.plugins.moe.experts.tolerances import LARGEST
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import Signature, TensorParam


def _exact_unpermute(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    return {"out": exact_reduced(f64(arguments["y"]), arguments, dims)}


def _exact_shared_gate(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    gate = exact_sigmoid(f64(arguments["x"]) @ f64(arguments["gate_weight"]))
    return {"out": f64(arguments["out"]) + gate[:, None] * f64(arguments["shared"])}


UNPERMUTE_REDUCE = Contract(
    "moe_unpermute_reduce_indexed",
    "out[m] = sum over t, in order of t, of weights[m, t] * y of slot m*T + t where it is there, FP32, rounded once",
    Signature(
        (
            TensorParam("y", "bf16", ("M*T", "H")),
            TensorParam("slots", "i32", ("M*T",)),
            WEIGHTS,
            TensorParam("out", "bf16", ("M", "H"), "out"),
        )
    ),
    _exact_unpermute,
    (
        *(Case(f"rows_{m}", dims_of(m, 8, 2, 48, 16)) for m in GROUPED_ROWS),
        Case("all_on_one", {**dims_of(128, 5, 1, 48, 16), "all_on_one": 1}),
        Case("some_absent", {**dims_of(33, 9, 4, 48, 16), "some_absent": 1}),
        Case("odd_width", dims_of(9, 8, 3, 77, 16)),
        Case("model_35b", dims_of(33, 256, 8, 2048, 16)),
        Case("wide", dims_of(3, 8, 3, 2056, 16)),
    ),
    Tolerance(
        relative=BF16_ROUNDING,
        absolute=16 * LARGEST * F32_ROUNDING,
        derivation="one rounding to BF16; at most 16 FP32 operations on terms that sum to less than 5",
    ),
    inputs=inputs_of("y", ("S", "H"), "slots", "weights"),
)
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
    _exact_shared_gate,
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
        absolute=LARGEST * (_WIDEST**1.5 / 4 + 8) * F32_ROUNDING,
        derivation="one rounding to BF16; the dot product of inputs scaled by 1/sqrt(K) errs by K^1.5 * 2^-24, the "
        "sigmoid by a quarter of that and 8 roundings, times |shared| < 5",
    ),
    inputs=lambda dims, rng: {"x": scaled(rng, dims["M"], dims["H"])},
)


def _exact_unpermute_shared(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    return _exact_shared_gate({**arguments, **_exact_unpermute(arguments, dims)}, dims)


def _unpermute_shared_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    routed = inputs_of("y", ("S", "H"), "slots", "weights")(dims, rng)
    return {**routed, "x": scaled(rng, dims["M"], dims["H"])}


UNPERMUTE_SHARED_ADD = Contract(
    "moe_unpermute_shared_add",
    "moe_unpermute_reduce_indexed, its sum rounded to BF16, and what moe_shared_gate_add adds to it",
    Signature(
        (
            TensorParam("y", "bf16", ("M*T", "H")),
            TensorParam("slots", "i32", ("M*T",)),
            WEIGHTS,
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
        absolute=LARGEST * (BF16_ROUNDING + (_WIDEST**1.5 / 4 + 24) * F32_ROUNDING),
        derivation="one rounding to BF16, and one of the sum over the choices, which is below 5; the gate as in "
        "moe_shared_gate_add; at most 16 FP32 operations on terms that sum to less than 5",
    ),
    inputs=_unpermute_shared_inputs,
)
