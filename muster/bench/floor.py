"""The floor of kernels that read and write, as a local plugin of a measurement."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import Bound, ScalarParam, Signature, TensorParam
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

NAME = "muster_floor"
VECTOR_BYTES = 16
_ENTRIES = tuple(EntryPoint(f"move_bytes_{pieces}", ("ptr", "ptr", "i64", "i64")) for pieces in (1, 8))
_THREADS = 256  # move.cu
# From this size on, 8 pieces in each thread leave no multiprocessor of any device idle.
_MANY_VECTORS = 256 * 8 * 160


def _plan(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    reads, writes = (int(bound.arguments[name]) // VECTOR_BYTES for name in ("reads", "writes"))
    vectors = max(reads, writes)
    pieces = 8 if vectors >= _MANY_VECTORS else 1
    blocks = max(1, -(-vectors // (_THREADS * pieces)))
    arguments = (bound.views["data"], bound.views["out"], reads, writes)
    return LaunchPlan(f"move_bytes_{pieces}", (blocks, 1, 1), arguments)


def _expected(arguments: Arguments, dims: Mapping[str, int]) -> Mapping[str, Any]:
    return {name: arguments[name] for name in ("data", "out")}


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the kernel's contract: it changes nothing."""
    params = (
        TensorParam("data", "u8", ("B",), "inout"),
        TensorParam("out", "u32", (1,), "inout"),
        ScalarParam("reads", "i64", minimum=0),
        ScalarParam("writes", "i64", minimum=0),
    )
    signature = Signature(params, multiples=(("B", VECTOR_BYTES),), limits=(("reads", "B"), ("writes", "B")))
    case = Case("one", {"B": 4096, "reads": 4096, "writes": 2048})
    return [Contract("move_bytes", "moves memory", signature, _expected, (case,), Tolerance(0.0, 0.0, "bytes stay"))]


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernel."""
    backend = CudaKernel(Path(__file__).parent / "move.cu", _ENTRIES, _plan)
    return [KernelSpec(key=f"{NAME}::move_bytes", contract="move_bytes", archs=("sm_80+",), backend=backend)]
