"""The contract of paged attention with one row for each sequence, and parts that prefill uses too."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import BF16_ROUNDING, EXACT, F32_ROUNDING, F64, Array, Dims, exact_sigmoid, f64
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import Dim, ScalarParam, Signature, TensorParam

CACHES = tuple(TensorParam(name, "bf16", ("P", "B", "Hk", "D")) for name in ("k_cache", "v_cache"))
CONTEXT_LENS = TensorParam("context_lens", "i32", ("S",))
BLOCK_TABLE = TensorParam("block_table", "i32", ("S", "L"))
SCALE = ScalarParam("scale", "f32", minimum=0.0)
GROUPED_HEADS: tuple[tuple[Dim, Dim], ...] = (("Hq", "Hk"),)

_WIDEST, _LONGEST = 256, 96
LARGEST_VALUE = 6.0


# Scores: D products of unit Gaussians added in any order err by D * 2^-24 * sum |q k|, and sum |q k| < D; the scale is
# D^-0.5 at most. A weight errs by twice that relatively, in itself and in the sum; so does the mean of values below 6.
# A kernel may hold a weight in two BF16, which is 2^-17.
def attention_tolerance(longest: int) -> Tolerance:
    """Bound attention over at most ``longest`` tokens."""
    return Tolerance(
        relative=BF16_ROUNDING,
        absolute=2 * LARGEST_VALUE * (_WIDEST**1.5 + longest + 16 + 128) * F32_ROUNDING,
        derivation=f"one rounding to BF16 (2^-8); scores of {_WIDEST} products scaled by D^-0.5 err by D^1.5 * 2^-24, "
        f"which moves weights by that much relatively, twice with their sum; {longest} additions over the context; 16 "
        "FP32 operations; weights held to 2^-17; values below 6",
    )


ATTENTION_TOLERANCE = attention_tolerance(_LONGEST)


def paged_context(dims: Dims, rng: "np.random.Generator", lengths: Array) -> Arguments:
    """Return caches, table and lengths: pages in any order, NaN and page -1 outside the contexts.

    Two sequences may share a page, as those with a common prefix do, when there are fewer pages than entries.
    """
    pages, page_size = dims["P"], dims["B"]
    shape = (dims["S"], dims["L"])
    table = rng.permutation(np.arange(shape[0] * shape[1]) % pages).reshape(shape).astype(np.int32)
    table[np.arange(shape[1]) >= -(-lengths[:, None] // page_size)] = -1
    is_token = np.zeros((pages, page_size), bool)
    for row, length in zip(table, lengths, strict=True):
        tokens = np.arange(length)
        is_token[row[tokens // page_size], tokens % page_size] = True
    made: Arguments = {"block_table": table, "context_lens": lengths.astype(np.int32)}
    for cache in CACHES:
        values = rng.standard_normal((pages, page_size, dims["Hk"], dims["D"]))
        values[~is_token] = np.nan
        made[cache.name] = values.astype(numpy_dtype("bf16"))
    return made


def exact_attention(q: F64, arguments: Arguments, sequence: int, length: int) -> F64:
    """Return attention of one row ``q [Hq, D]`` over the first ``length`` tokens of a sequence."""
    if length == 0:
        return np.zeros_like(q)
    tokens = np.arange(length)
    page_size = arguments["k_cache"].shape[1]
    places = arguments["block_table"][sequence, tokens // page_size], tokens % page_size
    repeats = q.shape[0] // arguments["k_cache"].shape[2]
    keys, values = (np.repeat(f64(arguments[name][places]), repeats, axis=1) for name in ("k_cache", "v_cache"))
    scores = np.einsum("hd,thd->ht", q, keys) * np.float64(np.float32(arguments["scale"]))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    mean: F64 = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)
    return mean


def _exact_decode(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    lengths = arguments["context_lens"].tolist()
    rows = [exact_attention(q, arguments, s, lengths[s]) for s, q in enumerate(f64(arguments["q"]))]
    return {"out": np.array(rows).reshape(arguments["q"].shape)}


def _context(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """The first context is the longest, every third is empty."""
    lengths = rng.integers(1, dims["longest"] + 1, dims["S"])
    lengths[:1] = dims["longest"]
    lengths[2::3] = 0
    return paged_context(dims, rng, lengths)


def _dims(sequences: int, heads: tuple[int, int, int], pages: tuple[int, int, int], longest: int) -> dict[str, int]:
    names = ("Hq", "Hk", "D", "P", "B", "L")
    return {"S": sequences, **dict(zip(names, (*heads, *pages), strict=True)), "longest": longest}


_MODEL_SCALE = {"scale": _WIDEST**-0.5}

_Q, _OUT = TensorParam("q", "bf16", ("S", "Hq", "D")), TensorParam("out", "bf16", ("S", "Hq", "D"), "out")
DECODE = Contract(
    "paged_decode_attn",
    "softmax(scale q k^T) v over a paged context, one row a sequence, grouped heads, FP32 inside; no context: zeros",
    Signature(
        (
            _Q,
            *CACHES,
            BLOCK_TABLE,
            CONTEXT_LENS,
            SCALE,
            _OUT,
        ),
        GROUPED_HEADS,
    ),
    _exact_decode,
    (
        Case("one_row", _dims(1, (4, 2, 64), (5, 16, 4), 33), {"scale": 64**-0.5}),
        Case("one_token", _dims(1, (2, 1, 32), (1, 16, 1), 1), {"scale": 32**-0.5}),
        Case("wide_heads", _dims(2, (16, 2, _WIDEST), (8, 16, 4), 50), {"scale": _WIDEST**-0.5}),
        Case("full_pages", _dims(3, (6, 6, 16), (20, 16, 6), _LONGEST), {"scale": 0.25}),
        Case("odd", _dims(7, (15, 5, 33), (9, 7, 3), 20), {"scale": 33**-0.5}),
        Case("shared_pages", _dims(5, (3, 1, 8), (2, 4, 3), 11), {"scale": 8**-0.5}),
        Case("uniform_weights", _dims(2, (2, 2, 16), (4, 8, 2), 16), {"scale": 0.0}),
        Case("twelve_heads_a_key", _dims(2, (12, 1, 64), (4, 16, 5), 70), {"scale": 0.125}),
        Case("drafter", _dims(1, (32, 4, 128), (19, 64, 19), 1200), {"scale": 128**-0.5}, attention_tolerance(1200)),
        Case("model_35b", _dims(2, (16, 2, _WIDEST), (45, 16, 23), 355), _MODEL_SCALE, attention_tolerance(355)),
        Case("model_27b", _dims(3, (24, 4, _WIDEST), (600, 16, 200), 3189), _MODEL_SCALE, attention_tolerance(3189)),
        Case("every_piece", _dims(1, (16, 2, _WIDEST), (600, 16, 600), 9500), _MODEL_SCALE, attention_tolerance(9500)),
        Case(
            "more_rows_than_have_pieces_to_themselves",
            _dims(33, (4, 2, 64), (140, 16, 132), 2100),
            {"scale": 0.125},
            attention_tolerance(2100),
        ),
        Case("no_sequences", _dims(0, (4, 2, 16), (2, 8, 2), 1), {"scale": 0.25}),
    ),
    ATTENTION_TOLERANCE,
    inputs=_context,
)


def _gated_tolerance(longest: int) -> Tolerance:
    """Bound attention that is rounded, then gated; the gate's factor is at most 1."""
    attention = attention_tolerance(longest)
    return Tolerance(
        relative=2 * BF16_ROUNDING * (1 + BF16_ROUNDING) + 4 * F32_ROUNDING,
        absolute=attention.absolute,
        derivation=f"{attention.derivation}; another rounding to BF16, and four FP32 operations for the gate",
    )


