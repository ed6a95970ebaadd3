"""Timing on a device: cold L2, graph replays, interleaved, median and spread.

One replay runs a kernel over copies of its data that together exceed the L2, for at least 0.4 ms. Replays of all
contestants alternate, so clocks and neighbours affect all equally. CUDA events on one stream. No allocation,
compilation or tuning during the timing.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

_Name = TypeVar("_Name", bound=Hashable)

#: More than twice the L2 of any device so far, so no data of the last round is left.
COLD_BYTES = 320 * 2**20
SHORTEST_REPLAY_US = 400.0
ROUNDS = 25


class Graph(Protocol):
    """A captured sequence of launches."""

    def replay(self) -> None:
        """Enqueue the whole sequence on the timer's stream."""


@dataclass(frozen=True)
class Timed:
    """Microseconds of a launch: median, extremes, and half the interquartile range over the median."""

    us: float
    us_min: float
    us_max: float
    spread: float
    launches: int


class Timer:
    """Captures and times on one stream of one device."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def capture(self, launches: Sequence[Callable[[], None]], times: int) -> Graph:
        """Capture launches of our kernels, in order, ``times`` over."""
        with self.stream:
            self.stream.begin_capture()
            for _ in range(times):
                for launch in launches:
                    launch()
            graph = self.stream.end_capture()
        return _CupyGraph(graph, self.stream)

    def capture_torch(self, launches: Sequence[Callable[[], None]], times: int) -> Graph:
        """Capture launches of torch: its allocator must be prepared for the capture."""
        import torch

        stream = torch.cuda.ExternalStream(self.stream.ptr)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(times):
                for launch in launches:
                    launch()
        return _TorchGraph(graph, stream)

    def once(self, graph: Graph) -> float:
        """Return the microseconds of one replay."""
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record(self.stream)
        graph.replay()
        end.record(self.stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) * 1e3

    def race(self, graphs: Mapping[_Name, tuple[Graph, int]], rounds: int = ROUNDS) -> dict[_Name, Timed]:
        """Time graphs, given with their numbers of launches, in turn."""
        taken: dict[_Name, list[float]] = {name: [] for name in graphs}
        for graph, _ in graphs.values():
            self.once(graph)
        for _ in range(rounds):
            for name, (graph, launches) in graphs.items():
                taken[name].append(self.once(graph) / launches)
        return {name: _summary(times, graphs[name][1]) for name, times in taken.items()}


def copies_of(size_bytes: int, most: int = 160) -> int:
    """Return the number of copies needed for cold data."""
    return max(2, min(most, math.ceil(COLD_BYTES / max(size_bytes, 1))))


def repeats_of(size_bytes: int, copies: int, bytes_per_us: float = 4.5e6) -> int:
    """Return the number of rounds over the copies for a replay of sufficient length, even at the speed of memory."""
    one_round_us = copies * (1.5 + size_bytes / bytes_per_us)
    return max(1, math.ceil(SHORTEST_REPLAY_US / one_round_us))


def _summary(times: list[float], launches: int) -> Timed:
    quartiles = statistics.quantiles(times, n=4)
    median = statistics.median(times)
    return Timed(median, min(times), max(times), (quartiles[2] - quartiles[0]) / 2 / median, launches)


class _CupyGraph:
    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph, self._stream = graph, stream

    def replay(self) -> None:
        self._graph.launch(self._stream)


class _TorchGraph:
    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph, self._stream = graph, stream

    def replay(self) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            self._graph.replay()
