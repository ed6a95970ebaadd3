"""Tests on Numba's simulator: deselected unless it is on. ``tests/plugins/test_simulator.py`` runs them that way.

Numba reads NUMBA_ENABLE_CUDASIM when it is imported: one process has either the simulator or the compiler.
"""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    marked = [item for item in items if here in item.path.parents]
    if marked and os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
