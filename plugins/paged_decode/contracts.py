"""The contract of paged attention with one row a sequence, and what prefill shares with it."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import BF16_ROUNDING, F32_ROUNDING, F64, Array, Dims, exact_sigmoid, f64
from kernel_muster.registry.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.dtypes import numpy_dtype
from kernel_muster.registry.signature import Dim, ScalarParam, Signature, TensorParam

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
    """Return caches, table and lengths: pages in any order, NaN and page -1 wherever no token of a context stands.

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
            "more_rows_than_clusters",
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
