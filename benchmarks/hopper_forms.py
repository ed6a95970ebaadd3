"""Every tile configuration and schedule of the Hopper GEMM: the figures for the estimates of w4a16_hopper/work.py.

    python benchmarks/hopper_forms.py [--shapes 14336x5120,...] [--rows 32,64,...] [--json FILE]

Each is measured unless more than half of its tile would be empty: correctness first, cold L2, all in turn. Costs are
fitted by least squares of the relative error, none negative. The last lines give the loss of the fit's choice against
the best measured one.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import kernel_muster as km
import numpy as np
from kernel_muster.bench.contestants import copied, found, launch_of, poisoned
from kernel_muster.bench.data.nvfp4 import DenseData, make_dense_data
from kernel_muster.bench.data.shapes import parse_shape
from kernel_muster.bench.families.gemv import LARGEST_ERROR
from kernel_muster.bench.race import free_memory
from kernel_muster.bench.timing import Timer, copies_of, repeats_of
from kernel_muster.plugins.w4a16_hopper import launch
from kernel_muster.plugins.w4a16_hopper.work import CONFIGS, Work, counts_of, schedules_of
from kernel_muster.registry.selection.handles import Handle
from numpy.typing import NDArray
from record import header

SHAPES = "14336x5120,17408x5120,5120x17408,5120x6144,9216x2048,2048x4096"
ROWS = "32,64,96,128,192,256,512,1024"
ROUNDS = 7


@dataclass(frozen=True)
class Row:
    """One way at one shape."""

    rows: int
    features: int
    depth: int
    entry: str
    workers: int
    whole: int
    cluster: int
    us: float

    @property
    def counts(self) -> tuple[float, ...]:
        """How often each cost occurs."""
        work = Work(self.entry, self.workers, self.whole, self.cluster)
        return counts_of(work, self.rows, self.features, self.depth)


def main() -> None:
    """Measure, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    handle = found(km.open_registry("cuda"), "w4a16_hopper", "w4a16_hopper_gemm")
    counts = [int(text) for text in options.rows.split(",")]
    measured = []
    for text in options.shapes.split(","):
        _, features, depth = parse_shape(text)
        data = make_dense_data(features, depth, max(counts))
        for rows in counts:
            measured += list(measure(handle, data, rows))
            free_memory()
    print(header(f"python {' '.join(sys.argv)}"))
    report(measured)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in measured]))


def measure(handle: Handle, data: DenseData, rows: int) -> Iterator[Row]:
    """Yield the time of every way at one shape."""
    import cupy

    timer = Timer()
    prepared = handle.prepare_weight(data.weight)
    weights = [prepared] + [copied(prepared) for _ in range(copies_of(prepared.data.nbytes) - 1)]
    multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    graphs = {}
    for work in candidates(rows, data.features, data.depth, multiprocessors):
        launch.work_of = lambda *sizes, work=work: work  # type: ignore[assignment,misc]
        out = poisoned((rows, data.features))
        launches = [launch_of(handle, timer.stream, x=data.x[:rows], w=weight, out=out) for weight in weights]
        cupy.cuda.runtime.deviceSynchronize()
        launches[0]()
        cupy.cuda.runtime.deviceSynchronize()
        if not data.error(out, rows) <= LARGEST_ERROR:
            raise SystemExit(f"{work}: wrong at M={rows}, N={data.features}, K={data.depth}")
        times = repeats_of(prepared.data.nbytes, len(launches))
        graphs[work] = (timer.capture(launches, times), times * len(launches))
    named = {str(number): graph for number, graph in enumerate(graphs.values())}
    timed = timer.race(named, ROUNDS)
    for number, work in enumerate(graphs):
        us = timed[str(number)].us
        yield Row(rows, data.features, data.depth, work.entry, work.workers, work.whole, work.cluster, us)


def candidates(rows: int, features: int, depth: int, multiprocessors: int) -> Iterator[Work]:
    """Yield the schedules of all configurations whose tile is not mostly empty."""
    for entry, config in CONFIGS.items():
        if config.tokens < 2 * rows or config.tokens == min(one.tokens for one in CONFIGS.values()):
            yield from schedules_of(entry, rows, features, depth, multiprocessors)


def fitted(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Return the costs of one configuration: least squares of the relative error, with none negative."""
    us = np.array([row.us for row in rows])
    counts = np.array([row.counts for row in rows]) / us[:, None]
    kept = list(range(counts.shape[1]))
    while True:
        costs = np.linalg.lstsq(counts[:, kept], np.ones(len(us)), rcond=None)[0]
        if (costs >= 0).all():
            result = np.zeros(counts.shape[1])
            result[kept] = costs
            return result
        kept.pop(int(np.argmin(costs)))


def report(measured: Sequence[Row]) -> None:
    """Print the fit of each configuration, and the loss of its choices."""
    costs = {}
    for entry in CONFIGS:
        mine = [row for row in measured if row.entry == entry]
        if not mine:
            continue
        costs[entry] = fitted(mine)
        errors = [costs[entry] @ np.array(row.counts) / row.us - 1 for row in mine]
        figures = ", ".join(f"{cost:.3f}" for cost in costs[entry])
        print(
            f"{entry:14s} Cost({figures})  {len(mine)} schedules, error rms {np.sqrt(np.mean(np.square(errors))):.1%}"
        )
    estimate = partial(_estimate, costs)
    for place in sorted({(row.rows, row.features, row.depth) for row in measured}):
        here = [row for row in measured if (row.rows, row.features, row.depth) == place]
        best, chosen = min(here, key=lambda row: row.us), min(here, key=estimate)
        way = f"{chosen.entry} x {chosen.workers}, {chosen.whole} whole, clusters of {chosen.cluster}"
        over = chosen.us / best.us - 1
        print(f"M={place[0]:5d} {place[1]} x {place[2]}: {way}: {chosen.us:.2f} us, {over:.1%} over the best")


def _estimate(costs: dict[str, NDArray[np.float64]], row: Row) -> float:
    return float(costs[row.entry] @ np.array(row.counts))


if __name__ == "__main__":
    main()
