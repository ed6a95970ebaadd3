"""The nudge as a local plugin: on a device it is built, loaded, launched and captured like any kernel."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kernel_muster.ab.nudge.nudging import nudged
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import Bound, ScalarParam, Signature, TensorParam
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

NAME = "muster_ab"
DTYPES = ("bf16", "f32")
_THREADS, _MOST_BLOCKS = 256, 1024
_ENTRIES = tuple(EntryPoint(f"nudge_{dtype}", ("ptr", "i64", "i64", "i64", "i32")) for dtype in DTYPES)
_CASES = (
    Case("one", {"R": 1, "C": 1}, {"seed": 1}),
    Case("rows", {"R": 3, "C": 515}, {"seed": 1}),
    Case("empty", {"R": 0, "C": 16}, {"seed": 1}),
)


def _plan(entry: str, bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    values = bound.views["values"]
    rows, columns = values.shape
    stride = values.strides[0] // values.dtype.itemsize if rows > 1 else columns
    blocks = min(-(-rows * columns // _THREADS), _MOST_BLOCKS)
    arguments = (values, rows, columns, stride, bound.arguments["seed"])
    return LaunchPlan(entry, (blocks, 1, 1), arguments, may_overlap=False)


def _expected(arguments: Arguments, dims: Mapping[str, int]) -> Mapping[str, Any]:
    return {"values": nudged(arguments["values"], arguments["seed"]).astype("f8")}


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contract of each nudge: the bits of the host kernel."""
    for dtype in DTYPES:
        params = (TensorParam("values", dtype, ("R", "C"), "inout"), ScalarParam("seed", "i32"))
        yield Contract(
            f"nudge_{dtype}", "moves half of the elements by one step", Signature(params), _expected, _CASES,
            Tolerance(0.0, 0.0, "every operation rounded as the contract says: no freedom is left"),
        )  # fmt: skip


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return both nudges."""
    for dtype in DTYPES:
        entry = f"nudge_{dtype}"
        backend = CudaKernel(
            Path(__file__).parent / "nudge.cu", _ENTRIES, partial(_plan, entry), strided=frozenset({"values"})
        )
        yield KernelSpec(key=f"{NAME}::{entry}", contract=entry, archs=("sm_80+",), backend=backend)