def _exact_gated(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    return {"out": _exact_decode(arguments, dims)["out"] * exact_sigmoid(f64(arguments["gate"]))}


DECODE_GATED = Contract(
    "paged_decode_attn_gated",
    "paged_decode_attn, rounded to BF16, times sigmoid(gate)",
    Signature(
        (_Q, *CACHES, BLOCK_TABLE, CONTEXT_LENS, TensorParam("gate", "bf16", ("S", "Hq", "D")), SCALE, _OUT),
        GROUPED_HEADS,
    ),
    _exact_gated,
    (
        Case("one_row", _dims(1, (4, 2, 64), (5, 16, 4), 33), {"scale": 64**-0.5}),
        Case("several_pieces", _dims(2, (16, 2, 128), (8, 16, 6), 90), {"scale": 128**-0.5}),
        Case("odd", _dims(7, (15, 5, 33), (9, 7, 3), 20), {"scale": 33**-0.5}),
        Case("twelve_heads_a_key", _dims(2, (12, 1, 64), (4, 16, 5), 70), {"scale": 0.125}),
        Case("model_35b", _dims(4, (16, 2, _WIDEST), (45, 16, 23), 355), _MODEL_SCALE, _gated_tolerance(355)),
        Case("model_27b", _dims(3, (24, 4, _WIDEST), (600, 16, 200), 3189), _MODEL_SCALE, _gated_tolerance(3189)),
        Case("many_rows", _dims(40, (24, 4, 64), (66, 16, 64), 1000), {"scale": 0.125}, _gated_tolerance(1000)),
        Case("no_sequences", _dims(0, (4, 2, 16), (2, 8, 2), 1), {"scale": 0.25}),
    ),
    _gated_tolerance(_LONGEST),
    inputs=_context,
)

# The values of tokens outside a context, which would show in a result. NaN cannot be used for an inout array.
_LOUD = 3e4
# A value at the edge between two BF16 may fall on either side after FP32 operations: about one in 500, so that few of a
# head's do, each moving a score by 2^-8 of a product of two values around 1. Six standard deviations of four of them.
_FLIPS = 4


def _fresh_tolerance(longest: int) -> Tolerance:
    """Bound gated attention with normalised and rotated queries and newest key, which are rounded twice on the way."""
    gated = _gated_tolerance(longest)
    return Tolerance(
        relative=gated.relative,
        absolute=gated.absolute + 2 * LARGEST_VALUE * 6 * _FLIPS**0.5 * BF16_ROUNDING * 64**-0.5,
        derivation=f"{gated.derivation}; {_FLIPS} values of a head that BF16 rounds the other way, which move a score "
        "by 2^-8 times 64^-0.5 each, of random sign (six standard deviations), and weights by that twice",
    )


def _rounded(values: F64) -> F64:
    return f64(values.astype(numpy_dtype("bf16")))


def _normalised_and_turned(arguments: Arguments, dims: Dims, name: str) -> F64:
    """Return heads ``[S, H, D]``: BF16 after the norm, and after the turn of complex pairs."""
    wide, half = f64(arguments[name]), dims["rotary_dim"] // 2
    mean = np.mean(wide**2, axis=-1, keepdims=True) + np.float64(np.float32(arguments["eps"]))
    scale = np.float64(arguments["weight_offset"]) + f64(arguments[f"{name}_weight"])
    normed = _rounded(wide / np.sqrt(mean) * scale)
    exponents = np.arange(half) / half * np.log(np.float64(np.float32(arguments["theta"])))
    angles = f64(arguments["positions"])[:, None, None] * np.exp(-exponents)
    pairs = (normed[..., :half] + 1j * normed[..., half : 2 * half]) * np.exp(1j * angles)
    return _rounded(np.concatenate([pairs.real, pairs.imag, normed[..., 2 * half :]], axis=-1))


def _exact_fresh(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    q, keys = (_normalised_and_turned(arguments, dims, name) for name in ("q", "k"))
    found: dict[str, Any] = {}
    for name, rows in (("k_cache", keys), ("v_cache", f64(arguments["v"]))):
        flat = f64(arguments[name]).reshape(-1, *rows.shape[1:])
        kept = arguments["slots"] >= 0
        flat[arguments["slots"][kept]] = rows[kept]
        found[name] = flat.reshape(arguments[name].shape)
    gate = exact_sigmoid(f64(arguments["gate"]))
    out = [
        exact_attention(row, {**arguments, **found}, s, length)
        for s, (row, length) in enumerate(zip(q, arguments["context_lens"].tolist(), strict=True))
    ]
    return {"out": np.array(out).reshape(q.shape) * gate, **found}


def _fresh_context(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Return contexts with a new last token; every third is empty, of every fourth the cache has the token."""
    made = _context(dims, rng)
    lengths, table = made["context_lens"], made["block_table"]
    last = np.maximum(lengths - 1, 0)
    places = table[np.arange(len(last)), last // dims["B"]] * dims["B"] + last % dims["B"]
    slots = np.where(lengths > 0, places, -1).astype(np.int32)
    slots[3::4] = -1
    for cache in CACHES:
        values = made[cache.name]
        flat = values.reshape(-1, *values.shape[2:])
        flat[slots[slots >= 0]] = _LOUD
        values[np.isnan(values.astype(np.float32))] = _LOUD
    weights = {f"{name}_weight": (rng.random(dims["D"]) - 0.5).astype(numpy_dtype("bf16")) for name in ("q", "k")}
    return {**made, **weights, "slots": slots, "positions": (last + rng.integers(0, 9, len(last))).astype(np.int32)}


def _fresh(
    name: str, sequences: int, heads: tuple[int, int, int], pages: tuple[int, int], longest: int, rotary_dim: int
) -> Case:
    """A case of ``(B, L)`` pages, as many in all as the sequences have entries."""
    page, entries = pages
    dims = {**_dims(sequences, heads, (sequences * entries, page, entries), longest), "rotary_dim": rotary_dim}
    scalars = {"scale": heads[2] ** -0.5, "eps": 1e-6, "weight_offset": 1.0, "theta": 1e7}
    return Case(name, dims, scalars, _fresh_tolerance(longest))


DECODE_FRESH = Contract(
    "paged_decode_attn_fresh",
    "qk_norm_rope_append, whose tokens are the last ones of their contexts, then paged_decode_attn_gated; heads of 64, "
    "128 or 256 values",
    Signature(
        (
            _Q,
            TensorParam("k", "bf16", ("S", "Hk", "D")),
            TensorParam("v", "bf16", ("S", "Hk", "D")),
            TensorParam("q_weight", "bf16", ("D",)),
            TensorParam("k_weight", "bf16", ("D",)),
            TensorParam("positions", "i32", ("S",)),
            TensorParam("slots", "i32", ("S",)),
            ScalarParam("eps", "f32", minimum=0.0),
            ScalarParam("weight_offset", "f32"),
            ScalarParam("rotary_dim", "i32", minimum=2),
            ScalarParam("theta", "f32", minimum=1.0),
            *(TensorParam(cache.name, cache.dtype, cache.shape, "inout") for cache in CACHES),
            BLOCK_TABLE,
            CONTEXT_LENS,
            TensorParam("gate", "bf16", ("S", "Hq", "D")),
            SCALE,
            _OUT,
        ),
        (*GROUPED_HEADS, ("rotary_dim", 2)),
        (("rotary_dim", "D"), ("Hk", "Hq")),
    ),
    _exact_fresh,
    (
        _fresh("one_row", 1, (16, 2, _WIDEST), (16, 4), 33, 64),
        _fresh("one_token", 1, (4, 2, 64), (16, 1), 1, 64),
        _fresh("several_rows", 9, (4, 1, 128), (16, 6), 90, 128),
        _fresh("odd_pages", 5, (6, 2, 64), (7, 11), 77, 22),
        _fresh("twelve_heads_a_key", 3, (12, 1, 64), (16, 9), 129, 64),
        _fresh("model_35b", 2, (16, 2, _WIDEST), (16, 45), 705, 64),
        _fresh("model_27b", 3, (24, 4, _WIDEST), (16, 101), 1601, 64),
        _fresh("many_rows", 40, (24, 4, 64), (16, 40), 640, 64),
        _fresh("no_sequences", 0, (4, 2, 64), (8, 2), 1, 64),
    ),
    _fresh_tolerance(_LONGEST),
    inputs=_fresh_context,
    output_tolerances={
        "k_cache": Tolerance(
            relative=2 * BF16_ROUNDING,
            absolute=LARGEST_VALUE * 2 * BF16_ROUNDING,
            derivation="a value and the one it turns with, below 6 in these cases, rounded twice, either way each time",
        ),
        "v_cache": EXACT,
    },
)
