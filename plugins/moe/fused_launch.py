"""Launching the experts of a step together with the router's choice and the shared expert."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, multiprocessors_of
from kernel_muster.plugins._cuda.nvfp4_layout import SUPERTILE_BYTES, TILE_K, TILE_N
from kernel_muster.plugins.moe.expert_launch import PAIRWISE_WARPS, SPLITS, Split, split_of, weights_of
from kernel_muster.plugins.w4a16_gemv import launch as gemv
from kernel_muster.registry.arrays import view_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.dtypes import numpy_dtype
from kernel_muster.registry.signature import Bound
from kernel_muster.registry.values import frozen

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]
# How a split of the GEMV sums K (w4a16_gemv/splits.cuh): in so many chains, of so many ranks where there are clusters.
_ORDERS = {
    "any": (8, 1),
    "k2048_few": (8, 1),
    "k2048": (4, 1),
    "k4096": (8, 1),
    "k5120_few": (20, 2),
    "k5120": (4, 1),
    "k6144": (8, 2),
    "k17408": (8, 2),
}
_INPUT_ORDERS = ("any", "k2048_few", "k2048", "k5120_few", "k5120")  # of the form that serves gate and up together
_BLOCKS_A_MULTIPROCESSOR = 2  # fused_shared.cu
# Tiles of a choice that a team has, by choices: all blocks fit an H200 at once.
_REPEATS = ((8, 1), (16, 2), (24, 3), (1 << 62, 4))
# Blocks that have the shared expert alone, where choices leave fewer free: its weights come early, so that few suffice.
_LEAST_SHARED_BLOCKS = 8
# The split of K in whose blocks a tile of the shared expert may lie beside the chosen ones, in so much shared memory.
_STAGED, _STAGED_BYTES = "k2048", 2 * 2048 // TILE_K * SUPERTILE_BYTES


def gemv_order(features: int, depth: int, is_dual: bool) -> tuple[int, int]:
    """Return the chains and ranks in which the GEMV sums K: of gate and up, so many features together, or of down."""
    split = gemv.split_of(features, depth)
    return _ORDERS["any" if is_dual and split not in _INPUT_ORDERS else split]


@frozen
class Shares:
    """How blocks share gate and up out: ``blocks`` a choice, ``repeats`` tiles a team, behind ``shared_blocks``.

    With a ``stride`` every so many-th block of a choice has a tile of the shared expert too, and the blocks in front
    have its gate, one a token; with 0 these have all of it.
    """

    repeats: int
    blocks: int
    shared_blocks: int
    stride: int
    grid: tuple[int, int, int]


def shares_of(dims: Mapping[str, int], multiprocessors: int) -> Shares:
    """Return the shares of ``M T`` choices and of the shared expert."""
    slots, split = dims["M"] * dims["T"], split_of(dims["H"])
    repeats = next(repeats for most, repeats in _REPEATS if slots <= most)
    blocks = ceil_div(ceil_div(dims["I"], TILE_N), split.teams(PAIRWISE_WARPS) * repeats)
    routed, tiles = blocks * slots, ceil_div(dims["J"], TILE_N)
    most = _BLOCKS_A_MULTIPROCESSOR * multiprocessors  # at once
    if split.name == _STAGED and tiles <= routed <= most:
        return Shares(repeats, blocks, dims["M"], routed // tiles, (dims["M"] + routed, 1, 1))
    shared_blocks = min(tiles, max(_LEAST_SHARED_BLOCKS, most - routed))
    return Shares(repeats, blocks, shared_blocks, 0, (shared_blocks + routed, 1, 1))


def _plan_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views, given = bound.dims, bound.views, bound.arguments
    shares = shares_of(dims, multiprocessors_of(views["x"].device))
    shared = tuple(given[name] for name in ("shared_gate", "shared_up"))
    arrays = (
        *weights_of(bound, "w_gate", "w_up"),
        *(view_of(weight.data) for weight in shared),
        *(views[name] for name in ("x", "logits", "gate_weight", "out_ids", "out_weights")),
        *(views[name] for name in ("out", "out_shared", "out_gate")),
        *(weight.global_scale_decode for weight in shared),
    )
    sizes = (views["logits"].dtype == numpy_dtype("f32"), *(dims[name] for name in "METIHJ"))
    parts = (shares.repeats, shares.blocks, shares.shared_blocks, shares.stride)
    arguments = (*arrays, *sizes, *parts, *gemv_order(2 * dims["J"], dims["H"], True))
    staged_bytes = _STAGED_BYTES if shares.stride else 0
    entry = f"fused_gate_up_{split_of(dims['H']).name}"
    return LaunchPlan(entry, shares.grid, arguments, dynamic_shared_bytes=staged_bytes)


def _plan_down(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    split, shared = split_of(dims["I"]), bound.arguments["shared_down"]
    if split.name == "k512" and dims["J"] != dims["I"]:
        split = Split("to_512", split.chains)
    arrays = (
        *weights_of(bound, "w_down"),
        view_of(shared.data),
        *(views[name] for name in ("h", "h_shared", "ids", "weights", "gate", "out")),
        shared.global_scale_decode,
    )
    sizes = (*(dims[name] for name in "ETHIJ"), *gemv_order(dims["H"], dims["J"], False))
    return LaunchPlan(f"fused_down_{split.name}", (ceil_div(dims["H"], TILE_N), dims["M"], 1), (*arrays, *sizes))


_GATE_UP = ("ptr",) * 14 + ("f32",) * 2 + ("i32",) * 13
_ENTRIES = (
    *(EntryPoint(f"fused_gate_up_{s.name}", _GATE_UP, _STAGED_BYTES if s.name == _STAGED else 0) for s in SPLITS),
    *(EntryPoint(f"fused_down_{s.name}", ("ptr",) * 9 + ("f32",) + ("i32",) * 7) for s in SPLITS),
)
FUSED_GATE_UP = cuda_kernel(_FOLDER / "fused_shared.cu", _ENTRIES, _plan_gate_up)
FUSED_DOWN = cuda_kernel(_FOLDER / "fused_shared.cu", _ENTRIES, _plan_down)
