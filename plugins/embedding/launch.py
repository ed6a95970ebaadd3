"""Launching the embedding gather: one block a row."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import cuda_kernel, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound


def _plan(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    arguments = (views["table"], views["ids"], views["out"], dims["V"], dims["H"])
    return LaunchPlan(f"gather_w{width_of(dims['H'])}", (dims["M"], 1, 1), arguments)


GATHER = cuda_kernel(
    Path(__file__).with_name("gather.cu"),
    tuple(EntryPoint(f"gather_w{width}", ("ptr", "ptr", "ptr", "i32", "i32")) for width in (1, 8)),
    _plan,
)
