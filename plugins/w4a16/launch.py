"""Launching the tile GEMMs: the tile configurations of each key, and the entry point of a shape."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda.launching import VECTOR, ceil_div, cuda_kernel
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan, row_stride
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import view_of
from kernel_muster.registry.contract.nvfp4 import GROUP
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.values import frozen

_SOURCE = Path(__file__).parent / "gemm.cu"
_PARAMETERS = ("ptr",) * 4 + ("f32",) + ("i32",) * 4
_CHUNK_BYTES = 16  # of one cp.async
_CODE_PADDING_BYTES = 32  # tile.cuh
_UNALIGNED = "w4a16_any"


@frozen
class Tile:
    """A tile configuration: ``m x n`` of a block, ``k`` of a stage, a warp's tile, stages, and occupancy in blocks.

    All configurations have the same bits (gemm.cuh).
    """

    m: int
    n: int
    k: int
    warp_m: int
    warp_n: int
    stages: int
    blocks: int

    @property
    def entry(self) -> str:
        """The entry point of this tile."""
        return f"w4a16_m{self.m}_n{self.n}_k{self.k}_s{self.stages}"

    def macro(self, entry: str, is_aligned: bool, row_major: bool) -> str:
        """Return the ENTRY macro of gemm.cu for this tile."""
        numbers = (self.m, self.n, self.k, self.warp_m, self.warp_n, self.stages, self.blocks)
        given = (entry, "true" if is_aligned else "false", self.shared_bytes(row_major), *numbers)
        return f"ENTRY({','.join(map(str, given))})"

    def shared_bytes(self, row_major: bool) -> int:
        """Return the shared memory of a block: per stage x, codes and scales; and three stages of decoded scales."""
        scales = self.k // GROUP * self.n
        codes = self.n * self.k // 2 if row_major else self.k // 2 * (self.n + _CODE_PADDING_BYTES)
        return self.stages * (2 * self.m * self.k + codes + scales) + 3 * 4 * scales


@frozen
class Tiles:
    """The tile configurations of one key: for large M, and for M up to the tile of the other."""

    large_m: Tile
    small_m: Tile
    row_major: bool = False


def _has_aligned_rows(dims: Mapping[str, int], row_major: bool) -> bool:
    """Whether all rows of a layout are aligned for cp.async. The arrays themselves always are."""
    return dims["K"] % (4 * GROUP) == 0 if row_major else dims["N"] % _CHUNK_BYTES == 0


def _plan(tiles: Tiles, unaligned: Tile, bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    weight, x, dims = bound.arguments["w"], bound.views["x"], bound.dims
    stride = row_stride(x)
    if stride % VECTOR:
        raise ContractError(f"x has rows {stride} elements apart, expected a multiple of 8 (16 bytes): copy the slice")
    codes, scales = view_of(weight.packed), view_of(weight.block_scale)
    if not (codes.is_contiguous and scales.is_contiguous):
        raise ContractError("w has gaps between its rows, expected none: copy the slice")
    entry, tile = _UNALIGNED, unaligned
    if _has_aligned_rows(dims, tiles.row_major):
        tile = tiles.small_m if dims["M"] <= tiles.small_m.m else tiles.large_m
        entry = tile.entry
    blocks = ceil_div(dims["M"], tile.m) * ceil_div(dims["N"], tile.n)
    arguments = (codes, scales, x, bound.views["out"], float(weight.global_scale_decode), stride)
    return LaunchPlan(
        entry,
        (blocks, 1, 1),
        (*arguments, dims["M"], dims["N"], dims["K"]),
        dynamic_shared_bytes=tile.shared_bytes(tiles.row_major),
    )


def _kernels(tiles: Mapping[str, Tiles]) -> dict[str, CudaKernel]:
    """Return the kernels of keys that share a source, so that each tile is compiled once.

    Unaligned rows are rare: the first key's small-M tile serves them for all keys.
    """
    first = next(iter(tiles.values()))
    row_major, unaligned = first.row_major, first.small_m
    distinct = dict.fromkeys(tile for each in tiles.values() for tile in (each.large_m, each.small_m))
    entries = (*((tile.entry, tile, True) for tile in distinct), (_UNALIGNED, unaligned, False))
    macros = " ".join(tile.macro(name, is_aligned, row_major) for name, tile, is_aligned in entries)
    points = tuple(EntryPoint(name, _PARAMETERS, tile.shared_bytes(row_major)) for name, tile, _ in entries)
    options = (f"-DWEIGHTS={'ROW_MAJOR' if row_major else 'TRANSPOSED'}", f"-DENTRIES={macros}")
    return {
        key: cuda_kernel(_SOURCE, points, partial(_plan, each, unaligned), options=options, strided=frozenset({"x"}))
        for key, each in tiles.items()
    }


# Measured on an H200 (records/). Of the stages one is multiplied, one has arrived, and the others are in flight: three
# for keys with ``_p3``, two otherwise. A stage of the ``_n64`` key holds two K steps of 64.
TILES = {
    "w4a16::w4a16_gemm": Tiles(Tile(64, 128, 64, 64, 32, 4, 3), Tile(32, 128, 64, 32, 32, 4, 3), row_major=True),
    "w4a16::w4a16_gemm_t": Tiles(Tile(64, 128, 32, 64, 32, 4, 3), Tile(32, 128, 32, 32, 32, 4, 4)),
    "w4a16::w4a16_gemm_t_k64": Tiles(Tile(64, 128, 64, 64, 32, 4, 3), Tile(32, 128, 64, 32, 32, 4, 3)),
    "w4a16::w4a16_gemm_t_m128": Tiles(Tile(128, 128, 64, 128, 32, 3, 2), Tile(64, 128, 64, 64, 32, 5, 2)),
    "w4a16::w4a16_gemm_t_p3": Tiles(Tile(64, 128, 32, 64, 32, 5, 3), Tile(32, 128, 32, 32, 32, 5, 4)),
    "w4a16::w4a16_gemm_t_k64_p3": Tiles(Tile(64, 128, 64, 64, 32, 5, 2), Tile(32, 128, 64, 32, 32, 5, 3)),
    "w4a16::w4a16_gemm_t_k64_n64_p3": Tiles(Tile(64, 64, 128, 64, 16, 4, 2), Tile(32, 64, 128, 32, 16, 4, 3)),
    "w4a16_v2::w4a16_gemm_t_m128_v2": Tiles(Tile(128, 256, 64, 128, 32, 3, 1), Tile(64, 128, 64, 64, 32, 5, 2)),
}
# Keys of one model: those of its policy, and the keys without ``_p3``, which levers select.
_GROUPS = (
    ("w4a16_gemm_t_p3", "w4a16_gemm_t_k64_p3", "w4a16_gemm_t_k64_n64_p3", "w4a16_gemm_t_m128"),
    ("w4a16_gemm_t", "w4a16_gemm_t_k64"),
)
_TOGETHER = [{f"w4a16::{name}": TILES[f"w4a16::{name}"] for name in group} for group in _GROUPS]
_ALONE = [{key: tiles} for key, tiles in TILES.items() if not any(key in group for group in _TOGETHER)]
_MADE = {key: kernel for group in (*_TOGETHER, *_ALONE) for key, kernel in _kernels(group).items()}
KERNELS = {key: _MADE[key] for key in TILES}
