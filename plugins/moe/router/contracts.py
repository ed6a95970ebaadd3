"""Contracts of routing."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import (
    DEEPEST_K,
    EXACT,
    F32_ROUNDING,
    F64,
    Array,
    Dims,
    dot_tolerance,
    exact_project,
    exact_sigmoid,
    f64,
)
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam, WeightParam

_LOGITS = TensorParam("logits", "bf16|f32", ("M", "E"))
_TOP_K = ScalarParam("top_k", "i32", minimum=1)
_CHOICE = (
    TensorParam("out_ids", "i32", ("M", "top_k"), "out"),
    TensorParam("out_weights", "f32", ("M", "top_k"), "out"),
)
_TOPK_CASES = tuple(
    Case(name, {"M": m, "E": e, "top_k": k})
    for name, m, e, k in (
        ("one_token", 1, 256, 8),
        ("one_expert", 3, 1, 1),
        ("all_experts", 2, 5, 5),
        ("top_one", 4, 33, 1),
        ("ties_in_bf16", 33, 256, 8),  # 256 BF16 values of one Gaussian repeat in most rows
        ("odd_experts", 17, 77, 3),
        ("sixteen_choices", 5, 256, 16),
        ("a_lane_a_choice", 5, 256, 32),
        ("most_of_few_experts", 5, 40, 31),
        ("more_experts_than_registers", 3, 300, 40),
        ("no_tokens", 0, 8, 2),
    )
)
_ALL_EQUAL = Case("all_equal", {"M": 2, "E": 256, "top_k": 8, "all_equal": 1})
_F32_LOGITS = Case("f32_logits", {"M": 5, "E": 256, "top_k": 8, "is_f32": 1})
_NO_BIAS = Case("no_bias", {"M": 5, "E": 256, "top_k": 8, "no_bias": 1})


def logits_of_case(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Return the logits or the bias that a case asks for; others are BF16 logits with a bias."""
    made: Arguments = {}
    if "is_f32" in dims:
        made["logits"] = rng.standard_normal((dims["M"], dims["E"])).astype(np.float32)
    if "all_equal" in dims:
        made["logits"] = np.full((dims["M"], dims["E"]), -0.75, np.float32).astype(numpy_dtype("bf16"))
    if "no_bias" in dims:
        made["bias"] = None
    return made


# Renormalising cancels the softmax's own sum; what stays is the exponentials, two quotients and a sum of T weights.
TOPK_TOLERANCE = Tolerance(
    relative=96 * F32_ROUNDING,
    absolute=1e-37,
    derivation="FP32 throughout, numerator and normaliser alike: an exponential whose argument, below 16, is rounded "
    "twice (32 * 2^-24) and 16 roundings for itself, quotients and the sum; absolute: the smallest normal number",
)


def _chosen(preference: F64, scores: F64, count: int) -> dict[str, Any]:
    """Rank by preference, then by index; every pair of experts is compared."""
    index = np.arange(preference.shape[1])
    other, own = preference[:, None, :], preference[:, :, None]
    ahead = (other > own) | ((other == own) & (index < index[:, None]))
    ids = np.argsort(ahead.sum(axis=2), axis=1)[:, :count]
    weights = np.take_along_axis(scores, ids, axis=1)
    return {"out_ids": ids, "out_weights": weights / weights.sum(axis=1, keepdims=True)}


