"""Launching the norms: a warp, a block or several for a row, vectors or single values; the bits follow from H alone."""

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
# Up to here a row may have a thread for each vector (rms_norm.cuh: MOST_WARPS); the gated form has none for it.
_WIDE_WIDEST, _WARP = 8192, 32
# Up to so many rows a cluster has a row. H200, one behind the other, us, block of 256 / one block / cluster:
# 1 x 2048 0.98 / 0.97 / 0.93, 16 x 2048 1.12 / 1.14 / 1.03, 512 x 2048 4.16 / 3.65 / 4.88, 1 x 5120 1.22 / 1.39 / 1.04,
# 8 x 5120 1.37 / 1.45 / 1.12, 16 x 5120 1.56 / 1.65 / 1.56, 512 x 5120 6.60 / 7.24 / 7.04.
_TEAM_ROWS = 16
# Up to so many rows a thread has one vector of a row that is a block's, and above two (norm.cu: WIDE_VECTORS).
_ONE_VECTOR_ROWS, _WIDE_VECTORS = 256, 2
_FORMS = tuple(f"{lanes}_w{width}" for lanes in ("warp", "block") for width in (1, 8))
_NORM = ("ptr", "ptr", "ptr", "f32", "f32", "i32", "i32")
_RESIDUAL = ("ptr", "ptr", "ptr", "ptr", "f32", "f32", "i32", "i32")
_GATED = ("ptr", "ptr", "ptr", "ptr", "f32", "i32", "i32", "i32")
_ENTRIES = tuple(
    EntryPoint(f"{name}_{form}", parameters)
    for name, parameters in (
        ("rms_norm", _NORM),
        ("rms_norm_residual", _RESIDUAL),
        ("rms_norm_gated", _GATED),
    )
    for form in (*_FORMS, *(() if "gated" in name else ("wide_w8", "team_w8")))
)


def _plan(
    name: str, tensors: tuple[str, ...], scalars: tuple[str, ...], bound: Bound, entries: Entries, *flags: int
) -> LaunchPlan:  # fmt: skip
    rows, columns = bound.dims["M"], bound.dims["H"]
    given = (*(bound.views[name] for name in tensors), *(bound.arguments[name] for name in scalars))
    arguments = (*given, *flags, rows, columns)
    width = width_of(columns)
    if columns <= _WARP_WIDEST:
        return LaunchPlan(f"{name}_warp_w{width}", (ceil_div(rows, _ROWS_A_BLOCK), 1, 1), arguments)
    if columns > _WIDE_WIDEST or width == 1 or "gated" in name:
        return LaunchPlan(f"{name}_block_w{width}", (rows, 1, 1), arguments)
    entry = f"{name}_{'team' if rows <= _TEAM_ROWS else 'wide'}_w{width}"
    cluster = entries[entry].cluster
    ranks = cluster[0] if cluster else 1
    threads = _WARP * ceil_div(columns, width * _WARP * ranks * (_WIDE_VECTORS if rows > _ONE_VECTOR_ROWS else 1))
    return LaunchPlan(entry, (rows * ranks, 1, 1), arguments, block=(threads, 1, 1))


def _plan_gated(bound: Bound, entries: Entries) -> LaunchPlan:
    is_bf16 = int(bound.views["weight"].dtype == numpy_dtype("bf16"))
    return _plan("rms_norm_gated", ("x", "gate", "weight", "out"), ("eps",), bound, entries, is_bf16)


_kernel = partial(cuda_kernel, Path(__file__).with_name("norm.cu"), _ENTRIES)
_SCALARS = ("eps", "weight_offset")
RMS_NORM = _kernel(partial(_plan, "rms_norm", ("x", "weight", "out"), _SCALARS))
RMS_NORM_RESIDUAL = _kernel(partial(_plan, "rms_norm_residual", ("x", "residual", "weight", "out"), _SCALARS))
RMS_NORM_GATED = _kernel(_plan_gated)
