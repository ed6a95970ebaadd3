"""Contracts of a step's experts in two launches: router's choice, chosen experts and shared expert."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import BF16_ROUNDING, F32_ROUNDING, Dims, exact_sigmoid, exact_weight, f64
from kernel_muster.plugins.moe.experts.cases import dims_of, random_routing, scaled
from kernel_muster.plugins.moe.experts.tolerances import DEEPEST, DOT, LARGEST, activation_tolerance, dot_error
from kernel_muster.plugins.moe.pairwise import contracts as pairwise
from kernel_muster.plugins.moe.router import contracts as router
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.nvfp4 import GROUP
from kernel_muster.registry.contract.signature import Signature, TensorParam, WeightParam

#: The limits of the kernels: tokens, experts, and choices of each token.
MOST_TOKENS, MOST_EXPERTS, MOST_CHOICES = 4, 256, 32


def _dims(m: int, e: int, t: int, h: int, i: int, j: int) -> dict[str, int]:
    return {**dims_of(m, e, t, h, i), "J": j}


# M, E, T, H, I, J
_COMMON = (
    ("one_group", (3, 4, 2, 16, 16, 16)),
    ("one_expert", (3, 1, 1, 48, 16, 32)),
    ("all_experts", (3, 3, 3, 80, 64, 16)),
    ("no_tokens", (0, 8, 2, 48, 32, 32)),
    ("rows_1", (1, 8, 2, 48, 32, 48)),
    ("rows_2", (2, 8, 2, 48, 32, 48)),
    ("deep_k", (1, 4, 2, DEEPEST, DEEPEST, DEEPEST)),
    ("many_choices", (4, 40, 32, 32, 16, 16)),
    ("model_35b", (2, 3, 2, 2048, 512, 512)),
)


def _cases(more: Any, depth_of: Callable[[Dims], int], bound: Callable[[int], Tolerance]) -> tuple[Case, ...]:
    made = []
    for name, sizes in (*_COMMON, *more):
        dims = _dims(*sizes)
        depth = depth_of(dims)
        made.append(Case(name, dims, tolerance=bound(depth) if depth > DEEPEST else None))
    return tuple(made)


# Depths of the input, each with the splits of K that the shared expert's GEMV has for them.
_GATE_UP_CASES = _cases(
    (
        ("odd_features", (2, 9, 3, 32, 21, 37)),
        ("most_experts", (4, 256, 8, 32, 16, 16)),
        ("odd_experts", (3, 77, 8, 32, 16, 16)),
        ("depth_512_one_token", (1, 12, 8, 512, 144, 144)),
        ("depth_512", (3, 12, 8, 512, 144, 48)),
        ("depth_2048_one_token", (1, 12, 8, 2048, 48, 48)),
        ("depth_2048", (4, 12, 8, 2048, 48, 160)),
        ("depth_2048_many_features", (2, 3, 2, 2048, 16, 528)),
        ("four_supertiles", (3, 3, 2, 784, 80, 80)),
        ("nine_supertiles", (3, 3, 2, 2064, 32, 32)),
        ("depth_5120", (3, 3, 2, 5120, 16, 48)),
        ("depth_5120_many_features", (1, 3, 2, 5120, 16, 528)),
        ("depth_6144", (2, 3, 2, 6144, 16, 32)),
    ),
    lambda dims: dims["H"],
    activation_tolerance,
)
_F32_LOGITS = Case("f32_logits", {**_dims(3, 256, 8, 32, 16, 16), "is_f32": 1})
_ALL_EQUAL = Case("all_equal", {**_dims(2, 256, 8, 32, 16, 16), "all_equal": 1})


def _reduction(depth: int) -> Tolerance:
    return Tolerance(
        relative=BF16_ROUNDING,
        absolute=LARGEST * (3 * BF16_ROUNDING + 17 * F32_ROUNDING) + 2 * dot_error(depth),
        derivation="output rounded to BF16; the weighted sum, each expert's result in it, and the shared expert's, all "
        "below 5, are each rounded to BF16 (2^-8); weights sum to 1, the gate is below it; at most 17 FP32 additions; "
        f"{DOT}, K = {depth}",
    )


_DOWN_CASES = _cases(
    (
        ("depth_512_one_token", (1, 12, 8, 144, 512, 512)),
        ("depth_512", (4, 12, 8, 144, 512, 512)),
        ("depth_512_two_rounds", (2, 20, 13, 40, 512, 512)),
        ("depth_512_beside_272", (2, 12, 8, 48, 512, 272)),
        ("depth_272_beside_512", (2, 12, 8, 48, 272, 512)),
        ("depth_2048", (3, 6, 4, 48, 2048, 2048)),
        ("shared_2048_many_features", (2, 3, 2, 1040, 16, 2048)),
        ("four_supertiles", (3, 3, 2, 80, 784, 784)),
        ("nine_supertiles", (3, 3, 2, 32, 2064, 2064)),
        ("shared_4096", (2, 3, 2, 48, 16, 4096)),
        ("shared_5120", (2, 3, 2, 48, 16, 5120)),
        ("shared_6144", (2, 3, 2, 48, 16, 6144)),
        ("shared_17408", (1, 3, 2, 16, 16, 17408)),
    ),
    lambda dims: max(dims["I"], dims["J"]),
    _reduction,
)
_SOME_ABSENT = Case("some_absent", {**_dims(3, 8, 4, 48, 512, 512), "some_absent": 1}, tolerance=_reduction(512))


def _gate_up_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    return {**router.logits_of_case(dims, rng), "x": scaled(rng, dims["M"], dims["H"])}


def _down_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    routing = random_routing(dims, rng)
    return {
        "h": scaled(rng, dims["M"], dims["T"], dims["I"]),
        "h_shared": scaled(rng, dims["M"], dims["J"]),
        "ids": routing["ids"],
        "weights": routing["weights"],
        "gate": rng.random(dims["M"]).astype(np.float32),
    }


def _exact_gate_up(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    chosen = router.exact_softmax(arguments, {**dims, "top_k": dims["T"]})
    routed = pairwise.exact_pairwise_gate_up({**arguments, "ids": chosen["out_ids"]}, dims)
    x = f64(arguments["x"])
    gate, up = (x @ exact_weight(arguments[name]).T for name in ("shared_gate", "shared_up"))
    return {
        **chosen,
        **routed,
        "out_shared": gate * exact_sigmoid(gate) * up,
        "out_gate": exact_sigmoid(x @ f64(arguments["gate_weight"])),
    }


def _exact_down(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    routed = pairwise.exact_pairwise_down(arguments, dims)["out"]
    shared = f64(arguments["h_shared"]) @ exact_weight(arguments["shared_down"]).T
    return {"out": routed + f64(arguments["gate"])[:, None] * shared}


FUSED_GATE_UP = Contract(
    "moe_fused_shared_gate_up",
    "the choice of moe_topk_softmax; silu(gate) * up of every token and choice, and of the shared expert, gate and up "
    f"rounded to BF16 first; sigmoid(x . gate_weight); at most {MOST_TOKENS} tokens",
    Signature(
        (
            TensorParam("x", "bf16", ("M", "H")),
            TensorParam("logits", "bf16|f32", ("M", "E")),
            *(WeightParam(name, "nvfp4", ("E", "I", "H")) for name in ("w_gate", "w_up")),
            *(WeightParam(name, "nvfp4", ("J", "H")) for name in ("shared_gate", "shared_up")),
            TensorParam("gate_weight", "bf16", ("H",)),
            TensorParam("out_ids", "i32", ("M", "T"), "out"),
            TensorParam("out_weights", "f32", ("M", "T"), "out"),
            TensorParam("out", "bf16", ("M", "T", "I"), "out"),
            TensorParam("out_shared", "bf16", ("M", "J"), "out"),
            TensorParam("out_gate", "f32", ("M",), "out"),
        ),
        multiples=(("H", GROUP),),
        limits=(("M", MOST_TOKENS), ("E", MOST_EXPERTS), ("T", MOST_CHOICES), ("T", "E")),
    ),
    _exact_gate_up,
    (*_GATE_UP_CASES, _F32_LOGITS, _ALL_EQUAL),
    activation_tolerance(DEEPEST),
    inputs=_gate_up_inputs,
    output_tolerances={
        "out_ids": router.TOPK_TOLERANCE,
        "out_weights": router.TOPK_TOLERANCE,
        "out_gate": Tolerance(
            relative=8 * F32_ROUNDING,
            absolute=6144**1.5 / 4 * F32_ROUNDING,
            derivation="the dot product of inputs scaled by 1/sqrt(K) errs by K^1.5 * 2^-24, K up to 6144, the sigmoid "
            "by a quarter of that and 8 roundings",
        ),
    },
)
FUSED_DOWN = Contract(
    "moe_fused_shared_down",
    "weighted sum of the chosen experts' down projections, each rounded to BF16, and the sum too, plus gate times the "
    f"shared expert's, rounded to BF16; at most {MOST_TOKENS} tokens",
    Signature(
        (
            TensorParam("h", "bf16", ("M", "T", "I")),
            TensorParam("h_shared", "bf16", ("M", "J")),
            TensorParam("ids", "i32", ("M", "T")),
            TensorParam("weights", "f32", ("M", "T")),
            TensorParam("gate", "f32", ("M",)),
            WeightParam("w_down", "nvfp4", ("E", "H", "I")),
            WeightParam("shared_down", "nvfp4", ("H", "J")),
            TensorParam("out", "bf16", ("M", "H"), "out"),
        ),
        multiples=(("I", GROUP), ("J", GROUP)),
        limits=(("M", MOST_TOKENS),),
    ),
    _exact_down,
    (*_DOWN_CASES, _SOME_ABSENT),
    _reduction(DEEPEST),
    inputs=_down_inputs,
)
