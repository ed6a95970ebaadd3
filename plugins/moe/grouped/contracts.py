"""Contracts of the grouped experts, and of their activation by slot."""

from collections.abc import Mapping
from typing import Any

from kernel_muster.plugins._contracts import (
    Dims,
    f64,
    silu_mul_contract,
)
from kernel_muster.plugins.moe.experts.cases import GROUPED_ROWS, cases_of, inputs_of, slot_cases
from kernel_muster.plugins.moe.experts.exact import exact_activation, exact_reduced, exact_rows, expert_of_rows
from kernel_muster.plugins.moe.experts.parameters import OFFSETS, W_DOWN, W_GATE, W_UP, WEIGHTS, WHOLE_H, WHOLE_I, WORK
from kernel_muster.plugins.moe.experts.tolerances import (
    DEEPEST,
    activation_tolerance,
    down_tolerance,
    reduction_tolerance,
)
from kernel_muster.registry.contract.contracts import Arguments, Contract
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam


def _exact_grouped_gate_up(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    x = f64(arguments["x"])[arguments["slots"] // dims["top_k"]]
    return {"out": exact_activation(x, arguments, expert_of_rows(arguments["offsets"], len(x)))}


def _exact_grouped_down(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    h = f64(arguments["h"])
    return {"out": exact_rows(h, arguments["w_down"], expert_of_rows(arguments["offsets"], len(h)))}


def _exact_atomic(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    y = _exact_grouped_down(arguments, dims)["out"]
    return {"out": exact_reduced(y, arguments, dims)}


GROUPED_GATE_UP = Contract(
    "moe_w4a16_grouped_gate_up",
    "silu(gate) * up of every slot, in sorted order, zeros for no expert; gate and up are rounded to BF16 first",
    Signature(
        (
            TensorParam("x", "bf16", ("M", "H")),
            W_GATE,
            W_UP,
            TensorParam("slots", "i32", ("M*top_k",)),
            OFFSETS,
            WORK,
            ScalarParam("top_k", "i32", minimum=1),
            TensorParam("out", "bf16", ("M*top_k", "I"), "out"),
        ),
        multiples=WHOLE_H,
    ),
    _exact_grouped_gate_up,
    cases_of(GROUPED_ROWS, activation_tolerance, "H"),
    activation_tolerance(DEEPEST),
    inputs=inputs_of("x", ("M", "H"), "slots", "offsets", "work"),
)
GROUPED_DOWN = Contract(
    "moe_w4a16_grouped_down",
    "down projection of every slot, in sorted order, zeros for no expert",
    Signature(
        (
            TensorParam("h", "bf16", ("S", "I")),
            W_DOWN,
            TensorParam("slots", "i32", ("S",)),
            OFFSETS,
            WORK,
            TensorParam("out", "bf16", ("S", "H"), "out"),
        ),
        multiples=WHOLE_I,
    ),
    _exact_grouped_down,
    slot_cases(down_tolerance),
    down_tolerance(DEEPEST),
    inputs=inputs_of("h", ("S", "I"), "slots", "offsets", "work"),
)
GROUPED_DOWN_ATOMIC = Contract(
    "moe_w4a16_grouped_down_atomic_c4",
    "out[m] = weighted sum of the down projections of m's slots, FP32 in no fixed order, rounded once",
    Signature(
        (
            TensorParam("h", "bf16", ("M*T", "I")),
            W_DOWN,
            TensorParam("slots", "i32", ("M*T",)),
            OFFSETS,
            WORK,
            WEIGHTS,
            TensorParam("out", "bf16", ("M", "H"), "out"),
        ),
        multiples=WHOLE_I,
    ),
    _exact_atomic,
    slot_cases(reduction_tolerance),
    reduction_tolerance(DEEPEST),
    inputs=inputs_of("h", ("S", "I"), "slots", "offsets", "work", "weights"),
)
SILU_MUL = silu_mul_contract("moe_silu_mul")
