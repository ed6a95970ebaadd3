"""Launching the norms: a warp, a block or a cluster for a row. The bits depend on H only."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.launching import VECTOR, ceil_div, cuda_kernel, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import Bound

Entries = Mapping[str, EntryResources]

_WARP = 32
# The longest row in the registers of a warp, and of a block or cluster. The gated norm has no such kernel.
_MAX_WARP_ROW, _MAX_WARPS = constants(INCLUDE_DIR / "rms_norm.cuh", "MAX_WARP_ROW", "MAX_WARPS")
_MAX_REGISTER_ROW = _MAX_WARPS * _WARP * VECTOR
(_ROWS_PER_BLOCK,) = constants(Path(__file__).with_name("norm.cu"), "ROWS_PER_BLOCK")
# Up to so many rows, each has a cluster. H200, dependent launches, us, block of 256 / one block / cluster:
# 1 x 2048 0.98 / 0.97 / 0.93, 16 x 2048 1.12 / 1.14 / 1.03, 512 x 2048 4.16 / 3.65 / 4.88, 1 x 5120 1.22 / 1.39 / 1.04,
# 8 x 5120 1.37 / 1.45 / 1.12, 16 x 5120 1.56 / 1.65 / 1.56, 512 x 5120 6.60 / 7.24 / 7.04.
_CLUSTER_ROWS = 16
# Up to so many rows a thread has one vector, above two. H200, us, one / two (four): 64 x 5120 2.64 / 2.76 (3.06), 256 x
# 5120 3.68 / 3.71, 1024 x 5120 10.25 / 7.89 (7.66), 2048 x 5120 18.8 / 13.8 (12.5), with residual 24.3 / 22.8 (23.0);
# 64 x 2048 1.60 / 1.65 (1.77), 512 x 2048 3.19 / 3.15 (3.26), 2048 x 2048 7.51 / 6.40, with residual 10.3 / 10.4.
_ONE_VECTOR_ROWS = 256
_VECTORS = {"cluster": 1, "vec1": 1, "vec2": 2}  # of a thread, norm.cu
_VARIANTS = ("warp_w1", "warp_w8", "block_w1")
_NORM = ("ptr", "ptr", "ptr", "f32", "f32", "i32", "i32")
_RESIDUAL = ("ptr", "ptr", "ptr", "ptr", "f32", "f32", "i32", "i32")
_GATED = ("ptr", "ptr", "ptr", "ptr", "f32", "i32", "i32")
_ENTRIES = tuple(
    EntryPoint(f"{name}_{variant}", parameters)
    for name, parameters in (
        ("rms_norm", _NORM),
        ("rms_norm_residual", _RESIDUAL),
        ("rms_norm_gated_f32", _GATED),
        ("rms_norm_gated_bf16", _GATED),
    )
    for variant in (*_VARIANTS, *(() if "gated" in name else ("block_w8", "cluster_w8", "vec1_w8", "vec2_w8")))
)


def _plan(name: str, tensors: tuple[str, ...], scalars: tuple[str, ...], bound: Bound, entries: Entries) -> LaunchPlan:
    rows, columns = bound.dims["M"], bound.dims["H"]
    arguments = (*(bound.views[name] for name in tensors), *(bound.arguments[name] for name in scalars), rows, columns)
    width = width_of(columns)
    if columns <= _MAX_WARP_ROW:
        return LaunchPlan(f"{name}_warp_w{width}", (ceil_div(rows, _ROWS_PER_BLOCK), 1, 1), arguments)
    if columns > _MAX_REGISTER_ROW or width == 1 or "gated" in name:
        return LaunchPlan(f"{name}_block_w{1 if 'gated' in name else width}", (rows, 1, 1), arguments)
    variant = "cluster" if rows <= _CLUSTER_ROWS else "vec1" if rows <= _ONE_VECTOR_ROWS else "vec2"
    cluster = entries[f"{name}_{variant}_w8"].cluster
    ranks = cluster[0] if cluster else 1
    threads = _WARP * ceil_div(columns, width * _WARP * ranks * _VECTORS[variant])
    return LaunchPlan(f"{name}_{variant}_w8", (rows * ranks, 1, 1), arguments, block=(threads, 1, 1))


def _plan_gated(bound: Bound, entries: Entries) -> LaunchPlan:
    kind = "f32" if bound.views["weight"].dtype == numpy_dtype("f32") else "bf16"
    return _plan(f"rms_norm_gated_{kind}", ("x", "gate", "weight", "out"), ("eps",), bound, entries)


_kernel = partial(cuda_kernel, Path(__file__).with_name("norm.cu"), _ENTRIES)
_SCALARS = ("eps", "weight_offset")
RMS_NORM = _kernel(partial(_plan, "rms_norm", ("x", "weight", "out"), _SCALARS))
RMS_NORM_RESIDUAL = _kernel(partial(_plan, "rms_norm_residual", ("x", "residual", "weight", "out"), _SCALARS))
RMS_NORM_GATED = _kernel(_plan_gated)
