"""The contract of the fused inputs of a gated delta net, one row for each sequence."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import (
    BF16_ROUNDING,
    DEEPEST_K,
    F32_ROUNDING,
    Array,
    Dims,
    exact_sigmoid,
    exact_weight,
    f64,
)
from kernel_muster.plugins.nvfp4_gemv.contracts import DEPTHS, scaled_dot_error, scaled_x
from kernel_muster.plugins.nvfp4_gemv.rows import qkvz_rows
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam, WeightParam

#: Inputs of a channel that an output is made of: the newest, and those that its state holds.
TAPS = 4
_HEADS = ("key_heads", "key_dim", "value_heads", "value_dim")
_VALUES = "value_heads*value_dim"
_CHANNELS = f"2*key_heads*key_dim + {_VALUES}"
# x is scaled so that its projections are unit Gaussians, as are taps and states.
_LARGEST = 6.0


def _gates(arguments: Arguments, y: Array) -> tuple[Array, Array]:
    """Return decay and beta of ``y``, beta and alpha of all heads."""
    b, a = np.split(y, 2, axis=1)
    x = a + f64(arguments["dt_bias"])
    softplus = np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))
    return np.exp(-np.exp(f64(arguments["a_log"])) * softplus), exact_sigmoid(b)


def _exact(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    x = f64(arguments["x"])
    y, state = x @ exact_weight(arguments["w"]).T, f64(arguments["state"])
    qkv, z = qkvz_rows(*(dims[name] for name in _HEADS))
    decay, beta = _gates(arguments, x @ f64(arguments["w_ba"]).T)
    out = np.zeros((len(x), len(qkv)))
    for row, slot in enumerate(arguments["slots"]):
        if slot >= 0:
            window = np.concatenate([state[slot], y[row, qkv][:, None]], axis=1)
            total = (window * f64(arguments["conv_weight"])).sum(axis=1)
            out[row] = total * exact_sigmoid(total)
            state[slot] = window[:, 1:]
    return {"state": state, "out_qkv": out, "out_z": y[:, z], "out_decay": decay, "out_beta": beta}


def _inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Rates and biases as these models start from; a pool without slots has padding only."""
    heads, slots = dims["value_heads"], np.full(dims["M"], -1, np.int32)
    slots[: dims["R"]] = rng.permutation(dims["R"])[: dims["M"]]
    return {
        **scaled_x(dims, rng),
        "a_log": np.log(rng.uniform(0.01, 16.0, heads)).astype(np.float32),
        "dt_bias": (1.0 + rng.standard_normal(heads)).astype(np.float32),
        "slots": slots,
    }


def _projected(depth: int) -> Tolerance:
    return Tolerance(
        relative=BF16_ROUNDING,
        absolute=scaled_dot_error(depth),
        derivation="one rounding to BF16; FP32 sums of K products scaled by 1/sqrt(K) err by 36 sqrt(K) * 2^-24, "
        f"K = {depth}",
    )


# Errors of projections, below 6 and rounded to BF16, at the deepest K of all cases.
_ERROR = _LARGEST * BF16_ROUNDING + scaled_dot_error(max(DEPTHS))
_CONVOLVED = Tolerance(
    relative=BF16_ROUNDING + 16 * F32_ROUNDING,
    absolute=1.1 * _LARGEST * (_ERROR + TAPS**2 * _LARGEST * F32_ROUNDING),
    derivation="one rounding to BF16; the newest input, below 6, is rounded to BF16 (2^-8) after FP32 sums (36 sqrt(K) "
    "* 2^-24), and weighted with less than 6; four FP32 additions of products below 36; a silu whose slope is below "
    "1.1, with 16 FP32 roundings",
)
_GATE = Tolerance(
    relative=(88 * 8 + 16) * F32_ROUNDING,
    absolute=_ERROR / np.e,
    derivation="alpha and beta, below 6, are rounded to BF16 (2^-8) after FP32 sums (36 sqrt(K) * 2^-24); the slope of "
    "a sigmoid is at most 1/4, that of exp(-r softplus(x)) at most 1/e; 88 * 8 + 16 FP32 roundings as for the gates "
    "alone",
)


def _case(name: str, heads: tuple[int, int, int, int], depth: int, slots: int = 1, rows: int = 1) -> Case:
    dims = {"M": rows, "K": depth, "R": slots, **dict(zip(_HEADS, heads, strict=True))}
    return Case(name, dims, tolerance=_projected(depth))


GDN_IN = Contract(
    "w4a16_gemv_gdn_in",
    "GDN's inputs of rows of one sequence each: z and the convolved q|k|v of the fused projection, and the gates of a "
    "BF16 one; slot -1 is padding",
    Signature(
        (
            TensorParam("x", "bf16", ("M", "K")),
            WeightParam("w", "nvfp4", (f"2*key_heads*key_dim + 2*{_VALUES}", "K")),
            TensorParam("w_ba", "bf16", ("2*value_heads", "K")),
            *(ScalarParam(name, "i32", minimum=1) for name in _HEADS),
            TensorParam("a_log", "f32", ("value_heads",)),
            TensorParam("dt_bias", "f32", ("value_heads",)),
            TensorParam("conv_weight", "bf16", (_CHANNELS, TAPS)),
            TensorParam("state", "bf16", ("R", _CHANNELS, TAPS - 1), "inout"),
            TensorParam("slots", "i32", ("M",)),
            TensorParam("out_qkv", "bf16", ("M", _CHANNELS), "out"),
            TensorParam("out_z", "bf16", ("M", _VALUES), "out"),
            TensorParam("out_decay", "f32", ("M", "value_heads"), "out"),
            TensorParam("out_beta", "f32", ("M", "value_heads"), "out"),
        ),
        multiples=(("K", nvfp4.GROUP), ("value_heads", "key_heads")),
        limits=(("M", 8),),
    ),
    _exact,
    (
        _case("one_head", (1, 8, 1, 8), 16),
        _case("two_values_a_key", (2, 8, 4, 8), 80, slots=5),
        _case("three_values_a_key", (2, 5, 6, 7), 48, slots=3),
        _case("padding", (2, 8, 6, 8), 112, slots=0),
        _case("deep_k", (1, 4, 2, 4), DEEPEST_K, slots=2),
        _case("no_rows", (1, 8, 1, 8), 16, rows=0),
        *(_case(f"few_k_{k}", (2, 33, 6, 35), k, slots=2) for k in DEPTHS),
        *(_case(f"k_{k}", (2, 130, 4, 66), k, slots=2) for k in DEPTHS),
        _case("heads_of_one_model", (16, 32, 48, 32), 2048, slots=2),
        _case("two_rows", (2, 8, 6, 8), 112, slots=3, rows=2),
        _case("rows_beside_padding", (2, 5, 4, 7), 80, slots=3, rows=5),
        *(_case(f"four_rows_of_k_{k}", (2, 130, 4, 66), k, slots=4, rows=4) for k in DEPTHS),
        *(_case(f"eight_rows_of_k_{k}", (2, 130, 6, 66), k, slots=9, rows=8) for k in DEPTHS),
    ),
    _projected(DEEPEST_K),
    inputs=_inputs,
    output_tolerances={"out_qkv": _CONVOLVED, "out_decay": _GATE, "out_beta": _GATE},
)
