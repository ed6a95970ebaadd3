"""Contracts of the preprocessing between projections and mixers."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import EXACT, F32_ROUNDING, Dims, exact_sigmoid, f64
from kernel_muster.plugins.nvfp4_gemv.rows import qkvz_rows
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam

HEADS = ("key_heads", "key_dim", "value_heads", "value_dim")
HEAD_SCALARS = tuple(ScalarParam(name, "i32", minimum=1) for name in HEADS)
KEYS, VALUES = "key_heads*key_dim", "value_heads*value_dim"


def head_dims(*sizes: int) -> dict[str, int]:
    """Return the four head sizes by name."""
    return dict(zip(HEADS, sizes, strict=True))


def _exact_qg(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    heads = arguments["qg"].reshape(dims["M"], dims["Q"] // dims["head_dim"], 2, dims["head_dim"])
    names = enumerate(("out_q", "out_gate"))
    return {name: f64(heads[:, :, part].reshape(dims["M"], dims["Q"])) for part, name in names}


def _exact_qkvz(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    qkv, z = qkvz_rows(*(dims[name] for name in HEADS))
    return {"out_qkv": f64(arguments["qkvz"][:, qkv]), "out_z": f64(arguments["qkvz"][:, z])}


def _exact_gates(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    x = f64(arguments["a"]) + f64(arguments["dt_bias"])
    softplus = np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))
    decay = np.exp(-np.exp(f64(arguments["a_log"])) * softplus)
    return {"out_decay": decay, "out_beta": exact_sigmoid(f64(arguments["b"]))}


def _gate_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Rates and biases as these models start from: a rate of 0 to 16, a bias of about one."""
    rates, bias = rng.uniform(0.01, 16.0, dims["Hv"]), 1.0 + rng.standard_normal(dims["Hv"])
    return {"a_log": np.log(rates).astype(np.float32), "dt_bias": bias.astype(np.float32)}


DEINTERLEAVE_QG = Contract(
    "deinterleave_qg",
    "query and gate of gated attention, which alternate by head, to two tensors",
    Signature(
        (
            TensorParam("qg", "bf16", ("M", "2*Q")),
            ScalarParam("head_dim", "i32", minimum=1),
            TensorParam("out_q", "bf16", ("M", "Q"), "out"),
            TensorParam("out_gate", "bf16", ("M", "Q"), "out"),
        ),
        multiples=(("Q", "head_dim"),),
    ),
    _exact_qg,
    tuple(
        Case(name, {"M": m, "Q": q, "head_dim": d})
        for name, m, q, d in (
            ("one_row", 1, 512, 256),
            ("model_heads", 3, 4096, 256),
            ("one_value", 3, 1, 1),
            ("odd", 17, 35, 7),
            ("no_rows", 0, 16, 8),
        )
    ),
    EXACT,
)
DEINTERLEAVE_QKVZ = Contract(
    "deinterleave_qkvz",
    "GDN's fused projection, grouped by key head, to q of all heads | k | v, and z",
    Signature(
        (
            TensorParam("qkvz", "bf16", ("M", f"2*{KEYS} + 2*{VALUES}")),
            *HEAD_SCALARS,
            TensorParam("out_qkv", "bf16", ("M", f"2*{KEYS} + {VALUES}"), "out"),
            TensorParam("out_z", "bf16", ("M", VALUES), "out"),
        ),
        multiples=(("value_heads", "key_heads"),),
    ),
    _exact_qkvz,
    (
        Case("one_row", {"M": 1, **head_dims(2, 128, 4, 128)}),
        Case("model_heads", {"M": 2, **head_dims(16, 128, 48, 128)}),
        Case("three_values_a_key", {"M": 17, **head_dims(2, 5, 6, 7)}),
        Case("one_value", {"M": 2, **head_dims(1, 1, 1, 1)}),
        Case("no_rows", {"M": 0, **head_dims(2, 8, 4, 8)}),
    ),
    EXACT,
)
GDN_GATES = Contract(
    "compute_gdn_gates",
    "decay = exp(-exp(a_log) softplus(a + dt_bias)) and beta = sigmoid(b), both FP32",
    Signature(
        (
            TensorParam("a", "bf16", ("M", "Hv")),
            TensorParam("b", "bf16", ("M", "Hv")),
            TensorParam("a_log", "f32", ("Hv",)),
            TensorParam("dt_bias", "f32", ("Hv",)),
            TensorParam("out_decay", "f32", ("M", "Hv"), "out"),
            TensorParam("out_beta", "f32", ("M", "Hv"), "out"),
        )
    ),
    _exact_gates,
    (
        Case("one_row", {"M": 1, "Hv": 32}),
        Case("odd_heads", {"M": 17, "Hv": 33}),
        Case("one_head", {"M": 3, "Hv": 1}),
        Case("no_rows", {"M": 0, "Hv": 8}),
    ),
    # A decay that is no subnormal has an exponent below 88, to whose relative error eight FP32 operations and functions
    # contribute; the exponential turns that into a relative error of the decay.
    Tolerance(
        relative=(88 * 8 + 16) * F32_ROUNDING,
        absolute=1e-37,
        derivation="an exponent below 88 that errs by 8 * 2^-24 relatively, 16 FP32 roundings for the exponential and "
        "the sigmoid; absolute: the smallest normal number",
    ),
    inputs=_gate_inputs,
)
