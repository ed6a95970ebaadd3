"""The read kernel as a local plugin of a measurement: built, loaded and launched like any kernel."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import Bound, Signature, TensorParam
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

NAME = "muster_bench"
_ENTRY = EntryPoint("read_bytes", ("ptr", "ptr", "i64"))


def _plan(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    count = bound.dims["B"] // 16
    return LaunchPlan("read_bytes", (-(-count // 4096), 1, 1), (bound.views["data"], bound.views["out"], count))


def _expected(arguments: Arguments, dims: Mapping[str, int]) -> Mapping[str, Any]:
    return {"out": arguments["out"]}


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contract of the read kernel: it does not change its output."""
    params = (TensorParam("data", "u8", ("B",)), TensorParam("out", "u32", (1,), "inout"))
    signature = Signature(params, multiples=(("B", 16),))
    tolerance = Tolerance(0.0, 0.0, "nothing is computed")
    return [Contract("read_bytes", "reads memory", signature, _expected, (Case("one", {"B": 4096}),), tolerance)]


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the read kernel."""
    backend = CudaKernel(Path(__file__).parent / "read.cu", (_ENTRY,), _plan)
    return [KernelSpec(key=f"{NAME}::read_bytes", contract="read_bytes", archs=("sm_80+",), backend=backend)]
