"""Launching GEMV and GEMM with BF16 weights: the tile configuration of a shape.

sm_90a has TMA and wgmma, other architectures have mma.sync; a simple kernel serves unaligned rows. One source
serves all keys of an architecture.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.constants import constants
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

#: Up to this N (gates, routers) the GEMV splits K over a cluster (gemv_kernels.cuh). Split-K depends on N only.
SMALL_N = 512
#: The GEMV's most rows, its most rows for small N on Hopper, and its multiple of K. H200, us, with the GEMV, with
#: gemm_split_k.cuh and with mma.sync: 64 x 256 x 2048 5.0, 4.8, 6.0; 64 x 96 x 5120 4.1, 5.5, 7.7; 128 x 96 x 5120 6.6,
#: 5.6, 7.7.
GEMV_ROWS, SMALL_N_GEMV_ROWS, GEMV_DEPTH = 16, 64, 16
_GEMV = ("few_n8", "few_n16", "few_any", "m8", "m16")
# Small N: the most K whose loads are all in flight, and its multiple. Other K use ``any``.
SMALL_N_DEPTH, (SMALL_N_BLOCK,) = 6144, constants(INCLUDE_DIR / "dense_gemv.cuh", "BLOCK_K")
# Up to this size of x, a second read of it costs little.
_SMALL_X_BYTES = 64 * 1024
# dense_gemm.cu: rows and features of a tile, and its shared memory.
_TILES = {"narrow": (32, 64), "spread": (32, 64), "wide": (128, 128), "any": (16, 16)}
(_SHARED_BYTES,) = constants(Path(__file__).with_name("gemm_mma.cuh"), "SHARED_BYTES")
# Up to this N, or this M, wide tiles are less than a wave.
NARROW_FEATURES, NARROW_ROWS = 512, 64
# Fewer narrow tiles leave most of the device idle: ``spread`` splits K over a cluster. H200, us spread / narrow:
# 64 x 96 x 5120 7.7 / 16.9, 512 x 96 x 5120 11.2 / 16.5, 2048 x 64 x 2048 12.7 / 8.9, 64 x 4096 x 2048 20.4 / 9.9
# (M x N x K).
_SPREAD_TILES = 33
_MAX_ELEMENTS = 2**32 - 1


@frozen
class _TmaConfig:
    """A tile configuration of sm_90a with TMA boxes of at most ``rows`` and ``features``."""

    rows: int
    features: int
    shared_bytes: int
    threads: int
    cost: float = 0.0  # time of a tile relative to n256


_TMA_DEPTH = 64
_WGMMA = {
    "n256": _TmaConfig(128, 256, 214080, 384, 1.0), "n192": _TmaConfig(128, 192, 222288, 384, 0.76),
    "n128": _TmaConfig(128, 128, 214112, 384, 0.51), "n64": _TmaConfig(128, 64, 214144, 384, 0.33),
}  # fmt: skip
_SPLIT, _SPLIT_RANKS = _TmaConfig(64, 64, 99424, 160), (8, 4, 2)  # blocks of a cluster that split K
_GEMV_TMA = _TmaConfig(16, 48, 224640, 288)


def tile_of(rows: int, features: int) -> str:
    """Return the name of the tile of mma.sync."""
    if features <= NARROW_FEATURES or rows <= NARROW_ROWS:
        return "spread" if _tiles("narrow", rows, features) < _SPREAD_TILES else "narrow"
    return "wide"


def _tiles(tile: str, rows: int, features: int) -> int:
    tile_rows, tile_features = _TILES[tile]
    return ceil_div(rows, tile_rows) * ceil_div(features, tile_features)


def _tma_tiles(config: _TmaConfig, rows: int, features: int) -> int:
    return ceil_div(rows, config.rows) * ceil_div(features, config.features)


def split_ranks(rows: int, features: int, multiprocessors: int) -> int:
    """Return the cluster size of split-K on Hopper: as much as fits one wave; 1 means no split."""
    tiles = _tma_tiles(_SPLIT, rows, features)
    return next((ranks for ranks in _SPLIT_RANKS if tiles * ranks <= multiprocessors), 1)


def wgmma_config(rows: int, features: int, multiprocessors: int) -> str:
    """Return the wgmma tile configuration on Hopper with the least time: waves times the time of a tile.

    64 features are excluded where a second tile would read all of x again for the rest of N.
    """

    def cost(config: str) -> float:
        tile = _WGMMA[config]
        return tile.cost * ceil_div(_tma_tiles(tile, rows, features), multiprocessors)

    least = 128 if _WGMMA["n64"].features < features <= 128 else 0
    return min((config for config in _WGMMA if _WGMMA[config].features >= least), key=cost)


def even_tile(config: _TmaConfig, rows: int, features: int) -> tuple[int, int]:
    """Return rows and features of equally large tiles, so that the last one is not a small remnant."""
    tile_rows = ceil_div(rows, ceil_div(rows, config.rows))
    tile_features = ceil_div(features, ceil_div(features, config.features))
    return tile_rows, ceil_div(tile_features, VECTOR) * VECTOR


def small_n_entry(
    rows: int, features: int, depth: int, multiprocessors: int, entries: Entries
) -> tuple[str, tuple[int, int, int]]:
    """Return entry point and grid for small N: tiles of 8 features up to one block a multiprocessor, two for small x.

    H200, us of 8 and of 16: 16 x 96 x 5120 2.29, 2.45; 32 x 96 x 5120 2.85, 2.65; 64 x 96 x 5120 4.17, 3.72;
    1 x 256 x 2048 2.26, 2.31; 16 x 256 x 2048 2.53, 2.55; 17 x 256 x 2048 3.31, 2.86; 16 x 200 x 5120 3.22, 3.07.
    """

    def config(name: str, width: int) -> tuple[str, tuple[int, int, int]]:
        entry = f"dense_gemv_few_{name}"
        cluster = entries[entry].cluster
        return entry, (ceil_div(features, width) * (cluster[0] if cluster else 1), ceil_div(rows, GEMV_ROWS), 1)

    if depth % SMALL_N_BLOCK or depth > SMALL_N_DEPTH:
        return config("any", 8)
    entry, grid = config("n8", 8)
    blocks = 2 if 2 * rows * depth <= _SMALL_X_BYTES else 1
    return (entry, grid) if grid[0] * grid[1] <= blocks * multiprocessors else config("n16", 16)


def _matrices(bound: Bound) -> tuple[ArrayView, int, ArrayView]:
    """Return x, the distance of its rows in elements, and the weight."""
    x, weight = bound.views["x"], view_of(bound.arguments["w"].values)
    if not weight.is_contiguous:
        raise ContractError(f"w has strides {weight.strides}, expected rows without gaps")
    return x, row_stride(x), weight


def _can_use_tma(stride: int, depth: int) -> bool:
    """Whether TMA can load the rows: aligned, not overlapping, and K above 0."""
    return depth > 0 and depth % VECTOR == 0 and stride % VECTOR == 0 and stride >= depth


def _plan_gemv(bound: Bound, entries: Entries, has_tma: bool = False) -> LaunchPlan:
    """Return the launch of gemv_kernels.cuh or gemv_tma.cuh, which have the same bits."""
    (x, stride, weight), dims = _matrices(bound), bound.dims
    if stride % VECTOR:
        raise ContractError(f"x has rows {stride} elements apart, expected a multiple of 8 (16 bytes): copy the slice")
    rows, features, depth = dims["M"], dims["N"], dims["K"]
    tiles, multiprocessors = ceil_div(features, TILE_N), multiprocessors_of(x.device)
    # More than one wave, at two blocks a multiprocessor.
    if has_tma and 8 < rows <= GEMV_ROWS and tiles > 2 * multiprocessors and _can_use_tma(stride, depth):
        maps = TensorMap(weight, (_GEMV_TMA.features, _TMA_DEPTH)), TensorMap(x, (rows, _TMA_DEPTH))
        grid = (min(ceil_div(features, _GEMV_TMA.features), multiprocessors), 1, 1)
        arguments: tuple[Any, ...] = (*maps, bound.views["out"], rows, features, depth)
        return LaunchPlan(
            "dense_gemv_m16_brought", grid, arguments, dynamic_shared_bytes=_GEMV_TMA.shared_bytes
        )  # fmt: skip
    arguments = (weight, x, bound.views["out"], stride, rows, features, depth)
    if features > SMALL_N:
        return LaunchPlan(f"dense_gemv_m{8 if rows <= 8 else 16}", (tiles, ceil_div(rows, GEMV_ROWS), 1), arguments)
    entry, grid = small_n_entry(rows, features, depth, multiprocessors, entries)
    return LaunchPlan(entry, grid, arguments)


def _plan_gemm(bound: Bound, entries: Entries, has_tma: bool = False) -> LaunchPlan:
    (x, stride, weight), dims = _matrices(bound), bound.dims
    rows, features, depth = dims["M"], dims["N"], dims["K"]
    _check_size(x, stride, weight)
    most = SMALL_N_GEMV_ROWS if has_tma and features <= SMALL_N else GEMV_ROWS
    if rows <= most and depth % GEMV_DEPTH == 0 and stride % VECTOR == 0:
        return _plan_gemv(bound, entries, has_tma)
    is_aligned = _can_use_tma(stride, depth)
    if is_aligned and has_tma:
        return _plan_tma(x, weight, bound.views["out"], depth)
    tile = tile_of(rows, features) if is_aligned else "any"
    cluster = entries[f"dense_gemm_{tile}"].cluster
    grid = (_tiles(tile, rows, features) * (cluster[0] if cluster else 1), 1, 1)
    arguments = (x, weight, bound.views["out"], stride, rows, features, depth)
    return LaunchPlan(f"dense_gemm_{tile}", grid, arguments, dynamic_shared_bytes=_SHARED_BYTES if is_aligned else 0)


def _plan_tma(x: ArrayView, weight: ArrayView, out: ArrayView, depth: int) -> LaunchPlan:
    (rows, features), multiprocessors = out.shape, multiprocessors_of(x.device)
    ranks = split_ranks(rows, features, multiprocessors)
    name = "split" if ranks > 1 else wgmma_config(rows, features, multiprocessors)
    config = _SPLIT if ranks > 1 else _WGMMA[name]
    tile = even_tile(config, rows, features)
    maps = (TensorMap(matrix, (size, _TMA_DEPTH)) for matrix, size in zip((x, weight), tile, strict=True))
    arguments = (*maps, out, rows, features, depth, *tile)
    tiles, entry = _tma_tiles(config, rows, features), f"dense_gemm_{name}"
    if ranks == 1:
        return LaunchPlan(
            entry, (min(tiles, multiprocessors), 1, 1), arguments, dynamic_shared_bytes=config.shared_bytes
        )  # fmt: skip
    return LaunchPlan(
        entry, (tiles * ranks, 1, 1), (*arguments, ranks), dynamic_shared_bytes=config.shared_bytes,
        cluster=(ranks, 1, 1),
    )  # fmt: skip


def _check_size(x: ArrayView, stride: int, weight: ArrayView) -> None:
    """Refuse matrices whose offsets need more than 32 bits."""
    for name, elements in (("x", x.shape[0] * stride), ("w", weight.size)):
        if elements > _MAX_ELEMENTS:
            raise ContractError(f"{name} spans {elements} elements, expected at most {_MAX_ELEMENTS}: split the rows")


_PARAMETERS = ("ptr", "ptr", "ptr", "i32", "i32", "i32", "i32")
_TMA_PARAMETERS = ("tensormap", "tensormap", "ptr", "i32", "i32", "i32")


def _entries(*tiles: str) -> tuple[EntryPoint, ...]:
    made = (
        EntryPoint(f"dense_gemm_{tile}", _PARAMETERS, dynamic_shared_bytes=0 if tile == "any" else _SHARED_BYTES)
        for tile in tiles
    )
    return (*made, *(EntryPoint(f"dense_gemv_{config}", _PARAMETERS) for config in _GEMV))


def _tma_entry(name: str, config: _TmaConfig, sizes: int) -> EntryPoint:
    """Return an entry point with a number of sizes after M, N and K."""
    return EntryPoint(f"dense_{name}", (*_TMA_PARAMETERS, *("i32",) * sizes), config.shared_bytes, config.threads)


_kernel = partial(CudaKernel, include_dirs=(INCLUDE_DIR,), strided=frozenset({"x"}))
_portable = partial(_kernel, Path(__file__).with_name("dense_gemm.cu"), _entries(*_TILES))
_hopper = partial(
    _kernel,
    Path(__file__).with_name("dense_gemm_hopper.cu"),
    (
        *_entries("any"),
        _tma_entry("gemv_m16_brought", _GEMV_TMA, 0),
        *(_tma_entry(f"gemm_{name}", config, 2) for name, config in _WGMMA.items()),
        _tma_entry("gemm_split", _SPLIT, 3),
    ),
)
DENSE_GEMV, DENSE_GEMV_HOPPER = _portable(_plan_gemv), _hopper(partial(_plan_gemv, has_tma=True))
DENSE_GEMM, DENSE_GEMM_HOPPER = _portable(_plan_gemm), _hopper(partial(_plan_gemm, has_tma=True))
