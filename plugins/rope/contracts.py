"""Contracts of rotary position embedding."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import BF16_ROUNDING, EXACT, F32_ROUNDING, F64, Array, Dims, f64
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import Dim, ScalarParam, Signature, TensorParam

_Q = TensorParam("q", "bf16", ("M", "Hq", "D"), "inout")
_K = TensorParam("k", "bf16", ("M", "Hk", "D"), "inout")
_ROTARY = (ScalarParam("rotary_dim", "i32", minimum=2), ScalarParam("theta", "f32", minimum=1.0))
_PAIRS: tuple[tuple[Dim, Dim], ...] = (("rotary_dim", 2),)
_INSIDE: tuple[tuple[Dim, Dim], ...] = (("rotary_dim", "D"),)
_THETA = {"theta": 1e7}

# A cosine or sine may err by 2^-22 (by its rounding and two units more); the draws stay below 6 and one result adds two
# products.
_LARGEST = 6.0
_TOLERANCE = Tolerance(
    relative=BF16_ROUNDING,
    absolute=2 * _LARGEST * (4 + 2) * F32_ROUNDING * (1 + BF16_ROUNDING),
    derivation="one rounding to BF16 (2^-8); two products of values below 6 with a cosine or sine that errs by 2^-22, "
    "each product and their sum rounded to FP32",
)


def _turned(values: Array, angles: F64) -> F64:
    """Multiply pairs by ``exp(i angle)`` as complex numbers: ``values [M, H, D]``, ``angles [M, rotary_dim / 2]``."""
    wide = f64(values)
    half = angles.shape[1]
    turned = (wide[..., :half] + 1j * wide[..., half : 2 * half]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag, wide[..., 2 * half :]], axis=-1)


def _periods(arguments: Arguments, dims: Dims) -> F64:
    """Return how many positions make one radian, by frequency."""
    exponents = 2.0 * np.arange(dims["rotary_dim"] // 2) / dims["rotary_dim"]
    periods: F64 = np.exp(exponents * np.log(np.float64(np.float32(arguments["theta"]))))
    return periods


def _exact_forward(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    angles = f64(arguments["positions"])[:, None] / _periods(arguments, dims)
    return {name: _turned(arguments[name], angles) for name in ("q", "k")}


def _exact_mrope(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    positions = f64(arguments["positions"])
    half = dims["rotary_dim"] // 2
    chosen = np.array([_axis(index, dims["section_h"], dims["section_w"]) for index in range(half)])
    angles = positions.T[:, chosen] / _periods(arguments, dims)
    return {name: _turned(arguments[name], angles) for name in ("q", "k")}


def _axis(index: int, section_h: int, section_w: int) -> int:
    """Return 0 for time, 1 for height, 2 for width."""
    group, place = divmod(index, 3)
    return 1 if place == 1 and group < section_h else 2 if place == 2 and group < section_w else 0


def _positions(dims: Dims, rng: "np.random.Generator") -> Arguments:
    positions = rng.integers(0, 40_000, dims["M"], np.int32)
    positions[:1] = 0
    positions[1:2] = 262_143  # the last position of these models' context
    return {"positions": positions}


def _grid_positions(dims: Dims, rng: "np.random.Generator") -> Arguments:
    return {"positions": rng.integers(0, 4096, (3, dims["M"]), np.int32)}


def _dims(rows: int, query_heads: int, key_heads: int, head_dim: int, rotary_dim: int) -> dict[str, int]:
    return {"M": rows, "Hq": query_heads, "Hk": key_heads, "D": head_dim, "rotary_dim": rotary_dim}


FORWARD = Contract(
    "rope_forward",
    "rotates the first rotary_dim elements of each head of q and k in place, halves against each other",
    Signature((_Q, _K, TensorParam("positions", "i32", ("M",)), *_ROTARY), _PAIRS, _INSIDE),
    _exact_forward,
    (
        Case("one_row", _dims(1, 16, 2, 256, 64), _THETA),
        Case("whole_heads", _dims(3, 4, 2, 64, 64), {"theta": 1e4}),
        Case("dense_model", _dims(3, 24, 4, 256, 64), _THETA),
        Case("many_frequencies", _dims(2, 2, 1, 1040, 1040), _THETA),
        Case("one_pair", _dims(5, 3, 1, 7, 2), {"theta": 1e4}),
        Case("odd_heads", _dims(17, 5, 3, 33, 12), _THETA),
        Case("no_keys", _dims(2, 3, 0, 16, 8), _THETA),
        Case("no_rows", _dims(0, 4, 2, 64, 16), _THETA),
    ),
    _TOLERANCE,
    inputs=_positions,
)

_SECTIONS = tuple(ScalarParam(f"section_{axis}", "i32", minimum=0) for axis in "thw")
_SUM = "section_t + section_h + section_w"


def _grid(rows: int, heads: tuple[int, int, int, int], sections: tuple[int, int, int]) -> dict[str, int]:
    names = ("section_t", "section_h", "section_w")
    return {**_dims(rows, *heads), **dict(zip(names, sections, strict=True))}


MROPE_INTERLEAVED = Contract(
    "rope_mrope_interleaved",
    "rotates as rope_forward by three positions a row: frequency i by height where i % 3 == 1 and i < 3 section_h, by "
    "width where i % 3 == 2 and i < 3 section_w, else by time",
    Signature(
        (_Q, _K, TensorParam("positions", "i32", (3, "M")), *_SECTIONS, *_ROTARY),
        _PAIRS,
        # The sections share the frequencies out, and the interleaved places of height and width exist.
        (
            *_INSIDE,
            (_SUM, "rotary_dim/2"),
            ("rotary_dim/2", _SUM),
            ("3*section_h - 1", "rotary_dim/2"),
            ("3*section_w", "rotary_dim/2"),
        ),
    ),
    _exact_mrope,
    (
        Case("one_row", _grid(1, (16, 2, 256, 64), (11, 11, 10)), _THETA),
        Case("as_in_the_models", _grid(9, (4, 1, 256, 64), (11, 11, 10)), _THETA),
        Case("time_only", _grid(3, (2, 1, 16, 8), (4, 0, 0)), {"theta": 1e4}),
        Case("more_time", _grid(17, (3, 5, 21, 14), (4, 2, 1)), {"theta": 1e4}),
        Case("no_rows", _grid(0, (4, 2, 64, 16), (4, 2, 2)), _THETA),
    ),
    _TOLERANCE,
    inputs=_grid_positions,
)


def _exact_yarn(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    """Stretch one frequency after the other by its place between those that turn 32 times and once."""
    half, factor = dims["rotary_dim"] // 2, np.float64(np.float32(arguments["factor"]))
    theta, context = np.float64(np.float32(arguments["theta"])), dims["original_context"]
    edges = [half * np.emath.logn(theta, context / (2 * np.pi * turns)) for turns in (32.0, 1.0)]
    first, last = max(int(np.floor(edges[0])), 0), min(int(np.ceil(edges[1])), 2 * half - 1)
    periods = _periods(arguments, dims)
    for index in range(half):
        part = min(max((index - first) / ((last - first) or 1e-3), 0.0), 1.0)
        periods[index] /= (1 - part) + part / factor
    angles = f64(arguments["positions"])[:, None] / periods
    scale = 1 + np.log(factor) / 10
    wide = {name: _turned(arguments[name], angles) for name in ("q", "k")}
    for value in wide.values():
        value[..., : 2 * half] *= scale
    return wide


def _stretched(heads: tuple[int, int, int, int, int], context: int) -> dict[str, int]:
    return {**_dims(*heads), "original_context": context}


_LARGEST_SCALE = 1.5  # 1 + 0.1 ln(factor), for factors below 148
YARN = Contract(
    "rope_yarn",
    "rotates as rope_forward with frequencies stretched for contexts factor times the original, and scales what turns",
    Signature(
        (
            _Q,
            _K,
            TensorParam("positions", "i32", ("M",)),
            *_ROTARY,
            ScalarParam("factor", "f32", minimum=1.0),
            ScalarParam("original_context", "i32", minimum=1),
        ),
        _PAIRS,
        _INSIDE,
    ),
    _exact_yarn,
    (
        Case("one_row", _stretched((1, 32, 4, 128, 128), 4096), {"theta": 1e7, "factor": 64.0}),
        Case("not_stretched", _stretched((3, 4, 2, 64, 64), 4096), {"theta": 1e7, "factor": 1.0}),
        Case("partial", _stretched((5, 3, 1, 33, 12), 512), {"theta": 1e4, "factor": 4.0}),
        Case("short_context", _stretched((17, 5, 3, 16, 16), 4), {"theta": 1e4, "factor": 8.0}),
        Case("no_keys", _stretched((2, 3, 0, 16, 8), 4096), {"theta": 1e7, "factor": 64.0}),
        Case("no_rows", _stretched((0, 4, 2, 64, 16), 4096), {"theta": 1e7, "factor": 64.0}),
    ),
    Tolerance(
        relative=_TOLERANCE.relative,
        absolute=_LARGEST_SCALE * _TOLERANCE.absolute,
        derivation=f"{_TOLERANCE.derivation}; all of it scaled by at most {_LARGEST_SCALE}",
    ),
    inputs=_positions,
)

# A warp computes one head; these are the most values of its lanes.
_WIDEST_HEAD = 1024
_CACHES = tuple(TensorParam(f"{name}_cache", "bf16", ("P", "B", "Hk", "D"), "inout") for name in ("k", "v"))
# Normalised values times 1 + weight, the weight at most a half: below 9. The norm is rounded to BF16 where its own sum
# errs by D * 2^-25; a pair then takes half a unit of each of two such values, and another rounding.
_LARGEST_NORMALISED = 9.0


def _exact_fused(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    angles = f64(arguments["positions"])[:, None] / _periods(arguments, dims)
    turned = {name: _turned_norm(arguments, name, angles) for name in ("q", "k")}
    places = np.equal.outer(np.arange(dims["P"] * dims["B"]), arguments["slots"]).astype(np.float64)
    rows = {"k_cache": turned["k"], "v_cache": f64(arguments["v"])}
    return {"q": turned["q"], **{name: _placed(places, row, arguments[name]) for name, row in rows.items()}}


def _turned_norm(arguments: Arguments, name: str, angles: F64) -> F64:
    wide = f64(arguments[name])
    mean = np.mean(wide**2, axis=-1, keepdims=True) + np.float64(np.float32(arguments["eps"]))
    scale = np.float64(arguments["weight_offset"]) + f64(arguments[f"{name}_weight"])
    return _turned(wide / np.sqrt(mean) * scale, angles)


def _placed(places: F64, rows: F64, cache: Array) -> F64:
    """Put rows ``[M, Hk, D]`` where ``places [P * B, M]`` has a one."""
    flat = f64(cache).reshape(len(places), -1)
    kept = flat * (places.sum(axis=1, keepdims=True) == 0)
    placed: F64 = (kept + places @ rows.reshape(places.shape[1], flat.shape[1])).reshape(cache.shape)
    return placed


def _fused_inputs(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Small weights; different slots in any order, every fifth row is not kept."""
    slots = rng.permutation(dims["P"] * dims["B"])[: dims["M"]].astype(np.int32)
    slots[4::5] = -1
    weights = {f"{name}_weight": (rng.random(dims["D"]) - 0.5).astype(numpy_dtype("bf16")) for name in ("q", "k")}
    return {**_positions(dims, rng), "slots": slots, **weights}


