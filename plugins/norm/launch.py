"""Launching the norms: a warp, a block or several for a row, vectors or single values; the bits follow from H alone."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import Bound

Entries = Mapping[str, EntryResources]

# Up to here a warp keeps its row in registers (rms_norm.cuh: KEPT vectors of 8 for each of 32 lanes).
_WARP_WIDEST, _ROWS_PER_BLOCK = 1024, 4
# Up to here a row may have a thread for each vector (rms_norm.cuh: MAX_WARPS); the gated form has none for it.
_WIDE_WIDEST, _WARP = 8192, 32
# Up to so many rows a cluster has a row. H200, one behind the other, us, block of 256 / one block / cluster:
# 1 x 2048 0.98 / 0.97 / 0.93, 16 x 2048 1.12 / 1.14 / 1.03, 512 x 2048 4.16 / 3.65 / 4.88, 1 x 5120 1.22 / 1.39 / 1.04,
# 8 x 5120 1.37 / 1.45 / 1.12, 16 x 5120 1.56 / 1.65 / 1.56, 512 x 5120 6.60 / 7.24 / 7.04.
_TEAM_ROWS = 16
# Up to so many rows a thread has one vector, above two. H200, us, one / two (four): 64 x 5120 2.64 / 2.76 (3.06), 256 x
# 5120 3.68 / 3.71, 1024 x 5120 10.25 / 7.89 (7.66), 2048 x 5120 18.8 / 13.8 (12.5), with residual 24.3 / 22.8 (23.0);
# 64 x 2048 1.60 / 1.65 (1.77), 512 x 2048 3.19 / 3.15 (3.26), 2048 x 2048 7.51 / 6.40, with residual 10.3 / 10.4.
_WIDE_ROWS = 256
_VECTORS = {"team": 1, "wide": 1, "many": 2}  # a thread's, norm.cu
_FORMS = ("warp_w1", "warp_w8", "block_w1")
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
    for form in (*_FORMS, *(() if "gated" in name else ("block_w8", "team_w8", "wide_w8", "many_w8")))
)


def _plan(name: str, tensors: tuple[str, ...], scalars: tuple[str, ...], bound: Bound, entries: Entries) -> LaunchPlan:
    rows, columns = bound.dims["M"], bound.dims["H"]
    arguments = (*(bound.views[name] for name in tensors), *(bound.arguments[name] for name in scalars), rows, columns)
    width = width_of(columns)
    if columns <= _WARP_WIDEST:
        return LaunchPlan(f"{name}_warp_w{width}", (ceil_div(rows, _ROWS_PER_BLOCK), 1, 1), arguments)
    if columns > _WIDE_WIDEST or width == 1 or "gated" in name:
        return LaunchPlan(f"{name}_block_w{1 if 'gated' in name else width}", (rows, 1, 1), arguments)
    form = "team" if rows <= _TEAM_ROWS else "wide" if rows <= _WIDE_ROWS else "many"
    cluster = entries[f"{name}_{form}_w8"].cluster
    ranks = cluster[0] if cluster else 1
    threads = _WARP * ceil_div(columns, width * _WARP * ranks * _VECTORS[form])
    return LaunchPlan(f"{name}_{form}_w8", (rows * ranks, 1, 1), arguments, block=(threads, 1, 1))


def _plan_gated(bound: Bound, entries: Entries) -> LaunchPlan:
    kind = "f32" if bound.views["weight"].dtype == numpy_dtype("f32") else "bf16"
    return _plan(f"rms_norm_gated_{kind}", ("x", "gate", "weight", "out"), ("eps",), bound, entries)


_kernel = partial(cuda_kernel, Path(__file__).with_name("norm.cu"), _ENTRIES)
_SCALARS = ("eps", "weight_offset")
RMS_NORM = _kernel(partial(_plan, "rms_norm", ("x", "weight", "out"), _SCALARS))
RMS_NORM_RESIDUAL = _kernel(partial(_plan, "rms_norm_residual", ("x", "residual", "weight", "out"), _SCALARS))
RMS_NORM_GATED = _kernel(_plan_gated)
