"""Hide other plugins installed beside kernel-muster: a test sees the project's plugins, and those of its own.

Hidden plugins stay importable. Only their metadata, which discovery reads, is hidden, here and in child processes.
"""

import os
import runpy
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent / "hidden"


def _strangers() -> list[str]:
    return sorted(
        str(found._path)  # type: ignore[attr-defined]
        for found in distributions()
        if "muster" in (found.read_text("entry_points.txt") or "").lower()
        and (found.metadata["Name"] or "").lower().replace("_", "-") != "kernel-muster"
    )


def pytest_configure() -> None:
    # A worker of xdist is a child process, where they are already hidden.
    if strangers := _strangers():
        os.environ["KERNEL_MUSTER_TESTS_HIDE"] = os.pathsep.join(strangers)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_FOLDER), os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, str(_FOLDER))  # tests make their children's PYTHONPATH from it
        runpy.run_path(str(_FOLDER / "sitecustomize.py"))


@pytest.fixture(autouse=True)
def _forget_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no keys of a test's plugins for the next test, unless it names a folder: MUSTER_CACHE_DIR."""
    from kernel_muster.registry.discovery import remembered  # once the other plugins are hidden

    def nowhere() -> Path:
        raise OSError("tests remember no plugin")

    monkeypatch.setattr(remembered, "_default_folder", nowhere)
