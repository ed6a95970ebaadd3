import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.contract.specs import KernelSpec, Provider, PythonKernel, Registered
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Target
from kernel_muster.registry.levers import CORE_LEVERS, read_levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.select import Selector


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


@pytest.fixture
def install() -> Callable[..., str]:
    """Put the metadata of a distribution into a folder; its plugin is the module ``acme_on_disk``."""

    def install(
        site: Path, name: str = "acme-kernels", version: str = "1.0", text: str | bytes | None = None,
        metadata: str | None = None,
    ) -> str:  # fmt: skip
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        raw = "[kernel_muster.v1]\nacme = acme_on_disk\n" if text is None else text
        (info / "entry_points.txt").write_bytes(raw if isinstance(raw, bytes) else raw.encode())
        return str(site)

    return install


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a sound plugin as ``acme_on_disk``."""
    signature = km.Signature((km.TensorParam("out", "f32", ("M",), role="out"),))
    contract = km.Contract(
        name="acme_c", summary="zeros", signature=signature, cases=(km.Case("one", {"M": 1}),),
        tolerance=km.Tolerance(0, 0, "zeros are exact"),
        reference=lambda arguments, dims: {"out": np.zeros(dims["M"])},
    )  # fmt: skip
    kernel = km.KernelSpec(key="acme::mul", contract="acme_c", archs=("cpu",), backend=PythonKernel(print))
    module = ModuleType("acme_on_disk")
    module.muster_contracts = km.hookimpl(lambda: [contract], specname="muster_contracts")  # type: ignore[attr-defined]
    module.muster_kernels = km.hookimpl(lambda: [kernel], specname="muster_kernels")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acme_on_disk", module)
