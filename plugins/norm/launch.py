"""Launching the norms: a warp or a block for a row, vectors or single values, by H alone."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.dtypes import numpy_dtype
from kernel_muster.registry.signature import Bound

Entries = Mapping[str, EntryResources]

# Up to here a warp keeps its row in registers (rms_norm.cuh: KEPT vectors of 8 for each of 32 lanes).
_WARP_WIDEST, _ROWS_A_BLOCK = 1024, 4
_FORMS = tuple(f"{lanes}_w{width}" for lanes in ("warp", "block") for width in (1, 8))
_NORM = ("ptr", "ptr", "ptr", "f32", "f32", "i32", "i32")
_RESIDUAL = ("ptr", "ptr", "ptr", "ptr", "f32", "f32", "i32", "i32")
_GATED = ("ptr", "ptr", "ptr", "ptr", "f32", "i32", "i32")
_ENTRIES = tuple(
    EntryPoint(f"{name}_{form}", parameters)
    for name, parameters in (
        ("rms_norm", _NORM),
        ("rms_norm_residual", _RESIDUAL),
        ("rms_norm_gated_f32", _GATED),
        ("rms_norm_gated_bf16", _GATED),
    )
    for form in _FORMS
)


def _plan(name: str, tensors: tuple[str, ...], scalars: tuple[str, ...], bound: Bound, entries: Entries) -> LaunchPlan:
    rows, columns = bound.dims["M"], bound.dims["H"]
    is_short = columns <= _WARP_WIDEST
    entry = f"{name}_{'warp' if is_short else 'block'}_w{width_of(columns)}"
    grid = (ceil_div(rows, _ROWS_A_BLOCK) if is_short else rows, 1, 1)
    arguments = (*(bound.views[name] for name in tensors), *(bound.arguments[name] for name in scalars))
    return LaunchPlan(entry, grid, (*arguments, rows, columns))


def _plan_gated(bound: Bound, entries: Entries) -> LaunchPlan:
    kind = "f32" if bound.views["weight"].dtype == numpy_dtype("f32") else "bf16"
    return _plan(f"rms_norm_gated_{kind}", ("x", "gate", "weight", "out"), ("eps",), bound, entries)


_kernel = partial(cuda_kernel, Path(__file__).with_name("norm.cu"), _ENTRIES)
_SCALARS = ("eps", "weight_offset")
RMS_NORM = _kernel(partial(_plan, "rms_norm", ("x", "weight", "out"), _SCALARS))
RMS_NORM_RESIDUAL = _kernel(partial(_plan, "rms_norm_residual", ("x", "residual", "weight", "out"), _SCALARS))
RMS_NORM_GATED = _kernel(_plan_gated)
