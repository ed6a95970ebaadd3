"""Tests that need a GPU: deselected where no CUDA driver answers. All else that is missing there is a failure."""

from pathlib import Path

import pytest
from kernel_muster.registry.target import read_devices


def _has_device() -> bool:
    try:
        return bool(read_devices())
    except OSError:
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Every conftest sees all items of the run.
    here = Path(__file__).parent
    marked = [item for item in items if here in item.path.parents and item.get_closest_marker("gpu") is not None]
    if marked and not _has_device():
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
