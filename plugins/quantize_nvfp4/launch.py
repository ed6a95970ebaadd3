"""Launching the kernels of ``kernels.py``: which of them in which order, and their grids."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.numba.numba_kernel import NumbaEntry, NumbaKernel
from kernel_muster.registry.backends.request import EntryResources
from kernel_muster.registry.contract.arrays import ArrayView
from kernel_muster.registry.contract.nvfp4 import GROUP
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError

# As in kernels.py, which imports Numba and is therefore not imported here; a test compares.
THREADS, TILE, TILE_GROUPS = 256, 32, 8
_TILE_THREADS = (TILE, 8, 1)
_ONE, _BLOCK = (1, 1, 1), (THREADS, 1, 1)
# Enough blocks of absmax to fill any device several times; each strides over the rest.
_MAX_BLOCKS = 2048
_MAX_GRID_Y = 65535
Entries = Mapping[str, EntryResources]


def _blocks(items: int, per_block: int) -> int:
    return -(-items // per_block)


def _tiles(rows: int) -> int:
    tiles = _blocks(rows, TILE)
    if tiles > _MAX_GRID_Y:
        raise ContractError(f"{rows} rows, expected at most {TILE * _MAX_GRID_Y} to transpose at once")
    return tiles


def _around(bound: Bound, quantize: LaunchPlan) -> tuple[LaunchPlan, ...]:
    """Put the launches before and after that keep the largest magnitude where the global scale will be."""
    scale, values = bound.views["out_global_scale"], bound.views["values"]
    clear = LaunchPlan("clear", _ONE, (scale,), _ONE)
    words = values.size // 2
    if not words:
        return (clear,)  # the bits of 0 are the scale 0
    grid = (min(_blocks(words, THREADS), _MAX_BLOCKS), 1, 1)
    absmax = LaunchPlan("absmax", grid, (values, words, scale), _BLOCK)
    return (clear, absmax, quantize, LaunchPlan("finish", _ONE, (scale,), _ONE))


def _outputs(bound: Bound, *names: str) -> tuple[ArrayView, ...]:
    return tuple(bound.views[name] for name in names)


def _plan_quantize(bound: Bound, entries: Entries) -> tuple[LaunchPlan, ...]:
    groups = bound.views["values"].size // GROUP
    scale, *outputs = _outputs(bound, "out_global_scale", "out_packed", "out_block_scale")
    arguments = (bound.views["values"], groups, scale, *outputs)
    return _around(bound, LaunchPlan("quantize", (_blocks(groups, THREADS), 1, 1), arguments, _BLOCK))


def _plan_quantize_t(bound: Bound, entries: Entries) -> tuple[LaunchPlan, ...]:
    rows, groups = bound.dims["N"], bound.dims["K"] // GROUP
    names = ("out_global_scale", "out_packed", "out_block_scale", "out_packed_t", "out_block_scale_t")
    arguments = (bound.views["values"], rows, groups, *_outputs(bound, *names))
    return _around(bound, LaunchPlan("quantize_t", (_blocks(groups, TILE_GROUPS), _tiles(rows), 1), arguments, _BLOCK))


def _plan_transpose(bound: Bound, entries: Entries) -> tuple[LaunchPlan, ...]:
    plans = []
    for name in ("packed", "block_scale"):
        source, target = bound.views[name], bound.views[f"out_{name}"]
        rows, columns = source.shape
        grid = (_blocks(columns, TILE), _tiles(rows), 1)
        plans.append(LaunchPlan("transpose", grid, (source, rows, columns, target), _TILE_THREADS))
    return tuple(plans)


# One request serves all keys: Numba compiles the shared functions once.
_kernel = partial(
    NumbaKernel,
    Path(__file__).with_name("kernels.py"),
    (
        NumbaEntry("clear", ("u32*",), 1),
        NumbaEntry("absmax", ("u32*", "i64", "u32[:]"), THREADS),
        NumbaEntry("quantize", ("u32*", "i64", "u32*", "u32*", "u8*"), THREADS),
        NumbaEntry("quantize_t", ("u32*", "i64", "i64", "u32*", "u32*", "u8*", "u8*", "u8*"), THREADS),
        NumbaEntry("finish", ("u32*",), 1),
        NumbaEntry("transpose", ("u8*", "i64", "i64", "u8*"), THREADS),
    ),
)
QUANTIZE = _kernel(_plan_quantize)
QUANTIZE_T = _kernel(_plan_quantize_t)
TRANSPOSE = _kernel(_plan_transpose)
