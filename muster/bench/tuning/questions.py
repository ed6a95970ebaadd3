"""The edges to find, and the two competing arms of each at a measured point."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kernel_muster.bench.tuning.source import (
    BF16_GEMM,
    BF16_GEMV,
    BF16_TILES_OF_3,
    GEMV,
    HOPPER,
    MOST_CHUNKED,
    TILES_OF_3,
    Timing,
)
from kernel_muster.models.policy.tile import DEEP_K_STEP, GemmShape, TileName, choose_tile, is_deep
from kernel_muster.registry.levers import Levers, Setting

#: ``from``: the second arm serves from the value up; ``most``: the first arm serves up to the value.
Kind = Literal["from", "most"]
Reader = Callable[[Timing, Levers], tuple[str, str] | None]


@dataclass(frozen=True)
class Question:
    """One edge: its lever, its measured quantity, and the two competing arms at a timing (None: absent)."""

    lever: str
    kind: Kind
    below: str
    above: str
    unit: str
    arms: Reader
    place: Callable[[Timing], int]


def with_values(levers: Levers, values: Mapping[str, int]) -> Levers:
    """Return levers with some values set as by a table."""
    settings = {s.lever.name: s for s in levers.settings}
    moved = {name: Setting(settings[name].lever, value, "table") for name, value in values.items()}
    return Levers(settings | moved)


def size_mi(timing: Timing) -> int:
    """Return the elements of a weight in units of 2^20, rounded up."""
    return -(-timing.features * timing.depth >> 20)


def _tiers(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    return (GEMV, TILES_OF_3) if timing.rows <= 16 else None


def _narrow(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    if not is_deep(shape_of(timing), levers):
        return None
    return "k64_n64", "k64" if timing.rows <= int(levers["MUSTER_W4A16_M128_ABOVE"] or 0) else "m128"


def _deep(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    if timing.depth % DEEP_K_STEP or timing.rows > int(levers["MUSTER_W4A16_M128_ABOVE"] or 0):
        return None
    is_narrow = blocks(timing) <= int(levers["MUSTER_W4A16_NARROW_BLOCKS"] or 0) and "k64_n64" in timing.us
    return "t", "k64_n64" if is_narrow else "k64"


def _tall(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    small = tile_of(timing, with_values(levers, {"MUSTER_W4A16_M128_ABOVE": 1 << 20}))
    return None if small in (None, "k64_n64", "m128") else (str(small), "m128")


def _chunked(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    tile = tile_of(timing, levers)
    return None if timing.rows <= 16 or tile is None else (GEMV, tile)


def _hopper(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    return GEMV, HOPPER


def _many(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    return (GEMV, HOPPER) if timing.rows > MOST_CHUNKED else None  # fewer rows have separate edges


def _tiny(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    tile = tile_of(timing, levers)
    return None if tile is None else (tile, HOPPER)


def _bf16_tiers(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    return (BF16_GEMV, BF16_TILES_OF_3) if timing.rows <= 16 else None


def _bf16_gemm(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    return BF16_GEMV, BF16_GEMM


def blocks(timing: Timing) -> int:
    """Return the blocks of the wide grid."""
    return shape_of(timing).wide_blocks


def shape_of(timing: Timing) -> GemmShape:
    """Return the shape of a timing."""
    return GemmShape(timing.rows, timing.features, timing.depth)


def tile_of(timing: Timing, levers: Levers) -> TileName | None:
    """Return the dispatched tile GEMM among the measured ones. None if there are none."""
    return _chosen(timing, ("t", "k64", "k64_n64", "m128"), levers)


def choice_of(timing: Timing, levers: Levers) -> TileName | None:
    """Return the dispatched GEMM among the measured ones. None if there are none."""
    return _chosen(timing, ("hopper", "t", "k64", "k64_n64", "m128"), levers)


def _chosen(timing: Timing, names: Sequence[TileName], levers: Levers) -> TileName | None:
    there = [name for name in names if name in timing.us]
    return choose_tile(shape_of(timing), "decode", there, levers) if there else None


def _rows(timing: Timing) -> int:
    return timing.rows


DEEP_EDGE = Question("MUSTER_W4A16_K64_MIN_K", "from", "t", "k64 or its narrow twin", "K", _deep, lambda t: t.depth)
MANY_EDGE = Question("MUSTER_W4A16_GEMV_MI", "most", "GEMV", "Hopper GEMM", "Mi", _many, size_mi)
QUESTIONS: tuple[Question, ...] = (
    Question("MUSTER_QKV_TIER_ROWS", "most", "one GEMV tier", "tiles of 3 rows", "M", _tiers, _rows),
    DEEP_EDGE,
    Question("MUSTER_W4A16_NARROW_BLOCKS", "most", "k64_n64", "k64 or m128", "blocks", _narrow, blocks),
    DEEP_EDGE,
    Question("MUSTER_W4A16_M128_ABOVE", "most", "t or k64", "m128", "M", _tall, _rows),
    MANY_EDGE,
    Question("MUSTER_W4A16_HOPPER_TINY_MI", "most", "tile GEMM", "Hopper GEMM", "Mi", _tiny, size_mi),
    Question("MUSTER_BF16_TIER_ROWS", "most", "one BF16 GEMV", "tiles of 3 rows", "M", _bf16_tiers, _rows),
    Question("MUSTER_BF16_GEMM_FROM", "from", "BF16 GEMV", "BF16 GEMM", "M", _bf16_gemm, _rows),
)
CHUNKED_EDGE = Question("MUSTER_W4A16_CHUNKED_ROWS", "most", "GEMV", "tile GEMM", "M", _chunked, _rows)
HOPPER_EDGE = Question("MUSTER_W4A16_HOPPER_FROM", "from", "GEMV", "Hopper GEMM", "M", _hopper, _rows)
SMALL_FROM_EDGE = replace(HOPPER_EDGE, lever="MUSTER_W4A16_HOPPER_FROM_SMALL")
SMALL_EDGE = replace(
    HOPPER_EDGE, lever="MUSTER_W4A16_HOPPER_SMALL_MI", kind="most", below="small", above="large", unit="Mi"
)
