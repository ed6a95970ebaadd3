"""Edges from times: each threshold where the sum of all losses against the faster arm is least.

An edge leaves its built-in value only for a gain above the spread of the times that decide it. Between two measured
points it stands at the last one that its arm won: what was not measured is not claimed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kernel_muster.bench.tuning.source import GEMV, HOPPER, TILES_OF_3, Timing
from kernel_muster.models.policy.tile import DEEP_K_STEP, GemmShape, TileName, choose_tile, is_deep, is_tiny
from kernel_muster.registry.levers import Lever, Levers, Setting

#: ``from``: the second arm serves from the value up; ``most``: the first arm serves up to the value.
Kind = Literal["from", "most"]
Reader = Callable[[Timing, Levers], tuple[str, str] | None]


@dataclass(frozen=True)
class Question:
    """One edge: its lever, what it is measured over, and which two arms compete at a timing (None: not there)."""

    lever: str
    kind: Kind
    below: str
    above: str
    unit: str
    arms: Reader
    place: Callable[[Timing], int]


@dataclass(frozen=True)
class Point:
    """One comparison: where it stands, the times of the arm below and above, and their spread."""

    x: int
    below: float
    above: float
    spread: float

    def loss(self, takes_above: bool) -> float:
        """Return the logarithm of the taken arm's time over the faster one's."""
        return math.log((self.above if takes_above else self.below) / min(self.above, self.below))


@dataclass(frozen=True)
class FoundEdge:
    """An edge with what is left to lose, the spread behind it, and a line of figures for each place."""

    question: Question
    value: int
    built_in: int
    loss: float
    spread: float
    figures: tuple[str, ...]


def find_edges(timings: Sequence[Timing], levers: Levers) -> Iterator[FoundEdge]:
    """Yield the edges; one without times is left out, or all of whose arms something faster replaces.

    ``levers`` give the built-in values; what is found replaces them for the questions after it. The deep-K edge is
    asked twice: it and the narrow twin's depend on each other.
    """
    found: dict[str, FoundEdge] = {}
    for question in QUESTIONS:
        known = with_values(levers, {name: edge.value for name, edge in found.items()})
        edge = _find(question, timings, known, int(levers[question.lever] or 0))
        if edge is not None:
            found[question.lever] = edge
    known = with_values(levers, {name: edge.value for name, edge in found.items()})
    # Chunks of 16 are weighed against the GEMM that serves there: the Hopper one has an edge of its own.
    tiled = [timing for timing in timings if not _takes_hopper(timing, known)]
    edge = _find(_CHUNKED, tiled, known, int(levers[_CHUNKED.lever] or 0))
    yield from (*found.values(), *([] if edge is None else [edge]))
    yield from hopper_edges([timing for timing in timings if _takes_hopper(timing, known)], levers)


def _takes_hopper(timing: Timing, levers: Levers) -> bool:
    return HOPPER in timing.us and not is_tiny(timing.features, timing.depth, levers)


def hopper_edges(timings: Sequence[Timing], levers: Levers) -> Iterator[FoundEdge]:
    """Yield the Hopper GEMM's edge; where small weights have another one, that too, and which weights are small."""
    by_size: dict[int, list[Point]] = {}
    for timing in timings:
        by_size.setdefault(size_mi(timing), []).extend(_points(_HOPPER, [timing], levers))
    points = {size: found for size, found in sorted(by_size.items()) if found}
    if not points:
        return
    never = _never("from", levers.setting(_HOPPER.lever).lever)
    built_in = int(levers[_HOPPER.lever] or 0)

    def split(most: int) -> tuple[list[Point], list[Point]]:
        parts = [
            [p for size, found in points.items() if (size <= most) is small for p in found] for small in (True, False)
        ]
        return parts[0], parts[1]

    def cost(most: int) -> float:
        return sum(_cost("from", part, _best("from", part, built_in, never)) for part in split(most) if part)

    most = min((0, *list(points)[:-1]), key=lambda one: (cost(one), one))
    noise = sum(point.spread for found in points.values() for point in found)
    if cost(0) - cost(most) <= noise:
        most = 0
    small, large = split(most)
    yield _edge(_HOPPER, large, _best("from", large, built_in, never), built_in)
    if small:
        question = replace(_HOPPER, lever="MUSTER_W4A16_HOPPER_FROM_SMALL")
        yield _edge(question, small, _best("from", small, built_in, never), built_in)
        each = [f"{size} Mi from M={_best('from', found, built_in, never)}" for size, found in points.items()]
        spread = max(point.spread for found in points.values() for point in found)
        yield FoundEdge(_SMALL, most, int(levers[_SMALL.lever] or 0), 0.0, spread, tuple(each))


def size_mi(timing: Timing) -> int:
    """Return the elements of a weight in units of 2^20, rounded up."""
    return -(-timing.features * timing.depth >> 20)


def with_values(levers: Levers, values: Mapping[str, int]) -> Levers:
    """Return levers with some set as a table would set them."""
    settings = {s.lever.name: s for s in levers.settings}
    moved = {name: Setting(settings[name].lever, value, "table") for name, value in values.items()}
    return Levers(settings | moved)


