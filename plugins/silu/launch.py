"""Launching silu_mul."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import cuda_kernel, row_grid
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound

_PARAMETERS = ("ptr", "ptr", "ptr", "i64", "i64", "i64", "i32")


def _plan(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    gate, up, out = (bound.views[name] for name in ("gate", "up", "out"))
    walk = row_grid((gate, up, out))
    arguments = (gate, up, out, *walk.strides[:2], walk.columns, walk.blocks_per_row)
    return LaunchPlan(f"silu_mul_w{walk.width}", walk.grid, arguments)


SILU_MUL = cuda_kernel(
    Path(__file__).with_name("silu_mul.cu"),
    tuple(EntryPoint(f"silu_mul_w{width}", _PARAMETERS) for width in (1, 8)),
    _plan,
    strided=frozenset({"gate", "up"}),
)
