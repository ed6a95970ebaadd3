"""The families of ``muster bench``: one line for each, with its module imported on demand."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module

from kernel_muster.bench.problem import Problem, Request, Shape
from kernel_muster.bench.race import Row, free_memory, race
from kernel_muster.bench.timing import ROUNDS, Timer
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.lookups import Lookups

#: Name of a family -> its module with ``FAMILY``, in the order of measurement.
MODULES = {
    "gemv": "kernel_muster.bench.families.gemv",
    "gemm": "kernel_muster.bench.families.gemm",
    "moe": "kernel_muster.bench.families.moe",
    "small": "kernel_muster.bench.families.small",
}


@dataclass(frozen=True)
class BenchFamily:
    """Kernels that share a method of measurement.

    ``problems(kernels, request)`` yields one problem at a time: its memory is free before the next.
    ``parse_shape(text)`` reads ``--shape``, or raises UsageError with the expected form.
    """

    name: str
    problems: Callable[[Lookups, Request], Iterator[Problem]]
    rows: range  # row counts of its kernels
    default_rows: tuple[int, ...]
    parse_shape: Callable[[str], Shape]

    def check_rows(self, counts: Sequence[int]) -> None:
        """Raise UsageError for a row count outside this family."""
        bad = [count for count in counts if count not in self.rows]
        if bad and not self.rows:
            raise UsageError(f"--rows {bad[0]}: {self.name} is measured at the cases of its contract")
        if bad:
            raise UsageError(f"--rows {bad[0]}: {self.name} takes {self.rows[0]} to {self.rows[-1]} rows")


def family(name: str) -> BenchFamily:
    """Return a family by name. UsageError with a suggestion if there is none."""
    if name not in MODULES:
        near = get_close_matches(name, MODULES, 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UsageError(f"bench has no family {name!r}{hint} Families: {', '.join(MODULES)}")
    found: BenchFamily = import_module(MODULES[name]).FAMILY
    return found


def measure(
    family: BenchFamily,
    request: Request,
    kernels: Lookups,
    rounds: int = ROUNDS,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Row]:
    """Measure the problems that a family makes of a request."""
    timer = Timer()
    for problem in family.problems(kernels, request):
        if not request.selects(family.name, problem):
            free_memory()
            continue
        say(f"{family.name}: {problem.shape} {problem.size}, {problem.rows} rows")
        wanted = tuple(one for one in problem.contestants if request.wants(one))
        yield from race(timer, family.name, replace(problem, contestants=wanted), rounds)
        free_memory()