def _find(question: Question, timings: Sequence[Timing], levers: Levers, built_in: int) -> FoundEdge | None:
    points = sorted(_points(question, timings, levers), key=lambda point: point.x)
    if not points:
        return None
    return _edge(
        question,
        points,
        _best(question.kind, points, built_in, _never(question.kind, levers.setting(question.lever).lever)),
        built_in,
    )


def _edge(question: Question, points: Sequence[Point], value: int, built_in: int) -> FoundEdge:
    losses = [math.exp(point.loss(_takes_above(question.kind, point.x, value))) - 1 for point in points]
    spread = max(point.spread for point in points)
    return FoundEdge(question, value, built_in, max(losses), spread, tuple(_figures(question, points)))


def _points(question: Question, timings: Sequence[Timing], levers: Levers) -> Iterator[Point]:
    for timing in timings:
        arms = question.arms(timing, levers)
        if arms is not None and all(arm in timing.us for arm in arms):
            below, above = arms
            spread = max(timing.spread[below], timing.spread[above])
            yield Point(question.place(timing), timing.us[below], timing.us[above], spread)


def _never(kind: Kind, lever: Lever) -> int:
    """Return the value at which the arm that the edge admits never serves."""
    return lever.maximum or 1 << 20 if kind == "from" else lever.minimum or 0


def _takes_above(kind: Kind, x: int, value: int) -> bool:
    return x >= value if kind == "from" else x > value


def _best(kind: Kind, points: Sequence[Point], built_in: int, never: int) -> int:
    def cost(value: int) -> float:
        return _cost(kind, points, value)

    def noise(value: int) -> float:
        moved = (p for p in points if _takes_above(kind, p.x, value) != _takes_above(kind, p.x, built_in))
        return sum(point.spread for point in moved)

    best = min({never, *(point.x for point in points)}, key=lambda value: (cost(value), value))
    return best if cost(built_in) - cost(best) > noise(best) else built_in


def _cost(kind: Kind, points: Sequence[Point], value: int) -> float:
    return sum(point.loss(_takes_above(kind, point.x, value)) for point in points)


def _figures(question: Question, points: Sequence[Point]) -> Iterator[str]:
    """Yield, place by place, the time of the arm above over that of the arm below: geometric mean and extremes."""
    for x in sorted({point.x for point in points}):
        ratios = [point.above / point.below for point in points if point.x == x]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        extremes = f" ({min(ratios):.2f}..{max(ratios):.2f} of {len(ratios)})" if len(ratios) > 1 else ""
        yield f"{question.unit}={x} {mean:.2f}x{extremes}"


# Which arms compete


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


def _tiny(timing: Timing, levers: Levers) -> tuple[str, str] | None:
    tile = tile_of(timing, levers)
    return None if tile is None else (tile, HOPPER)


def blocks(timing: Timing) -> int:
    """Return the blocks of the wide grid."""
    return shape_of(timing).wide_blocks


def shape_of(timing: Timing) -> GemmShape:
    """Return the shape of a timing."""
    return GemmShape(timing.rows, timing.features, timing.depth)


def tile_of(timing: Timing, levers: Levers) -> TileName | None:
    """Return the tile GEMM that dispatch takes among those that were measured; None if there are none."""
    return _chosen(timing, ("t", "k64", "k64_n64", "m128"), levers)


def choice_of(timing: Timing, levers: Levers) -> TileName | None:
    """Return the GEMM that dispatch takes among those that were measured; None if there are none."""
    return _chosen(timing, ("hopper", "t", "k64", "k64_n64", "m128"), levers)


def _chosen(timing: Timing, names: Sequence[TileName], levers: Levers) -> TileName | None:
    there = [name for name in names if name in timing.us]
    return choose_tile(shape_of(timing), "decode", there, levers) if there else None


def _rows(timing: Timing) -> int:
    return timing.rows


_DEEP = Question("MUSTER_W4A16_K64_MIN_K", "from", "t", "k64 or its narrow twin", "K", _deep, lambda t: t.depth)
QUESTIONS: tuple[Question, ...] = (
    Question("MUSTER_QKV_TIER_ROWS", "most", "one GEMV tier", "tiles of 3 rows", "M", _tiers, _rows),
    _DEEP,
    Question("MUSTER_W4A16_NARROW_BLOCKS", "most", "k64_n64", "k64 or m128", "blocks", _narrow, blocks),
    _DEEP,
    Question("MUSTER_W4A16_M128_ABOVE", "most", "t or k64", "m128", "M", _tall, _rows),
    Question("MUSTER_W4A16_HOPPER_TINY_MI", "most", "tile GEMM", "Hopper GEMM", "Mi", _tiny, size_mi),
)
_CHUNKED = Question("MUSTER_W4A16_CHUNKED_ROWS", "most", "GEMV in chunks of 16", "tile GEMM", "M", _chunked, _rows)
_HOPPER = Question("MUSTER_W4A16_HOPPER_FROM", "from", "GEMV", "Hopper GEMM", "M", _hopper, _rows)
_SMALL = replace(_HOPPER, lever="MUSTER_W4A16_HOPPER_SMALL_MI", kind="most", below="small", above="large", unit="Mi")
