"""Hide plugins that are installed beside kernel-muster: a test sees those of the project, and what it installs itself.

What is hidden stays importable; only its metadata, by which plugins are found, is gone, here and in child processes.
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
    # In a worker of xdist, which is a child process, they are hidden already.
    if strangers := _strangers():
        os.environ["KERNEL_MUSTER_TESTS_HIDE"] = os.pathsep.join(strangers)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_FOLDER), os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, str(_FOLDER))  # of which tests make their children's PYTHONPATH
        runpy.run_path(str(_FOLDER / "sitecustomize.py"))


@pytest.fixture(autouse=True)
def _forget_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no keys of a test's plugins for the next test, unless it names a folder: MUSTER_CACHE_DIR."""
    from kernel_muster.registry.discovery import remembered  # once the other plugins are hidden

    def nowhere() -> Path:
        raise OSError("tests remember no plugin")

    monkeypatch.setattr(remembered, "_default_folder", nowhere)
