"""The contract of paged causal attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import F32_ROUNDING, Dims, f64, random_cu_rows
from kernel_muster.plugins.paged_decode.contracts import (
    ATTENTION_TOLERANCE,
    BLOCK_TABLE,
    CACHES,
    CONTEXT_LENS,
    DECODE,
    GROUPED_HEADS,
    LARGEST_VALUE,
    SCALE,
    attention_tolerance,
    exact_attention,
    paged_context,
)
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Run, Tolerance
from kernel_muster.registry.contract.signature import Signature, TensorParam


def _exact_prefill(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    q, ends = f64(arguments["q"]), arguments["cu_rows"]
    rows = []
    for row in range(dims["M"]):
        sequence = int(np.searchsorted(ends, row, side="right")) - 1
        length = int(arguments["context_lens"][sequence] - (ends[sequence + 1] - 1 - row))
        rows.append(exact_attention(q[row], arguments, sequence, length))
    return {"out": np.array(rows).reshape(q.shape)}


def _context(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Every second sequence has ``before`` tokens ahead of its rows."""
    cu_rows = random_cu_rows(dims, rng)
    before = np.where(np.arange(dims["S"]) % 2 == 0, dims["before"], 0)
    return {"cu_rows": cu_rows, **paged_context(dims, rng, np.diff(cu_rows) + before)}


def _dims(
    rows: int, sequences: int, before: int, heads: tuple[int, int, int], pages: tuple[int, int, int]
) -> dict[str, int]:
    names = ("Hq", "Hk", "D", "P", "B", "L")
    return {"M": rows, "S": sequences, "before": before, **dict(zip(names, (*heads, *pages), strict=True))}