def _fused(heads: tuple[int, int, int, int, int], pages: tuple[int, int]) -> dict[str, int]:
    return {**_dims(*heads), "P": pages[0], "B": pages[1]}


_CENTRED = {**_THETA, "eps": 1e-6, "weight_offset": 1.0}
QK_NORM_ROPE_APPEND = Contract(
    "qk_norm_rope_append",
    "q = rope_forward(rms_norm(q)) by heads; rope_forward(rms_norm(k)) and v to their slots of a paged cache",
    Signature(
        (
            _Q,
            TensorParam("k", "bf16", ("M", "Hk", "D")),
            TensorParam("v", "bf16", ("M", "Hk", "D")),
            TensorParam("q_weight", "bf16", ("D",)),
            TensorParam("k_weight", "bf16", ("D",)),
            TensorParam("positions", "i32", ("M",)),
            TensorParam("slots", "i32", ("M",)),
            ScalarParam("eps", "f32", minimum=0.0),
            ScalarParam("weight_offset", "f32"),
            *_ROTARY,
            *_CACHES,
        ),
        _PAIRS,
        (*_INSIDE, ("D", _WIDEST_HEAD)),
    ),
    _exact_fused,
    (
        Case("one_row", _fused((1, 16, 2, 256, 64), (3, 16)), _CENTRED),
        Case("dense_model", _fused((3, 24, 4, 256, 64), (3, 16)), _CENTRED),
        Case("many_rows", _fused((33, 4, 2, 64, 64), (9, 16)), {**_CENTRED, "theta": 1e4}),
        Case("plain_weights", _fused((2, 9, 3, 128, 128), (2, 4)), {**_THETA, "eps": 0.5, "weight_offset": 0.0}),
        Case("one_pair", _fused((5, 3, 1, 7, 2), (9, 1)), {**_CENTRED, "theta": 1e4}),
        Case("odd_heads", _fused((17, 5, 3, 33, 12), (5, 7)), _CENTRED),
        Case("odd_half", _fused((4, 5, 3, 48, 22), (5, 7)), _CENTRED),
        Case("widest", _fused((2, 2, 1, _WIDEST_HEAD, 1000), (2, 4)), _CENTRED),
        Case("widest_odd", _fused((2, 1, 1, _WIDEST_HEAD - 1, 90), (2, 4)), _CENTRED),
        Case("no_keys", _fused((2, 3, 0, 16, 8), (1, 4)), _CENTRED),
        Case("no_rows", _fused((0, 4, 2, 64, 16), (2, 4)), _CENTRED),
    ),
    Tolerance(
        relative=BF16_ROUNDING,
        absolute=2 * _LARGEST_NORMALISED * (BF16_ROUNDING + (_WIDEST_HEAD / 2 + 22) * F32_ROUNDING),
        derivation=f"two roundings to BF16 (2^-8), the first of both values of a pair, which are below "
        f"{_LARGEST_NORMALISED}; before it {_WIDEST_HEAD} squares, halved by the root, and 16 FP32 operations, "
        "after it two products with a cosine or sine that errs by 2^-22, and their sum",
    ),
    inputs=_fused_inputs,
    output_tolerances={"v_cache": EXACT},
)
