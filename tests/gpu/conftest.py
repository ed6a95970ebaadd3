"""Tests for a GPU: deselected without a CUDA driver, skipped without the CUDA extras."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.audit.proof.proofs import Memory, device_memory
from kernel_muster.registry.hardware.target import read_devices


def _has_device() -> bool:
    try:
        return bool(read_devices())
    except OSError:
        return False


#: Packages with the assembler of Numba kernels, and name parts of the tests that compile one.
TOOLCHAINS = ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12")
NUMBA_TESTS = ("numba", "quantize", "requantise", "ornith")


def missing_packages() -> list[str]:
    """Return the packages of the CUDA extras that are not installed and that every boot needs."""
    return [name for name in ("cupy", "numba", "numba_cuda") if importlib.util.find_spec(name) is None]


def needs_numba(item: pytest.Item) -> bool:
    """Whether a test compiles a Numba kernel, by its name and parameters."""
    return any(word in item.nodeid.lower() for word in NUMBA_TESTS)


def _is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Every conftest sees all items of the run.
    here = Path(__file__).parent
    marked = [item for item in items if here in item.path.parents and item.get_closest_marker("gpu") is not None]
    if marked and not _has_device():
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
    elif missing := missing_packages():
        reason = f"the extras cuda13 and cuda12 bring {', '.join(missing)}, which every boot on a device needs"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
    elif not any(map(_is_installed, TOOLCHAINS)):
        reason = f"{' or '.join(TOOLCHAINS)} is not installed, which Numba kernels are compiled with"
        for item in filter(needs_numba, marked):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of compiled kernels of this run: each is compiled once for all modules."""
    return str(tmp_path_factory.mktemp("cache") / "cubins")


@pytest.fixture(scope="module")
def kernels(cache: str) -> Any:
    """Return the registry of the device."""
    return km.open_registry("cuda", levers={"MUSTER_CACHE_DIR": cache})


@pytest.fixture(scope="session")
def cupy() -> ModuleType:
    """Return CuPy, which machines without a GPU need not have."""
    return importlib.import_module("cupy")


@pytest.fixture(scope="session")
def memory() -> Memory:
    """Return the memory of the device."""
    return device_memory(0)


@pytest.fixture(scope="module")
def launched(kernels: Any, memory: Memory) -> Callable[..., dict[str, np.ndarray]]:
    """Return what launches a key on copies of host arrays and gives them back.

    Of an argument ``(array, used)`` the kernel gets the first ``used`` rows only, and all of it comes back.
    """

    def launched(key: str, **arguments: Any) -> dict[str, np.ndarray]:
        handle = kernels.kernel(*key.split("::"))
        used = {name: value[1] for name, value in arguments.items() if isinstance(value, tuple)}
        given = {name: value[0] if name in used else value for name, value in arguments.items()}
        arrays = {name: memory.to(value) for name, value in given.items() if isinstance(value, np.ndarray)}
        handle(**{**given, **arrays, **{name: arrays[name][:rows] for name, rows in used.items()}})
        memory.wait()
        return {name: memory.back(array) for name, array in arrays.items()}

    return launched
