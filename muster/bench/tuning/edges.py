"""Edges from times: each threshold has the least sum of losses against the faster arm.

An edge leaves its built-in value only for a gain above the spread of its times. Between two measured points it stands
at the last one won by its arm. If that arm never won, it stands one above the largest: nothing is claimed about
unmeasured points.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernel_muster.bench.tuning.questions import (
    CHUNKED_EDGE,
    HOPPER_EDGE,
    MANY_EDGE,
    QUESTIONS,
    SMALL_EDGE,
    SMALL_FROM_EDGE,
    Kind,
    Question,
    size_mi,
    with_values,
)
from kernel_muster.bench.tuning.source import HOPPER, Timing
from kernel_muster.models.policy.tile import is_tiny
from kernel_muster.registry.levers import Lever, Levers


@dataclass(frozen=True)
class Point:
    """One comparison: its place, the times of the arms below and above, and their spread."""

    x: int
    below: float
    above: float
    spread: float

    def loss(self, takes_above: bool) -> float:
        """Return the logarithm of the taken arm's time over the faster one's."""
        return math.log((self.above if takes_above else self.below) / min(self.above, self.below))


@dataclass(frozen=True)
class FoundEdge:
    """An edge with its remaining loss, the spread behind it, and a line of figures for each place."""

    question: Question
    value: int
    built_in: int
    loss: float
    spread: float
    figures: tuple[str, ...]


def find_edges(timings: Sequence[Timing], levers: Levers) -> Iterator[FoundEdge]:
    """Yield the edges, without those that have no times or whose arms are all replaced by a faster one.

    ``levers`` give the built-in values. Found values replace them for the later questions. The deep-K edge comes twice,
    because it and the narrow twin's depend on each other.
    """
    found: dict[str, FoundEdge] = {}
    for question in QUESTIONS:
        known = with_values(levers, {name: edge.value for name, edge in found.items()})
        edge = _find(question, timings, known, int(levers[question.lever] or 0))
        if edge is not None:
            found[question.lever] = edge
    known = with_values(levers, {name: edge.value for name, edge in found.items()})
    # A GEMV competes with the tile GEMM where that serves: the Hopper GEMM has a separate edge. If the Hopper GEMM
    # serves everything, they compete for the case that it is switched off.
    tiled = [timing for timing in timings if not _takes_hopper(timing, known)]
    edge = _find(CHUNKED_EDGE, tiled or timings, known, int(levers[CHUNKED_EDGE.lever] or 0))
    yield from (*found.values(), *([] if edge is None else [edge]))
    edged = [one for one in timings if _takes_hopper(one, known) and size_mi(one) > int(known[MANY_EDGE.lever] or 0)]
    yield from hopper_edges(edged, levers)


def _takes_hopper(timing: Timing, levers: Levers) -> bool:
    return HOPPER in timing.us and not is_tiny(timing.features, timing.depth, levers)


def hopper_edges(timings: Sequence[Timing], levers: Levers) -> Iterator[FoundEdge]:
    """Yield the Hopper GEMM's edge. With another edge for small weights also that, and the limit of small weights."""
    by_size: dict[int, list[Point]] = {}
    for timing in timings:
        by_size.setdefault(size_mi(timing), []).extend(_points(HOPPER_EDGE, [timing], levers))
    points = {size: found for size, found in sorted(by_size.items()) if found}
    if not points:
        return
    lever = levers.setting(HOPPER_EDGE.lever).lever
    built_in = int(levers[HOPPER_EDGE.lever] or 0)

    def split(most: int) -> tuple[list[Point], list[Point]]:
        parts = [
            [p for size, found in points.items() if (size <= most) is small for p in found] for small in (True, False)
        ]
        return parts[0], parts[1]

    def cost(most: int) -> float:
        return sum(_cost("from", part, _best("from", part, built_in, lever)) for part in split(most) if part)

    most = min((0, *list(points)[:-1]), key=lambda one: (cost(one), one))
    noise = sum(point.spread for found in points.values() for point in found)
    if cost(0) - cost(most) <= noise:
        most = 0
    small, large = split(most)
    yield _edge(HOPPER_EDGE, large, _best("from", large, built_in, lever), built_in)
    if small:
        own = int(levers[SMALL_FROM_EDGE.lever] or 0)
        yield _edge(SMALL_FROM_EDGE, small, _best("from", small, own, lever), own)
    each = [f"{size} Mi from M={_best('from', found, built_in, lever)}" for size, found in points.items()]
    spread = max(point.spread for found in points.values() for point in found)
    yield FoundEdge(SMALL_EDGE, most, int(levers[SMALL_EDGE.lever] or 0), 0.0, spread, tuple(each))


def _find(question: Question, timings: Sequence[Timing], levers: Levers, built_in: int) -> FoundEdge | None:
    points = sorted(_points(question, timings, levers), key=lambda point: point.x)
    if not points:
        return None
    return _edge(
        question,
        points,
        _best(question.kind, points, built_in, levers.setting(question.lever).lever),
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


def _never(kind: Kind, points: Sequence[Point], lever: Lever) -> int:
    """Return the edge value at which the admitted arm serves no point."""
    return max(point.x for point in points) + 1 if kind == "from" else lever.minimum or 0


def _takes_above(kind: Kind, x: int, value: int) -> bool:
    return x >= value if kind == "from" else x > value


def _best(kind: Kind, points: Sequence[Point], built_in: int, lever: Lever) -> int:
    def cost(value: int) -> float:
        return _cost(kind, points, value)

    def noise(value: int) -> float:
        moved = (p for p in points if _takes_above(kind, p.x, value) != _takes_above(kind, p.x, built_in))
        return sum(point.spread for point in moved)

    best = min({_never(kind, points, lever), *(point.x for point in points)}, key=lambda value: (cost(value), value))
    return best if cost(built_in) - cost(best) > noise(best) else built_in


def _cost(kind: Kind, points: Sequence[Point], value: int) -> float:
    return sum(point.loss(_takes_above(kind, point.x, value)) for point in points)


def _figures(question: Question, points: Sequence[Point]) -> Iterator[str]:
    """Yield for each place the time of the arm above over that of the arm below: geometric mean and extremes."""
    for x in sorted({point.x for point in points}):
        ratios = [point.above / point.below for point in points if point.x == x]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        extremes = f" ({min(ratios):.2f}..{max(ratios):.2f} of {len(ratios)})" if len(ratios) > 1 else ""
        yield f"{question.unit}={x} {mean:.2f}x{extremes}"
