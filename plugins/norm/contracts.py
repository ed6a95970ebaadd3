"""Contracts of the RMS norms."""

from dataclasses import replace
from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import BF16_ROUNDING, F32_ROUNDING, F64, Dims, exact_sigmoid, f64
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam

_WIDEST = 1030
_X = TensorParam("x", "bf16", ("M", "H"))
_WEIGHT = TensorParam("weight", "bf16", ("H",))
_EPS = ScalarParam("eps", "f32", minimum=0.0)
_OFFSET = ScalarParam("weight_offset", "f32")
_OUT = TensorParam("out", "bf16", ("M", "H"), "out")

_PLAIN = {"eps": 1e-6, "weight_offset": 0.0}
_CENTRED = {"eps": 1e-5, "weight_offset": 1.0}


def _tolerance(widest: int) -> Tolerance:
    """Bound the norm of rows of at most so many values.

    All squares are positive: H additions in any order err by H * 2^-24 relative to the sum, half of that after the
    root; some five operations more (offset, root, reciprocal, two products) and, gated, a sigmoid, are 2^-24 each.
    """
    return Tolerance(
        relative=BF16_ROUNDING * (1 + BF16_ROUNDING) + (widest / 2 + 16) * F32_ROUNDING,
        absolute=1e-37,
        derivation=f"one rounding to BF16 (2^-8) of an FP32 result whose sum of at most {widest} squares errs by that "
        "many 2^-24, halved by the root, plus 16 FP32 operations; absolute: the smallest normal number",
    )


# Heads and hidden sizes of the models, and more than a block keeps in registers.
_MODEL_SIZES = ((18, 256), (2, 2048), (3, 5120), (2, 8200))
_CASES = (
    Case("one_row", {"M": 1, "H": 128}, _PLAIN),
    Case("one_value", {"M": 2, "H": 1}, _PLAIN),
    Case("zero_centred_weight", {"M": 3, "H": 80}, _CENTRED),
    Case("large_eps", {"M": 3, "H": 33}, {"eps": 0.5, "weight_offset": 0.0}),
    Case("odd_width", {"M": 17, "H": 257}, _CENTRED),
    Case("wide", {"M": 5, "H": _WIDEST}, _PLAIN),
    Case("no_rows", {"M": 0, "H": 64}, _PLAIN),
    *(Case(f"h_{h}", {"M": m, "H": h}, _CENTRED, _tolerance(max(h, _WIDEST))) for m, h in _MODEL_SIZES),
)
_TOLERANCE = _tolerance(_WIDEST)


def _normalised(x: F64, eps: float) -> F64:
    normalised: F64 = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
    return normalised


def _exact_norm(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    scale = np.float64(arguments["weight_offset"]) + f64(arguments["weight"])
    return {"out": _normalised(f64(arguments["x"]), _eps(arguments)) * scale}


def _exact_norm_residual(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    residual = (f64(arguments["residual"]) + f64(arguments["x"])).astype(numpy_dtype("bf16"))
    return {"residual": f64(residual), **_exact_norm({**arguments, "x": residual}, dims)}


def _exact_norm_gated(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    gate = f64(arguments["gate"])
    scaled = _normalised(f64(arguments["x"]), _eps(arguments)) * f64(arguments["weight"])
    return {"out": scaled * gate * exact_sigmoid(gate)}


def _eps(arguments: Arguments) -> float:
    return float(np.float32(arguments["eps"]))


RMS_NORM = Contract(
    "rms_norm",
    "out = x / sqrt(mean(x^2) + eps) * (weight_offset + weight), FP32 inside",
    Signature((_X, _WEIGHT, _EPS, _OFFSET, _OUT)),
    _exact_norm,
    _CASES,
    _TOLERANCE,
)
RMS_NORM_RESIDUAL = Contract(
    "rms_norm_residual",
    "residual += x, rounded to BF16; out is the RMS norm of that rounded residual",
    Signature((_X, TensorParam("residual", "bf16", ("M", "H"), "inout"), _WEIGHT, _EPS, _OFFSET, _OUT)),
    _exact_norm_residual,
    _CASES,
    _TOLERANCE,
)
RMS_NORM_GATED = Contract(
    "rms_norm_gated",
    "out = x / sqrt(mean(x^2) + eps) * weight * silu(gate), FP32 inside",
    Signature((_X, TensorParam("gate", "bf16", ("M", "H")), TensorParam("weight", "f32|bf16", ("H",)), _EPS, _OUT)),
    _exact_norm_gated,
    tuple(replace(case, scalars={"eps": case.scalars["eps"]}) for case in _CASES),
    _TOLERANCE,
)