def _as_decode(run: Run, arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    """Return the outputs as decode makes them, every row a sequence of its own over the context up to itself."""
    counts = np.diff(arguments["cu_rows"])
    sequence = np.repeat(np.arange(len(counts)), counts)
    left = arguments["cu_rows"][1:][sequence] - 1 - np.arange(len(sequence))
    given = {name: arguments[name] for name in ("q", "k_cache", "v_cache", "scale", "out")}
    table, lengths = arguments["block_table"][sequence], arguments["context_lens"][sequence] - left
    return run({**given, "block_table": table, "context_lens": lengths.astype(np.int32)})


_MODEL_SCALE = {"scale": 256**-0.5}
_LONGEST_SHORT = 96  # the most of a case without its own tolerance

_SIGNATURE = Signature(
    (
        TensorParam("q", "bf16", ("M", "Hq", "D")),
        *CACHES,
        BLOCK_TABLE,
        TensorParam("cu_rows", "i32", ("S + 1",)),
        CONTEXT_LENS,
        SCALE,
        TensorParam("out", "bf16", ("M", "Hq", "D"), "out"),
    ),
    GROUPED_HEADS,
)

PREFILL = Contract(
    "prefill_paged_attn",
    "causal softmax(scale q k^T) v over a paged context whose last tokens are the rows; a row is decode of its prefix",
    _SIGNATURE,
    _exact_prefill,
    (
        Case("one_row", _dims(1, 1, 20, (4, 2, 64), (3, 16, 2)), {"scale": 0.125}),
        Case("first_prompt", _dims(33, 1, 0, (4, 1, 32), (3, 16, 3)), {"scale": 32**-0.5}),
        Case("later_part", _dims(17, 1, 31, (2, 2, 16), (3, 16, 3)), {"scale": 0.25}),
        Case("wide_heads", _dims(5, 2, 13, (16, 2, 256), (4, 16, 2)), {"scale": 0.0625}),
        Case("ragged", _dims(23, 5, 9, (6, 3, 33), (30, 7, 5)), {"scale": 33**-0.5}),
        Case("more_sequences_than_rows", _dims(2, 4, 3, (2, 1, 8), (8, 4, 2)), {"scale": 8**-0.5}),
        Case("model_35b", _dims(19, 1, 40, (16, 2, 256), (4, 16, 4)), _MODEL_SCALE),
        Case(
            "model_27b",
            _dims(37, 3, 1030, (24, 4, 256), (210, 16, 70)),
            _MODEL_SCALE,
            attention_tolerance(70 * 16),
        ),
        Case("late_rows", _dims(3, 1, 3000, (16, 2, 256), (190, 16, 189)), _MODEL_SCALE, attention_tolerance(189 * 16)),
        Case("no_rows", _dims(0, 2, 5, (4, 2, 16), (2, 8, 2)), {"scale": 0.25}),
        Case("no_sequences", _dims(0, 0, 0, (4, 2, 16), (2, 8, 2)), {"scale": 0.25}),
    ),
    ATTENTION_TOLERANCE,
    inputs=_context,
    by_rows={DECODE.name: _as_decode},
)

# A weight in one BF16 errs by 2^-9 of itself, and the sum of weights does not: that moves a mean of values by at most
# 2^-9 of their largest.
_WEIGHT_ROUNDING = 2.0**-9
# Results of up to 32 parts of a context, each with a weight of its own, which errs by 2^-22, and one addition.
_PART_ROUNDINGS = 32 + 4


def mma_tolerance(longest: int) -> Tolerance:
    """Bound attention over at most ``longest`` tokens, with weights rounded to BF16."""
    in_float = attention_tolerance(longest)
    return Tolerance(
        in_float.relative,
        in_float.absolute + LARGEST_VALUE * (_WEIGHT_ROUNDING + 2 * _PART_ROUNDINGS * F32_ROUNDING),
        f"{in_float.derivation}; each weight rounded to BF16 (2^-9) after the sum took it; parts of a context put "
        f"together by {_PART_ROUNDINGS} FP32 operations",
    )


def _long(name: str, rows: int, sequences: int, before: int, heads: tuple[int, int, int], pages: int) -> Case:
    """A case of pages of 16 tokens, ``pages`` a sequence."""
    dims = _dims(rows, sequences, before, heads, (sequences * pages, 16, pages))
    return Case(name, dims, {"scale": heads[2] ** -0.5}, mma_tolerance(16 * pages))


PREFILL_MMA = Contract(
    "prefill_paged_attn_mma",
    "causal softmax(scale q k^T) v over a paged context whose last tokens are the rows, weights rounded to BF16; a row "
    "has the bits that it has in any launch, alone too, that cuts its context in the same parts",
    _SIGNATURE,
    _exact_prefill,
    (
        Case("one_row", _dims(1, 1, 20, (8, 1, 128), (3, 16, 2)), {"scale": 128**-0.5}),
        Case("one_token", _dims(1, 1, 0, (4, 1, 256), (1, 16, 1)), _MODEL_SCALE),
        Case("first_prompt", _dims(33, 1, 0, (8, 2, 256), (3, 16, 3)), _MODEL_SCALE),
        Case("later_part", _dims(17, 1, 31, (2, 2, 128), (3, 16, 3)), {"scale": 128**-0.5}),
        Case("ragged", _dims(23, 5, 9, (6, 3, 128), (30, 7, 5)), {"scale": 128**-0.5}),
        Case("odd_pages", _dims(41, 3, 50, (4, 1, 256), (40, 5, 19)), _MODEL_SCALE),
        Case("more_sequences_than_rows", _dims(2, 4, 3, (2, 1, 256), (8, 4, 2)), _MODEL_SCALE),
        Case("uniform_weights", _dims(9, 2, 16, (4, 2, 128), (4, 16, 2)), {"scale": 0.0}),
        Case("more_heads_a_key_than_a_tile_has_rows", _dims(3, 1, 12, (134, 1, 128), (1, 16, 1)), {"scale": 128**-0.5}),
        _long("several_tiles_of_rows", 100, 2, 70, (16, 2, 256), 11),
        _long("first_prompt_of_several_tiles", 130, 1, 0, (8, 1, 128), 9),
        _long("drafter", 40, 1, 400, (32, 4, 128), 28),
        _long("model_35b", 65, 1, 40, (16, 2, 256), 7),
        _long("model_27b", 37, 3, 1030, (24, 4, 256), 70),
        _long("late_rows", 3, 1, 3000, (16, 2, 256), 189),
        _long("parts_that_some_rows_of_a_tile_see", 70, 1, 330, (16, 2, 128), 25),
        _long("contexts_of_many_parts_and_of_one", 12, 6, 2900, (4, 1, 256), 182),
        Case(
            "parts_of_odd_pages",
            _dims(19, 4, 1500, (6, 3, 128), (900, 7, 225)),
            {"scale": 128**-0.5},
            mma_tolerance(7 * 225),
        ),
        Case("no_rows", _dims(0, 2, 5, (4, 2, 128), (2, 8, 2)), {"scale": 0.25}),
        Case("no_sequences", _dims(0, 0, 0, (4, 2, 256), (2, 8, 2)), {"scale": 0.25}),
    ),
    mma_tolerance(_LONGEST_SHORT),
    inputs=_context,
)