def exact_softmax(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    """Return the choice by logits and its weights."""
    logits = f64(arguments["logits"])
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    return _chosen(logits, scores, dims["top_k"])


def _exact_sigmoid_choice(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    logits, bias = f64(arguments["logits"]), arguments["bias"]
    scores = exact_sigmoid(logits)
    return _chosen(logits if bias is None else scores + f64(bias), scores, dims["top_k"])


TOPK_SOFTMAX = Contract(
    "moe_topk_softmax",
    "softmax over the experts in FP32, the top_k largest logits (ties: lowest index), weights renormalised to sum 1",
    Signature((_LOGITS, _TOP_K, *_CHOICE), limits=(("top_k", "E"),)),
    exact_softmax,
    (*_TOPK_CASES, _ALL_EQUAL, _F32_LOGITS),
    TOPK_TOLERANCE,
    inputs=logits_of_case,
)
TOPK_SIGMOID = Contract(
    "moe_topk_sigmoid",
    "sigmoid scores, the top_k largest of score plus bias (ties: lowest index), scores renormalised to sum 1",
    Signature((_LOGITS, TensorParam("bias", "f32", ("E",), optional=True), _TOP_K, *_CHOICE), limits=(("top_k", "E"),)),
    _exact_sigmoid_choice,
    (*_TOPK_CASES, _ALL_EQUAL, _F32_LOGITS, _NO_BIAS),
    TOPK_TOLERANCE,
    inputs=logits_of_case,
)
ROUTER_LOGITS = Contract(
    "moe_router_logits_f32",
    "router logits kept in FP32: out = x w^T for BF16 weights",
    Signature(
        (
            TensorParam("x", "bf16", ("M", "H")),
            WeightParam("w", "bf16", ("E", "H")),
            TensorParam("out", "f32", ("M", "E"), "out"),
        )
    ),
    exact_project,
    tuple(
        Case(name, {"M": m, "E": e, "H": h}, tolerance=dot_tolerance(h, F32_ROUNDING))
        for name, m, e, h in (
            ("one_token", 1, 256, 64),
            ("odd", 17, 33, 77),
            ("one_value", 2, 3, 1),
            ("deep_k", 2, 8, DEEPEST_K),
            ("model_35b", 9, 256, 2048),
            ("no_tokens", 0, 8, 16),
        )
    ),
    dot_tolerance(DEEPEST_K, F32_ROUNDING),
)


def random_ids(dims: Dims, rng: "np.random.Generator") -> Array:
    """Draw ``[M, T]`` different experts a token, low ones far more often, so that some expert has none.

    A case may ask for hard routings of one choice: ``all_on_one`` is the last but one expert for every token,
    ``one_each`` the experts in falling order, one a token. ``some_absent`` takes every third choice away (-1), and all
    of the first token's.
    """
    if "all_on_one" in dims:
        return np.full((dims["M"], 1), dims["E"] - 2, np.int32)
    if "one_each" in dims:
        return np.arange(dims["E"], dtype=np.int32)[::-1][: dims["M"], None].copy()
    order = rng.random((dims["M"], dims["E"])) ** (1.0 + np.arange(dims["E"]))
    ids = np.argsort(-order, axis=1)[:, : dims["T"]].astype(np.int32)
    if "some_absent" in dims:
        ids[np.arange(ids.size).reshape(ids.shape) % 3 == 0] = -1
        ids[0] = -1
    return ids


def exact_sort(ids: Array, experts: int) -> tuple[Array, Array]:
    """Return the slots by expert, -1 for those of no expert at the end, and the offsets."""
    flat = ids.ravel()
    counts = np.bincount(flat[flat >= 0], minlength=experts)
    slots = np.argsort(np.where(flat < 0, experts, flat), kind="stable")
    slots[counts.sum() :] = -1
    return slots, np.concatenate([[0], np.cumsum(counts)])


def exact_work(offsets: Array) -> Array:
    """Return the work list ``[E, 4]``: (expert, begin, end, count) of each of the count experts that have slots."""
    owners = np.flatnonzero(np.diff(offsets))
    work = np.zeros((len(offsets) - 1, 4), np.int64)
    work[:, 0], work[:, 3] = -1, len(owners)
    work[: len(owners), :3] = np.stack([owners, offsets[owners], offsets[owners + 1]], axis=1)
    return work


def _exact_sort_by_expert(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    slots, offsets = exact_sort(arguments["ids"], dims["experts"])
    return {"out_slots": slots, "out_offsets": offsets, "out_work": exact_work(offsets)}


SORT_BY_EXPERT = Contract(
    "moe_sort_by_expert",
    "slots ordered by expert, then by slot; offsets[e] is where expert e begins, offsets[experts] where the last ends; "
    "a slot of id -1 is left out, and as many -1 are at the end; the work list has (expert, begin, end, count) of "
    "each of the count experts that have slots, in order, and (-1, 0, 0, count) behind them",
    Signature(
        (
            TensorParam("ids", "i32", ("M", "T")),
            ScalarParam("experts", "i32", minimum=1),
            TensorParam("out_slots", "i32", ("M*T",), "out"),
            TensorParam("out_offsets", "i32", ("experts + 1",), "out"),
            TensorParam("out_work", "i32", ("experts", 4), "out"),
        )
    ),
    _exact_sort_by_expert,
    (
        *(
            Case(name, {"M": m, "T": t, "E": e, "experts": e})
            for name, m, t, e in (
                ("one_token", 1, 8, 256),
                ("one_expert", 5, 1, 1),
                ("all_experts", 3, 4, 4),
                ("many_tokens", 65, 8, 256),
                ("odd", 33, 3, 7),
                ("whole_ladder", 128, 8, 256),
                ("more_experts_than_a_warp_has_words", 9, 8, 1100),
                ("no_tokens", 0, 2, 4),
            )
        ),
        Case("all_on_one", {"M": 128, "T": 1, "E": 6, "experts": 6, "all_on_one": 1}),
        Case("one_each", {"M": 64, "T": 1, "E": 64, "experts": 64, "one_each": 1}),
        Case("some_absent", {"M": 33, "T": 4, "E": 9, "experts": 9, "some_absent": 1}),
    ),
    EXACT,
    inputs=lambda dims, rng: {"ids": random_ids(dims, rng)},
)


def _exact_local_ids(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    local = arguments["ids"].astype(np.int64) - dims["first"]
    return {"out": np.where((local >= 0) & (local < dims["experts"]), local, -1)}


LOCAL_IDS = Contract(
    "moe_local_ids",
    "ids counted from an expert on: out = id - first for first <= id < first + experts, else -1",
    Signature(
        (
            TensorParam("ids", "i32", ("M", "T")),
            ScalarParam("first", "i32"),
            ScalarParam("experts", "i32", minimum=1),
            TensorParam("out", "i32", ("M", "T"), "out"),
        )
    ),
    _exact_local_ids,
    tuple(
        Case(name, {"M": m, "T": t, "E": e, "first": first, "experts": experts})
        for name, m, t, e, first, experts in (
            ("first_half", 5, 8, 256, 0, 128),
            ("last_half", 128, 8, 256, 128, 128),
            ("one_expert", 17, 3, 7, 0, 1),
            ("one_token", 1, 8, 256, 64, 64),
            ("all_experts", 33, 2, 6, 0, 6),
            ("none_of_them", 3, 2, 4, 4, 4),
            ("no_tokens", 0, 2, 4, 2, 2),
        )
    ),
    EXACT,
    inputs=lambda dims, rng: {"ids": random_ids(dims, rng)},
)
