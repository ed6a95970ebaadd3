"""Contracts of the element-wise steps."""

from typing import Any

from kernel_muster.plugins._contracts import BF16_ROUNDING, F32_ROUNDING, Dims, exact_sigmoid, f64
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import Dim, Signature, TensorParam

_X = TensorParam("x", "bf16", ("M", "H"))
_ONE_ROW = (
    Case("one_row", {"M": 1, "H": 128}),
    Case("odd_width", {"M": 1, "H": 257}),
    Case("no_rows", {"M": 0, "H": 8}),
)
_CASES = (*_ONE_ROW, Case("one_value", {"M": 3, "H": 1}), Case("one_above_a_tile", {"M": 17, "H": 1025}))
_TOLERANCE = Tolerance(
    relative=BF16_ROUNDING + 4 * F32_ROUNDING,
    absolute=0.0,
    derivation="at most four FP32 operations (2^-24 each) and one rounding to BF16 (2^-8)",
)


def _exact_add(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    return {"residual": f64(arguments["residual"]) + f64(arguments["x"])}


def _exact_gate(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    return {"out": f64(arguments["x"]) * exact_sigmoid(f64(arguments["gate"]))}


def _gate(name: str, cases: tuple[Case, ...], limits: tuple[tuple[Dim, Dim], ...]) -> Contract:
    gate, out = TensorParam("gate", "bf16", ("M", "H")), TensorParam("out", "bf16", ("M", "H"), "out")
    summary = "out = x * sigmoid(gate), the output gate of attention"
    return Contract(name, summary, Signature((_X, gate, out), limits=limits), _exact_gate, cases, _TOLERANCE)


RESIDUAL_ADD = Contract(
    "bf16_residual_add",
    "residual += x, rounded once to BF16",
    Signature((_X, TensorParam("residual", "bf16", ("M", "H"), "inout"))),
    _exact_add,
    _CASES,
    _TOLERANCE,
)
GATE_MUL = _gate("sigmoid_gate_mul", _ONE_ROW, (("M", 1),))
GATE_MUL_BATCHED = _gate("sigmoid_gate_mul_batched", _CASES, ())
