"""Launching the element-wise steps between layers."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda.launching import cuda_kernel, row_grid
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound

Entries = Mapping[str, EntryResources]

_ADD, _GATE = "bf16_residual_add_w", "sigmoid_gate_mul_w"
_ENTRIES = (
    *(EntryPoint(f"{_ADD}{width}", ("ptr", "ptr", "i64", "i64", "i32")) for width in (1, 8)),
    *(EntryPoint(f"{_GATE}{width}", ("ptr", "ptr", "ptr", "i64", "i64", "i64", "i32")) for width in (1, 8)),
)


def _plan_add(bound: Bound, entries: Entries) -> LaunchPlan:
    x, residual = bound.views["x"], bound.views["residual"]
    walk = row_grid((x, residual))
    arguments = (x, residual, walk.strides[0], walk.columns, walk.blocks_per_row)
    return LaunchPlan(f"{_ADD}{walk.width}", walk.grid, arguments)


def _plan_gate(bound: Bound, entries: Entries) -> LaunchPlan:
    x, gate, out = (bound.views[name] for name in ("x", "gate", "out"))
    walk = row_grid((x, gate, out))
    arguments = (x, gate, out, *walk.strides[:2], walk.columns, walk.blocks_per_row)
    return LaunchPlan(f"{_GATE}{walk.width}", walk.grid, arguments)


_kernel = partial(cuda_kernel, Path(__file__).with_name("residual_add.cu"), _ENTRIES)
RESIDUAL_ADD = _kernel(_plan_add, strided=frozenset({"x"}))
GATE_MUL = _kernel(_plan_gate, strided=frozenset({"x", "gate"}))
