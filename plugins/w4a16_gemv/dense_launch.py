"""Launching the dense GEMM: a tile by the number of features and rows, a plain kernel for rows that are not aligned.

Wide tiles are wgmma on sm_90a, mma.sync elsewhere; all else is the same everywhere.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import VECTOR, ceil_div, multiprocessors_of
from kernel_muster.plugins.w4a16_gemv.launch import dense_entries, plan_dense
from kernel_muster.registry.arrays import ArrayView, view_of
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan, row_stride
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.backends.workspace import TensorMap
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound

#: What the GEMV's kernels take (dense_gemv.cuh): they are for few rows, and read 16 k at a time.
GEMV_ROWS, GEMV_DEPTH = 16, 16
# dense_gemm.cu: rows and features of a tile, and its shared memory.
_TILES = {"narrow": (32, 64), "spread": (32, 64), "wide": (128, 128), "any": (16, 16)}
_SHARED_BYTES = 96 * 1024
# Up to here a prompt has too few wide tiles for a device's multiprocessors, whatever its length; and so have few rows.
NARROW_FEATURES, NARROW_ROWS = 512, 64
# Fewer narrow tiles leave most of a device idle. H200, us spread / narrow: 64 x 96 x 5120 7.7 / 16.9,
# 512 x 96 x 5120 11.2 / 16.5, 2048 x 64 x 2048 12.7 / 8.9, 64 x 4096 x 2048 20.4 / 9.9 (M x N x K).
_FEW_NARROW_TILES = 33
_MOST_ELEMENTS = 2**32 - 1
# dense_gemm_hopper.cu: a block's rows and features, shared memory, threads, and what a tile takes beside the other's.
_WGMMA_ROWS, _WGMMA_DEPTH, _WGMMA_THREADS = 128, 64, 384
_WGMMA = {
    "n256": (256, 214080, 1.0),
    "n192": (192, 222288, 0.76),
    "n128": (128, 214112, 0.51),
    "n64": (64, 214144, 0.33),
}


def tile_of(rows: int, features: int) -> str:
    """Return the tile's name."""
    if features <= NARROW_FEATURES or rows <= NARROW_ROWS:
        return "spread" if _tiles("narrow", rows, features) < _FEW_NARROW_TILES else "narrow"
    return "wide"


def _tiles(tile: str, rows: int, features: int) -> int:
    tile_rows, tile_features = _TILES[tile]
    return ceil_div(rows, tile_rows) * ceil_div(features, tile_features)


def wgmma_form(rows: int, features: int, multiprocessors: int) -> str:
    """Return the form of the wide tile on Hopper: the one whose tiles take the fewest rounds, by what a tile takes."""

    def cost(form: str) -> float:
        columns, _, tile = _WGMMA[form]
        return tile * ceil_div(ceil_div(rows, _WGMMA_ROWS) * ceil_div(features, columns), multiprocessors)

    return min(_WGMMA, key=cost)


def _plan(bound: Bound, entries: Mapping[str, EntryResources], has_wgmma: bool = False) -> LaunchPlan:
    x, dims, weight = bound.views["x"], bound.dims, view_of(bound.arguments["w"].values)
    if not weight.is_contiguous:
        raise ContractError(f"w has strides {weight.strides}, expected rows without gaps")
    rows, features, depth, stride = dims["M"], dims["N"], dims["K"], row_stride(x)
    _check_size(x, stride, weight)
    if rows <= GEMV_ROWS and depth % GEMV_DEPTH == 0 and stride % VECTOR == 0:
        return plan_dense("dense_gemm", bound, entries)
    # Rows that overlap, and no K at all, are what bulk copies cannot bring.
    is_aligned = depth > 0 and depth % VECTOR == 0 and stride % VECTOR == 0 and stride >= depth
    tile = tile_of(rows, features) if is_aligned else "any"
    if tile == "wide" and has_wgmma:
        return _plan_wgmma(x, weight, bound.views["out"], depth)
    cluster = entries[f"dense_gemm_{tile}"].cluster
    grid = (_tiles(tile, rows, features) * (cluster[0] if cluster else 1), 1, 1)
    arguments = (x, weight, bound.views["out"], stride, rows, features, depth)
    return LaunchPlan(f"dense_gemm_{tile}", grid, arguments, dynamic_shared_bytes=_SHARED_BYTES if is_aligned else 0)


def _plan_wgmma(x: ArrayView, weight: ArrayView, out: ArrayView, depth: int) -> LaunchPlan:
    (rows, features), multiprocessors = out.shape, multiprocessors_of(x.device)
    form = wgmma_form(rows, features, multiprocessors)
    columns, shared_bytes, _ = _WGMMA[form]
    tiles = ceil_div(rows, _WGMMA_ROWS) * ceil_div(features, columns)
    maps = TensorMap(x, (_WGMMA_ROWS, _WGMMA_DEPTH)), TensorMap(weight, (columns, _WGMMA_DEPTH))
    return LaunchPlan(
        f"dense_gemm_{form}", (min(tiles, multiprocessors), 1, 1), (*maps, out, rows, features, depth),
        dynamic_shared_bytes=shared_bytes,
    )  # fmt: skip


def _check_size(x: ArrayView, stride: int, weight: ArrayView) -> None:
    """Refuse what 32 bits do not count."""
    for name, elements in (("x", x.shape[0] * stride), ("w", weight.size)):
        if elements > _MOST_ELEMENTS:
            raise ContractError(f"{name} spans {elements} elements, expected at most {_MOST_ELEMENTS}: split the rows")


_PARAMETERS = ("ptr", "ptr", "ptr", "i32", "i32", "i32", "i32")
_WGMMA_PARAMETERS = ("tensormap", "tensormap", "ptr", "i32", "i32", "i32")


def _entries(*tiles: str) -> tuple[EntryPoint, ...]:
    made = (
        EntryPoint(f"dense_gemm_{tile}", _PARAMETERS, dynamic_shared_bytes=0 if tile == "any" else _SHARED_BYTES)
        for tile in tiles
    )
    return (*made, *dense_entries("dense_gemm"))


_kernel = partial(CudaKernel, include_dirs=(INCLUDE_DIR,), strided=frozenset({"x"}))
DENSE_GEMM = _kernel(Path(__file__).with_name("dense_gemm.cu"), _entries(*_TILES), _plan)
DENSE_GEMM_HOPPER = _kernel(
    Path(__file__).with_name("dense_gemm_hopper.cu"),
    (
        *_entries("narrow", "spread", "any"),
        *(
            EntryPoint(f"dense_gemm_{form}", _WGMMA_PARAMETERS, shared_bytes, _WGMMA_THREADS)
            for form, (_, shared_bytes, _) in _WGMMA.items()
        ),
    ),
    partial(_plan, has_wgmma=True),
)
