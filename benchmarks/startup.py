"""A cold `muster audit` beside the bare import of its dependencies.

    python benchmarks/startup.py

Whole processes, interleaved, median of several rounds: wall time, and processor time, which other work on the machine
disturbs less. Run against a normal install: an editable one adds the cost of its import hook.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from record import header
from rich.console import Console
from rich.table import Table

ROUNDS = 21
# Packages that an audit can need: rich for a report on a terminal, structlog for logs. Not in the list: filelock,
# platformdirs and safetensors, which builds and checkpoints need and an audit on cpu never imports.
DEPENDENCIES = "import pluggy, pydantic, structlog, tomli, numpy, ml_dtypes, typer, rich.console"
# Imports of the audits below, with a report to a pipe. Names of pydantic are imported on use.
IMPORTED = "import pluggy, tomli, numpy, ml_dtypes, typer; from pydantic import BaseModel, Field, TypeAdapter"
BASE = "import of the dependencies"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    BASE: ["-c", DEPENDENCIES],
    "of these, what a piped audit imports": ["-c", IMPORTED],
    "muster --version": ["-m", "kernel_muster", "--version"],
    "muster audit qwen3.6-35b-a3b --target cpu": ["-m", "kernel_muster", "audit", "qwen3.6-35b-a3b", "--target", "cpu"],
    "muster audit qwen3.6-27b --target cpu": ["-m", "kernel_muster", "audit", "qwen3.6-27b", "--target", "cpu"],
}
# PYTHONDONTWRITEBYTECODE and the like would measure something else.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


class Times(NamedTuple):
    """The times of one process, in seconds."""

    wall: float
    processor: float


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _once(arguments: list[str]) -> Times:
    start, used = time.perf_counter(), _processor()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd="/", env=ENVIRONMENT)
    return Times(time.perf_counter() - start, _processor() - used)


def main() -> None:
    """Measure and print the table."""
    times: dict[str, list[Times]] = {name: [] for name in COMMANDS}
    for arguments in COMMANDS.values():
        _once(arguments)  # fill the file cache and write bytecode
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            times[name].append(_once(arguments))
    middle = {name: Times(*map(statistics.median, zip(*taken, strict=True))) for name, taken in times.items()}
    title = f"Whole processes, median of {ROUNDS}"
    table = Table("process", "wall ms", "spread", "x imports", "processor ms", "x imports", title=title)
    for name, (wall, processor) in middle.items():
        walls = [taken.wall * 1e3 for taken in times[name]]
        table.add_row(
            name,
            f"{wall * 1e3:.0f}",
            f"{min(walls):.0f}-{max(walls):.0f}",
            f"{wall / middle[BASE].wall:.2f}",
            f"{processor * 1e3:.0f}",
            f"{processor / middle[BASE].processor:.2f}",
        )
    console = Console(width=110)
    console.print(header("python benchmarks/startup.py"))
    console.print(table)


if __name__ == "__main__":
    main()
