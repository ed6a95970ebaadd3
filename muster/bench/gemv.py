"""The GEMV measurement: shapes x rows, correctness first, then everybody in turn."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kernel_muster.bench.contestants import PEERS, Absent, Contestant, Entry, ours, read_kernel
from kernel_muster.bench.data import Problem, make_problem
from kernel_muster.bench.timing import ROUNDS, Timer, repeats_of
from kernel_muster.registry.lookups import Lookups

#: Relative L2 error up to which a result counts as right: twice that of the best NVFP4 peer (1.7e-3), BF16 output.
LARGEST_ERROR = 3.4e-3


@dataclass(frozen=True)
class Row:
    """One contestant at one shape and row count."""

    shape: str
    features: int
    depth: int
    rows: int
    contestant: str
    us: float
    us_min: float
    us_max: float
    spread: float
    ratio_to_read: float
    gb_per_s: float
    relative_l2: float | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return asdict(self)


def tier_of(rows: int) -> str:
    """Return the key that serves so many rows."""
    return "w4a16_gemv" if rows == 1 else f"w4a16_gemv_batch{rows if rows <= 8 else 16}"


def measure(
    kernels: Lookups,
    shapes: Sequence[tuple[str, int, int]],
    rows: Sequence[int],
    *,
    peers: Sequence[Contestant] = PEERS,
    rounds: int = ROUNDS,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Row]:
    """Measure every shape at every row count; a contestant that fails is a row with a note, and no time."""
    timer = Timer()
    for name, features, depth in shapes:
        problem = make_problem(features, depth)
        for count in rows:
            say(f"{name} {features} x {depth}, {count} rows")
            contestants = (read_kernel(kernels), ours(kernels, "w4a16_gemv", tier_of(count)), *peers)
            yield from _race(timer, name, problem, count, contestants, rounds)
            _free()


def _race(
    timer: Timer, name: str, problem: Problem, rows: int, contestants: Sequence[Contestant], rounds: int
) -> Iterator[Row]:
    entries: list[Entry] = []
    absent: list[Absent] = []
    errors: dict[str, float | None] = {}
    for contestant in contestants:
        entry = _ready(contestant, problem, rows, timer)
        if isinstance(entry, Absent):
            absent.append(entry)
            continue
        error = None if entry.out is None else problem.error(_on_cupy(entry.out), rows)
        errors[entry.name] = error
        if error is not None and error > LARGEST_ERROR:
            absent.append(Absent(entry.name, f"left out: its relative L2 error {error:.3g} exceeds {LARGEST_ERROR}"))
        else:
            entries.append(entry)
    graphs = {}
    for entry in entries:
        times = repeats_of(entry.size_bytes, len(entry.launches))
        capture = timer.capture_torch if entry.is_torch else timer.capture
        graphs[entry.name] = (capture(entry.launches, times), times * len(entry.launches))
    timed = timer.race(graphs, rounds)
    floor = timed["read"].us
    for entry in entries:
        t = timed[entry.name]
        yield Row(
            name, problem.features, problem.depth, rows, entry.name, t.us, t.us_min, t.us_max, t.spread,
            t.us / floor, entry.size_bytes / t.us / 1e3, errors[entry.name],
        )  # fmt: skip
    nan = float("nan")
    for missing in absent:
        yield Row(
            name, problem.features, problem.depth, rows, missing.name, nan, nan, nan, nan, nan, nan, None, missing.why
        )  # fmt: skip


def _ready(contestant: Contestant, problem: Problem, rows: int, timer: Timer) -> Entry | Absent:
    """Set a contestant up and run it once over all its copies, so that everything is compiled and checked."""
    try:
        entry = contestant(problem, rows, timer.stream)
        if isinstance(entry, Entry):
            _synchronize()  # the data was made on other streams
            for launch in entry.launches:
                launch()
            _synchronize()
    except Exception as error:  # noqa: BLE001  (peers raise whatever they like)
        return Absent(getattr(contestant, "__name__", "contestant"), f"{type(error).__name__}: {error}"[:300])
    return entry


def _synchronize() -> None:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()


def _on_cupy(out: Any) -> Any:
    import cupy

    return out if isinstance(out, cupy.ndarray) else cupy.from_dlpack(out)


def _free() -> None:
    """Give memory back between shapes, to CuPy's pool and torch's alike."""
    import sys

    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
