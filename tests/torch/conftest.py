"""Tests that need the extra torch: skipped with the reason where it is not installed; on a GPU marked gpu too."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.hardware.target import read_devices


def _has_device() -> bool:
    try:
        return bool(read_devices())
    except OSError:
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Every conftest sees all items of the run.
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    marked = [item for item in own if item.get_closest_marker("gpu") is not None]
    if marked and not _has_device():
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
    elif marked and importlib.util.find_spec("cupy") is None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="the extras cuda13 and cuda12 bring cupy, which a device needs"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "contract_name" in metafunc.fixturenames:
        metafunc.parametrize("contract_name", sorted(km.open_registry("cpu", levers={}).catalog.contracts))


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    from kernel_muster.torch import Kernels

    with Kernels(km.open_registry("cpu", levers={})) as opened:
        yield opened


@pytest.fixture(scope="module")
def device_kernels() -> Iterator[Any]:
    from kernel_muster.torch import Kernels

    with Kernels(km.open_registry("cuda", levers={})) as opened:
        yield opened


@pytest.fixture(scope="session")
def key_of() -> Callable[[Any, str], tuple[str, str] | None]:
    """Return what finds the first key whose kernel of a target keeps a contract."""

    def find(opened: Any, contract: str) -> tuple[str, str] | None:
        for key, rows in opened.lookups.catalog.by_key.items():
            if any(row.spec.contract == contract for row in rows):
                return key.module, key.func
        return None

    return find


@pytest.fixture(scope="session")
def arguments_of() -> Callable[..., tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Return what makes the arguments of a contract's first case that is not empty: arrays, tensors, and the case."""

    def make(kernel: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        from kernel_muster.torch.arrays import tensor_of

        contract = kernel.handle.contract
        case = next(case for case in contract.cases if not contract._is_empty(case))
        arrays = contract.arguments(case, np.random.default_rng(7))
        device = "cuda" if kernel.on_device else "cpu"
        given: dict[str, Any] = {}
        for name, value in arrays.items():
            if isinstance(value, np.ndarray):
                given[name] = tensor_of(value.copy()).to(device)
            elif hasattr(value, "layout"):
                given[name] = kernel.weight(_moved(value, device))
            else:
                given[name] = value
        return case, arrays, given

    return make


def _moved(weight: Any, device: str) -> Any:
    """Return a logical weight whose arrays are tensors of a device."""
    from kernel_muster.torch.arrays import tensor_of

    moved = object.__new__(type(weight))
    for name, value in vars(weight).items():
        moved.__dict__[name] = tensor_of(value).to(device) if isinstance(value, np.ndarray) and value.ndim else value
    return moved


@pytest.fixture(scope="session")
def flat() -> Callable[[Any, dict[str, Any]], list[Any]]:
    """Return what puts the arguments of a contract in the order of its operator."""

    def make(kernel: Any, given: dict[str, Any]) -> list[Any]:
        arguments: list[Any] = []
        for name in kernel.handle.contract.signature.names:
            value = given.get(name)
            arguments += (list(value.tensors), value.form) if hasattr(value, "form") else (value,)
        return arguments

    return make
