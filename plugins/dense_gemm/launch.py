"""Launching products with BF16 weights: the GEMV's kernels for few rows, else a tile by rows and features.

On sm_90a tiles go through wgmma, on other architectures through mma.sync; a plain kernel takes what is not aligned. All
keys of an architecture are served by one source.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import VECTOR, ceil_div, multiprocessors_of
from kernel_muster.plugins._cuda.nvfp4_layout import TILE_N
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan, row_stride
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import ArrayView, view_of
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.workspace import TensorMap
from kernel_muster.registry.values import frozen

Entries = Mapping[str, EntryResources]

#: Of so few features (gates, routers) the blocks of a cluster share K (dense_rows.cuh): like all that splits K, by N.
FEW_FEATURES = 512
#: What the GEMV's kernels take: rows, of few features more on Hopper, and 16 k at a time. H200, us, with these, with
#: dense_split.cuh and with mma.sync: 64 x 256 x 2048 5.0, 4.8, 6.0; 64 x 96 x 5120 4.1, 5.5, 7.7; 128 x 96 x 5120 6.6,
#: 5.6, 7.7.
GEMV_ROWS, FEW_GEMV_ROWS, GEMV_DEPTH = 16, 64, 16
_GEMV = ("few_n8", "few_n16", "few_any", "m8", "m16")
# What the forms for few features have on their way at once, in blocks of k: others go through ``any``.
FEW_DEPTH, FEW_BLOCK = 6144, 64
# So much of x, in bytes, is little to read once more.
_LITTLE_X = 64 * 1024
# dense_gemm.cu: rows and features of a tile, and its shared memory.
_TILES = {"narrow": (32, 64), "spread": (32, 64), "wide": (128, 128), "any": (16, 16)}
_SHARED_BYTES = 96 * 1024
# Up to here a prompt has too few wide tiles for a device's multiprocessors, whatever its length; and so have few rows.
NARROW_FEATURES, NARROW_ROWS = 512, 64
# Fewer narrow tiles leave most of a device idle. H200, us spread / narrow: 64 x 96 x 5120 7.7 / 16.9,
# 512 x 96 x 5120 11.2 / 16.5, 2048 x 64 x 2048 12.7 / 8.9, 64 x 4096 x 2048 20.4 / 9.9 (M x N x K).
_FEW_NARROW_TILES = 33
_MAX_ELEMENTS = 2**32 - 1


@frozen
class _Bulk:
    """A form of sm_90a into which bulk copies bring boxes of so many rows and features at most."""

    rows: int
    features: int
    shared_bytes: int
    threads: int
    cost: float = 0.0  # what a tile takes beside the others'


_BULK_DEPTH = 64
_WGMMA = {
    "n256": _Bulk(128, 256, 214080, 384, 1.0), "n192": _Bulk(128, 192, 222288, 384, 0.76),
    "n128": _Bulk(128, 128, 214112, 384, 0.51), "n64": _Bulk(128, 64, 214144, 384, 0.33),
}  # fmt: skip
_SPLIT, _SPLIT_RANKS = _Bulk(64, 64, 99424, 160), (8, 4, 2)  # blocks that share K
_BROUGHT = _Bulk(16, 48, 224640, 288)


def tile_of(rows: int, features: int) -> str:
    """Return the name of the tile of mma.sync."""
    if features <= NARROW_FEATURES or rows <= NARROW_ROWS:
        return "spread" if _tiles("narrow", rows, features) < _FEW_NARROW_TILES else "narrow"
    return "wide"


def _tiles(tile: str, rows: int, features: int) -> int:
    tile_rows, tile_features = _TILES[tile]
    return ceil_div(rows, tile_rows) * ceil_div(features, tile_features)


def _bulk_tiles(form: _Bulk, rows: int, features: int) -> int:
    return ceil_div(rows, form.rows) * ceil_div(features, form.features)


def split_ranks(rows: int, features: int, multiprocessors: int) -> int:
    """Return how many blocks share K on Hopper: as many as multiprocessors are there for, 1 for whole tiles."""
    tiles = _bulk_tiles(_SPLIT, rows, features)
    return next((ranks for ranks in _SPLIT_RANKS if tiles * ranks <= multiprocessors), 1)


def wgmma_form(rows: int, features: int, multiprocessors: int) -> str:
    """Return the form of whole tiles on Hopper: the one that takes the fewest rounds, by what a tile takes.

    One that would read all of x twice for what is left beside 64 features is none.
    """

    def cost(form: str) -> float:
        tile = _WGMMA[form]
        return tile.cost * ceil_div(_bulk_tiles(tile, rows, features), multiprocessors)

    least = 128 if _WGMMA["n64"].features < features <= 128 else 0
    return min((form for form in _WGMMA if _WGMMA[form].features >= least), key=cost)


def even_tile(form: _Bulk, rows: int, features: int) -> tuple[int, int]:
    """Return rows and features of a tile, the same for all tiles as far as they can be: the last one is no remnant."""
    tile_rows = ceil_div(rows, ceil_div(rows, form.rows))
    tile_features = ceil_div(features, ceil_div(features, form.features))
    return tile_rows, ceil_div(tile_features, VECTOR) * VECTOR


def few_form(
    rows: int, features: int, depth: int, multiprocessors: int, entries: Entries
) -> tuple[str, tuple[int, int, int]]:
    """Return entry point and grid for few features: tiles of 8 up to a block a multiprocessor, two of little x.

    H200, us of 8 and of 16: 16 x 96 x 5120 2.29, 2.45; 32 x 96 x 5120 2.85, 2.65; 64 x 96 x 5120 4.17, 3.72;
    1 x 256 x 2048 2.26, 2.31; 16 x 256 x 2048 2.53, 2.55; 17 x 256 x 2048 3.31, 2.86; 16 x 200 x 5120 3.22, 3.07.
    """

    def form(name: str, width: int) -> tuple[str, tuple[int, int, int]]:
        entry = f"dense_gemv_few_{name}"
        cluster = entries[entry].cluster
        return entry, (ceil_div(features, width) * (cluster[0] if cluster else 1), ceil_div(rows, GEMV_ROWS), 1)

    if depth % FEW_BLOCK or depth > FEW_DEPTH:
        return form("any", 8)
    entry, grid = form("n8", 8)
    blocks = 2 if 2 * rows * depth <= _LITTLE_X else 1
    return (entry, grid) if grid[0] * grid[1] <= blocks * multiprocessors else form("n16", 16)


def _matrices(bound: Bound) -> tuple[ArrayView, int, ArrayView]:
    """Return x, the distance of its rows in elements, and the weight."""
    x, weight = bound.views["x"], view_of(bound.arguments["w"].values)
    if not weight.is_contiguous:
        raise ContractError(f"w has strides {weight.strides}, expected rows without gaps")
    return x, row_stride(x), weight


def _can_bring(stride: int, depth: int) -> bool:
    """Whether bulk copies can bring rows: not those that overlap, and not where there is no K at all."""
    return depth > 0 and depth % VECTOR == 0 and stride % VECTOR == 0 and stride >= depth


def _plan_gemv(bound: Bound, entries: Entries, has_bulk: bool = False) -> LaunchPlan:
    """Return the launch of dense_rows.cuh or dense_brought.cuh. No bit of a result depends on which it is."""
    (x, stride, weight), dims = _matrices(bound), bound.dims
    if stride % VECTOR:
        raise ContractError(f"x has rows {stride} elements apart, expected a multiple of 8 (16 bytes): copy the slice")
    rows, features, depth = dims["M"], dims["N"], dims["K"]
    tiles, multiprocessors = ceil_div(features, TILE_N), multiprocessors_of(x.device)
    # More tiles than fit on the device at a time, where two blocks fit a multiprocessor.
    if has_bulk and 8 < rows <= GEMV_ROWS and tiles > 2 * multiprocessors and _can_bring(stride, depth):
        maps = TensorMap(weight, (_BROUGHT.features, _BULK_DEPTH)), TensorMap(x, (rows, _BULK_DEPTH))
        grid = (min(ceil_div(features, _BROUGHT.features), multiprocessors), 1, 1)
        arguments: tuple[Any, ...] = (*maps, bound.views["out"], rows, features, depth)
        return LaunchPlan(
            "dense_gemv_m16_brought", grid, arguments, dynamic_shared_bytes=_BROUGHT.shared_bytes
        )  # fmt: skip
    arguments = (weight, x, bound.views["out"], stride, rows, features, depth)
    if features > FEW_FEATURES:
        return LaunchPlan(f"dense_gemv_m{8 if rows <= 8 else 16}", (tiles, ceil_div(rows, GEMV_ROWS), 1), arguments)
    entry, grid = few_form(rows, features, depth, multiprocessors, entries)
    return LaunchPlan(entry, grid, arguments)


def _plan_gemm(bound: Bound, entries: Entries, has_bulk: bool = False) -> LaunchPlan:
    (x, stride, weight), dims = _matrices(bound), bound.dims
    rows, features, depth = dims["M"], dims["N"], dims["K"]
    _check_size(x, stride, weight)
    most = FEW_GEMV_ROWS if has_bulk and features <= FEW_FEATURES else GEMV_ROWS
    if rows <= most and depth % GEMV_DEPTH == 0 and stride % VECTOR == 0:
        return _plan_gemv(bound, entries, has_bulk)
    is_aligned = _can_bring(stride, depth)
    if is_aligned and has_bulk:
        return _plan_bulk(x, weight, bound.views["out"], depth)
    tile = tile_of(rows, features) if is_aligned else "any"
    cluster = entries[f"dense_gemm_{tile}"].cluster
    grid = (_tiles(tile, rows, features) * (cluster[0] if cluster else 1), 1, 1)
    arguments = (x, weight, bound.views["out"], stride, rows, features, depth)
    return LaunchPlan(f"dense_gemm_{tile}", grid, arguments, dynamic_shared_bytes=_SHARED_BYTES if is_aligned else 0)


def _plan_bulk(x: ArrayView, weight: ArrayView, out: ArrayView, depth: int) -> LaunchPlan:
    (rows, features), multiprocessors = out.shape, multiprocessors_of(x.device)
    ranks = split_ranks(rows, features, multiprocessors)
    name = "split" if ranks > 1 else wgmma_form(rows, features, multiprocessors)
    form = _SPLIT if ranks > 1 else _WGMMA[name]
    tile = even_tile(form, rows, features)
    maps = (TensorMap(matrix, (size, _BULK_DEPTH)) for matrix, size in zip((x, weight), tile, strict=True))
    arguments = (*maps, out, rows, features, depth, *tile)
    tiles, entry = _bulk_tiles(form, rows, features), f"dense_gemm_{name}"
    if ranks == 1:
        return LaunchPlan(
            entry, (min(tiles, multiprocessors), 1, 1), arguments, dynamic_shared_bytes=form.shared_bytes
        )  # fmt: skip
    return LaunchPlan(
        entry, (tiles * ranks, 1, 1), (*arguments, ranks), dynamic_shared_bytes=form.shared_bytes,
        cluster=(ranks, 1, 1),
    )  # fmt: skip


def _check_size(x: ArrayView, stride: int, weight: ArrayView) -> None:
    """Refuse what 32 bits do not count."""
    for name, elements in (("x", x.shape[0] * stride), ("w", weight.size)):
        if elements > _MAX_ELEMENTS:
            raise ContractError(f"{name} spans {elements} elements, expected at most {_MAX_ELEMENTS}: split the rows")


_PARAMETERS = ("ptr", "ptr", "ptr", "i32", "i32", "i32", "i32")
_BULK_PARAMETERS = ("tensormap", "tensormap", "ptr", "i32", "i32", "i32")


def _entries(*tiles: str) -> tuple[EntryPoint, ...]:
    made = (
        EntryPoint(f"dense_gemm_{tile}", _PARAMETERS, dynamic_shared_bytes=0 if tile == "any" else _SHARED_BYTES)
        for tile in tiles
    )
    return (*made, *(EntryPoint(f"dense_gemv_{form}", _PARAMETERS) for form in _GEMV))


def _bulk_entry(name: str, form: _Bulk, sizes: int) -> EntryPoint:
    """Return an entry that takes so many sizes beside those of the matrices."""
    return EntryPoint(f"dense_{name}", (*_BULK_PARAMETERS, *("i32",) * sizes), form.shared_bytes, form.threads)


_kernel = partial(CudaKernel, include_dirs=(INCLUDE_DIR,), strided=frozenset({"x"}))
_portable = partial(_kernel, Path(__file__).with_name("dense_gemm.cu"), _entries(*_TILES))
_hopper = partial(
    _kernel,
    Path(__file__).with_name("dense_gemm_hopper.cu"),
    (
        *_entries("any"),
        _bulk_entry("gemv_m16_brought", _BROUGHT, 0),
        *(_bulk_entry(f"gemm_{name}", form, 2) for name, form in _WGMMA.items()),
        _bulk_entry("gemm_split", _SPLIT, 3),
    ),
)
DENSE_GEMV, DENSE_GEMV_HOPPER = _portable(_plan_gemv), _hopper(partial(_plan_gemv, has_bulk=True))
DENSE_GEMM, DENSE_GEMM_HOPPER = _portable(_plan_gemm), _hopper(partial(_plan_gemm, has_bulk=True))
