"""The header of every record: date, machine, versions and command."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def header(command: str) -> str:
    """Return the lines that make a figure repeatable."""
    packages = ("kernel-muster", "pluggy", "pydantic", "numpy", "ml_dtypes", "structlog", "typer", "rich")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return "\n".join(
        (
            f"date: {datetime.now(UTC):%Y-%m-%d}",
            f"command: {command}",
            f"machine: {_processor()}, {os.cpu_count()} cores, {platform.system()}",
            f"python: {platform.python_version()}; {versions}",
        )
    )
