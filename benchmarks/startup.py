"""A cold `muster audit` beside the bare import of its dependencies.

    python benchmarks/startup.py

Whole processes, interleaved, median of several rounds. Run against a normal install: an editable one adds the cost
of its import hook.
"""

import statistics
import subprocess
import sys
import time

from record import header
from rich.console import Console
from rich.table import Table

ROUNDS = 11
DEPENDENCIES = "import pluggy, pydantic, structlog, tomli, numpy, ml_dtypes, typer, rich.console"
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import of the dependencies": [sys.executable, "-c", DEPENDENCIES],
    "muster --version": [sys.executable, "-m", "kernel_muster", "--version"],
    "muster audit qwen3.6-35b-a3b --target cpu": [
        sys.executable, "-m", "kernel_muster", "audit", "qwen3.6-35b-a3b", "--target", "cpu",
    ],
    "muster audit qwen3.6-27b --target cpu": [
        sys.executable, "-m", "kernel_muster", "audit", "qwen3.6-27b", "--target", "cpu",
    ],
}  # fmt: skip


def _once(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd="/")
    return time.perf_counter() - start


def main() -> None:
    """Measure and print the table."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for command in COMMANDS.values():
        _once(command)  # fill the file cache and write bytecode
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            times[name].append(_once(command))
    base = statistics.median(times["import of the dependencies"])
    table = Table("process", "ms", "spread", "x imports", title=f"Whole processes, median of {ROUNDS}")
    for name, taken in times.items():
        middle = statistics.median(taken)
        spread = f"{min(taken) * 1e3:.0f}-{max(taken) * 1e3:.0f}"
        table.add_row(name, f"{middle * 1e3:.0f}", spread, f"{middle / base:.2f}")
    console = Console(width=110)
    console.print(header("python benchmarks/startup.py"))
    console.print(table)


if __name__ == "__main__":
    main()
