from collections.abc import Callable
from typing import Any

import pytest
from kernel_muster.registry.arch import parse_arch
from kernel_muster.registry.catalog import Catalog
from kernel_muster.registry.levers import CORE_LEVERS, read_levers
from kernel_muster.registry.selection import Selector
from kernel_muster.registry.specs import KernelSpec, Provider, PythonKernel, Registered
from kernel_muster.registry.target import CPU_TARGET, Target


def nothing() -> None:
    """Stand for a kernel that is never launched."""


def registered(key: str, distribution: str = "acme", **options: Any) -> Registered:
    options = {"contract": "c", "archs": ("sm_80+",), "backend": PythonKernel(nothing)} | options
    return Registered(KernelSpec(key=key, **options), Provider(distribution, distribution, "1.0"))


@pytest.fixture
def offer() -> Callable[..., Registered]:
    """Make one registration: a key, a distribution, and options of its spec."""
    return registered


@pytest.fixture
def select() -> Callable[..., Selector]:
    """Make a selector over registrations, for a target and levers."""

    def select(*kernels: Registered, target: str = "sm_90a", **levers: str) -> Selector:
        snapshot, findings = read_levers(CORE_LEVERS, [("given", levers)])
        assert not findings
        where = CPU_TARGET if target == "cpu" else Target(target, parse_arch(target))
        return Selector(Catalog(kernels=kernels), where, snapshot)

    return select
