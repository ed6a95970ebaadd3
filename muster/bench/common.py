"""Measuring decode-time kernels against the floor of their bytes, an empty kernel, and what torch offers.

python -m kernel_muster.bench.common --help
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_muster.bench import floor
from kernel_muster.bench.common_peers import peer_of
from kernel_muster.bench.small import COUNTS, MOST_COPIES, begin_builds, step_launches
from kernel_muster.bench.timing import Timer, copies_of, repeats_of
from kernel_muster.bench.workloads import MODELS, Data, Workload
from kernel_muster.registry.errors import BootRefused
from kernel_muster.registry.lookups import Lookups

ROUNDS = 11


@dataclass(frozen=True)
class Figure:
    """One workload: microseconds a launch of ours, of the floor, of an empty kernel, and of a peer."""

    model: str
    key: str
    label: str
    reads: int
    writes: int
    us: float
    spread: float
    floor_us: float
    empty_us: float
    peer: str = ""
    peer_us: float | None = None

    @property
    def ratio(self) -> float:
        """Ours over the floor."""
        return self.us / self.floor_us

    def __str__(self) -> str:
        peer = f"  {self.peer} {self.peer_us:.2f}" if self.peer_us is not None else ""
        return (
            f"{self.model} {self.key:46} {self.label:26} {self.us:8.2f} us  floor {self.floor_us:7.2f}  "
            f"x{self.ratio:.2f}  empty {self.empty_us:.2f}  spread {self.spread:.1%}{peer}"
        )


def workloads(data: Data, counts: Sequence[int] = COUNTS) -> Iterator[Callable[[], Iterator[Workload]]]:
    """Return groups of workloads, each made when its turn comes."""
    for m in MODELS:
        for _, group in step_launches(data, m, counts):
            yield group


def measure(kernels: Lookups, work: Workload, timer: Timer, rounds: int, *, peers: bool = True) -> Figure:
    """Measure one workload."""
    import cupy

    handle = kernels.kernel(*work.key.split("::"))
    mover = kernels.kernel(floor.NAME, "move_bytes")
    copies = min(MOST_COPIES, copies_of(work.copy_bytes))
    sets = [work.make() for _ in range(copies)]
    size = -(-max(work.copy_bytes, floor.VECTOR_BYTES) // floor.VECTOR_BYTES) * floor.VECTOR_BYTES
    out = cupy.zeros(1, cupy.uint32)

    def moving(reads: int, writes: int, count: int) -> list[Any]:
        blocks = [cupy.ones(size, cupy.uint8) for _ in range(count)]
        return [mover.prepare(data=block, out=out, reads=reads, writes=writes) for block in blocks]

    contestants = {
        "ours": ([handle.prepare(**arguments) for arguments in sets], timer.capture),
        "floor": (moving(work.reads, work.writes, copies), timer.capture),
        "empty": (moving(0, 0, 2), timer.capture),
    }
    peer = peer_of(work, sets, timer.stream) if peers else None
    if peer is not None:
        contestants["peer"] = (peer.launches, timer.capture_torch)
    graphs = {}
    for name, (launches, capture) in contestants.items():
        times = repeats_of(work.reads + work.writes if name != "empty" else 0, len(launches))
        graphs[name] = (capture(launches, times), times * len(launches))
    timed = timer.race(graphs, rounds)
    ours = timed["ours"]
    figure = Figure(
        work.model, work.key, work.label, work.reads, work.writes, ours.us, ours.spread, timed["floor"].us,
        timed["empty"].us, peer.name if peer else "", timed["peer"].us if peer else None,
    )  # fmt: skip
    del graphs, contestants, sets
    return figure


@dataclass(frozen=True)
class Options:
    """What to measure, whether beside peers, and where the record goes."""

    wanted: tuple[str, ...]
    counts: tuple[int, ...]
    has_peers: bool
    record: Path | None

    @property
    def command(self) -> str:
        """The command that measures this."""
        more = [repr(text) for text in self.wanted] + ["--counts", ",".join(map(str, self.counts))]
        more += [] if self.has_peers else ["--no-peers"]
        return " ".join(("python -m kernel_muster.bench.common", *more))

    def selects(self, text: str) -> bool:
        """Whether something of this description is measured."""
        return not self.wanted or any(part in text for part in self.wanted)


def read_options(arguments: Sequence[str]) -> Options:
    """Read the command line; what is wrong ends the process with code 2, like any usage error."""
    parser = argparse.ArgumentParser(
        "python -m kernel_muster.bench.common",
        description="Measure the small kernels of a decode step on a GPU against the floor of their bytes.",
    )
    parser.add_argument("part", nargs="*", help="part of a model, key or size; what holds one of them is measured")
    parser.add_argument("--counts", type=_counts, default=COUNTS, metavar="N,...", help="sequences of a step")
    parser.add_argument("--no-peers", action="store_true", help="run torch's kernels not at all")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a record as Markdown")
    read = parser.parse_args(arguments)
    return Options(tuple(read.part), tuple(read.counts), not read.no_peers, read.record)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(count) for count in text.split(","))
    if not all(1 <= count <= 128 for count in counts):
        raise ValueError(f"{text!r}: expected numbers from 1 to 128 with commas")
    return counts


def main(arguments: Sequence[str]) -> int:
    """Measure what the arguments select, print a line each, and write the record as far as it has come."""
    from kernel_muster.api import open_registry

    options = read_options(arguments)
    try:
        kernels = open_registry("cuda", levers={}, local_plugins={floor.NAME: floor})
    except BootRefused as refused:
        print(f"{refused}\na measurement needs a GPU", file=sys.stderr)
        return 1
    import cupy

    begin_builds(kernels)
    data, timer = Data(), Timer()
    figures: list[Figure] = []
    for group in workloads(data, options.counts):
        for work in group():
            if options.selects(f"{work.model} {work.key} {work.label}"):
                figures.extend(_tried(kernels, work, timer, peers=options.has_peers))
        cupy.get_default_memory_pool().free_all_blocks()
        if options.record is not None:
            from kernel_muster.bench.common_record import to_markdown

            options.record.write_text(to_markdown(figures, kernels.target, options.command), encoding="utf-8")
    return 0


def _tried(kernels: Lookups, work: Workload, timer: Timer, *, peers: bool) -> Iterator[Figure]:
    """Measure one workload and print what came of it; where it fails, the next one may run all the same."""
    try:
        figure = measure(kernels, work, timer, ROUNDS, peers=peers)
    except Exception as error:  # noqa: BLE001  (drivers, CuPy and peers raise whatever they like)
        print(f"{work.model} {work.key} {work.label}: {type(error).__name__}: {error}", flush=True)
        return
    print(figure, flush=True)
    yield figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
