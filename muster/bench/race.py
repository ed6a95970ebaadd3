"""One measurement: all contestants are set up, launched once and judged; the right ones are timed in turn."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kernel_muster.bench.contestants import Absent, Contestant, Entry, Role
from kernel_muster.bench.problem import Problem
from kernel_muster.bench.timing import ROUNDS, Graph, Timed, Timer, repeats_of
from kernel_muster.registry.errors import DeviceStuck
from kernel_muster.registry.hardware.stuck import mark_stuck, why_stuck
from kernel_muster.registry.plugin_code.watch import watched

#: For one contestant's launches over all its copies, which take milliseconds; tuning is finished by then.
LONGEST_WAIT_S = 120.0


@dataclass(frozen=True)
class Row:
    """One contestant at one shape and row count. Without ``us`` it did not run, and ``note`` gives the reason."""

    family: str
    shape: str
    size: str
    rows: int
    contestant: str
    role: Role
    us: float | None = None
    us_min: float | None = None
    us_max: float | None = None
    spread: float | None = None
    ratio_to_floor: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    relative_l2: float | None = None
    source_sha256: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return asdict(self)


def race(timer: Timer, family: str, problem: Problem, rounds: int = ROUNDS) -> Iterator[Row]:
    """Yield a row for each contestant, in their order. One that fails or is wrong has a note and no time."""
    entries: dict[Contestant, Entry] = {}
    errors: dict[Contestant, float | None] = {}
    notes: dict[Contestant, str] = {}
    for contestant in problem.contestants:
        entry, errors[contestant], notes[contestant] = _admitted(contestant, problem, timer)
        if entry is not None:
            entries[contestant] = entry
    timed = _timed(timer, entries, notes, rounds)
    floor = next((timed[one].us for one in timed if one.name == problem.floor), None)
    for contestant in problem.contestants:
        row = Row(
            family, problem.shape, problem.size, problem.rows, contestant.name, contestant.role,
            relative_l2=errors[contestant], source_sha256=contestant.source_sha256, note=notes[contestant],
        )  # fmt: skip
        if contestant in timed:
            row = _with_time(row, timed[contestant], entries[contestant], floor)
        yield row


def _admitted(contestant: Contestant, problem: Problem, timer: Timer) -> tuple[Entry | None, float | None, str]:
    """Set a contestant up, launch it over all its copies to compile everything, and judge it."""
    try:
        entry = contestant.make(timer.stream)
        if isinstance(entry, Absent):
            return None, None, entry.why
        _synchronize(contestant.name)  # the data was made on other streams
        for launch in entry.launches:
            launch()
        _synchronize(contestant.name)
        error = _error(entry, problem)
    except DeviceStuck:
        raise
    except Exception as error:  # noqa: BLE001  (peers raise whatever they like)
        return None, None, f"{type(error).__name__}: {error}"[:300]
    largest = problem.largest_error if contestant.largest_error is None else contestant.largest_error
    if error is not None and not error <= largest:
        return None, error, f"left out: its relative L2 error {error:.3g} exceeds {largest:g}"
    return entry, error, ""


def _error(entry: Entry, problem: Problem) -> float | None:
    if entry.check is not None:
        return entry.check()
    return None if entry.out is None or problem.error is None else problem.error(entry.out)


def _timed(
    timer: Timer, entries: dict[Contestant, Entry], notes: dict[Contestant, str], rounds: int
) -> dict[Contestant, Timed]:
    graphs: dict[Contestant, tuple[Graph, int]] = {}
    for contestant, entry in entries.items():
        times = repeats_of(entry.size_bytes, len(entry.launches))
        capture = timer.capture_torch if entry.is_torch else timer.capture
        try:
            graphs[contestant] = (capture(entry.launches, times), times * len(entry.launches))
        except Exception as error:  # noqa: BLE001  (a peer may synchronise, which no graph can hold)
            notes[contestant] = f"not captured: {type(error).__name__}: {error}"[:300]
    return timer.race(graphs, rounds)


def _with_time(row: Row, timed: Timed, entry: Entry, floor: float | None) -> Row:
    fields = row.as_dict() | {
        "us": timed.us,
        "us_min": timed.us_min,
        "us_max": timed.us_max,
        "spread": timed.spread,
        "ratio_to_floor": None if floor is None else timed.us / floor,
        "gb_per_s": entry.size_bytes / timed.us / 1e3,
        "tflop_per_s": entry.flops / timed.us / 1e6 if entry.flops else None,
    }
    return Row(**fields)


def _synchronize(who: str) -> None:
    """Wait for the device. DeviceStuck if a launch does not end."""
    import cupy

    ordinal = int(cupy.cuda.runtime.getDevice())
    wait_in_time(ordinal, cupy.cuda.Device(ordinal).synchronize, f"the launches of {who}", LONGEST_WAIT_S)


def wait_in_time(ordinal: int, wait: Callable[[], None], by: str, seconds: float) -> None:
    """Wait for a device. After ``seconds``, raise DeviceStuck with the launch's name and give the device up."""
    outcome = watched(wait, seconds, by)
    if outcome.error is not None:
        raise outcome.error
    if outcome.is_hanging:
        mark_stuck(ordinal, by)
        raise DeviceStuck(why_stuck(ordinal))


def free_memory() -> None:
    """Free memory between problems, of CuPy's pool and of torch."""
    import sys

    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
