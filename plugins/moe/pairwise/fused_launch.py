"""Launching the experts of a step together with the router's choice and the shared expert."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, multiprocessors_of
from kernel_muster.plugins._cuda.nvfp4_layout import TILE_N
from kernel_muster.plugins.moe.experts.splits import SPLITS, Split, split_of, weights_of
from kernel_muster.plugins.moe.pairwise.launch import PAIRWISE_WARPS
from kernel_muster.plugins.nvfp4_gemv import launch as gemv
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import view_of
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.values import frozen

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]
# The split-K slices, and ranks of a cluster, of each split of the GEMV (nvfp4_gemv/splits.cuh).
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
_INPUT_ORDERS = ("any", "k2048_few", "k2048", "k5120_few", "k5120")  # that the launch of gate and up together has
(_BLOCKS_PER_MULTIPROCESSOR,) = constants(_FOLDER / "fused_shared.cu", "FUSED_BLOCKS")
# Up to this number of choices: tiles of a choice for each team, so that all blocks fit an H200 at once, and the least
# blocks of the shared expert. Its weights are loaded before pdl_wait, so that few blocks suffice; more are faster where
# the other blocks end early. H200, cold L2, us with the router, 8 / 32 blocks of the shared expert:
# 8 choices 15.1 / 14.5, 16 choices 17.3 / 17.7, 24 choices 25.1 / 23.7, 32 choices 27.6 / 28.7.
_SCHEDULES = ((8, 1, 32), (16, 2, 8), (24, 3, 32), (1 << 62, 4, 8))


def gemv_order(features: int, depth: int, is_dual: bool) -> tuple[int, int]:
    """Return the slices and ranks in which the GEMV sums K: of gate and up, so many features together, or of down."""
    split = (gemv.split_of if is_dual else gemv.split_alone)(features, depth)
    return _ORDERS["any" if is_dual and split not in _INPUT_ORDERS else split]


@frozen
class Schedule:
    """The grid of gate and up: blocks of the shared expert, then ``blocks`` a choice, ``repeats`` tiles a team."""

    repeats: int
    blocks: int
    shared_blocks: int
    grid: tuple[int, int, int]


def schedule_of(dims: Mapping[str, int], multiprocessors: int) -> Schedule:
    """Return the schedule of ``M T`` choices, and of the shared expert in the remaining blocks of a wave."""
    slots, teams = dims["M"] * dims["T"], split_of("gate_up", dims["H"]).teams(PAIRWISE_WARPS)
    repeats, least = next((repeats, least) for most, repeats, least in _SCHEDULES if slots <= most)
    blocks = ceil_div(ceil_div(dims["I"], TILE_N), teams * repeats)
    free = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors - blocks * slots
    shared_blocks = min(ceil_div(dims["J"], TILE_N), max(least, free))
    return Schedule(repeats, blocks, shared_blocks, (shared_blocks + blocks * slots, 1, 1))


def _plan_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views, given = bound.dims, bound.views, bound.arguments
    schedule = schedule_of(dims, multiprocessors_of(views["x"].device))
    shared = tuple(given[name] for name in ("shared_gate", "shared_up"))
    arrays = (
        *weights_of(bound, "w_gate", "w_up"),
        *(view_of(weight.data) for weight in shared),
        *(views[name] for name in ("x", "logits", "gate_weight", "out_ids", "out_weights")),
        *(views[name] for name in ("out", "out_shared", "out_gate")),
        *(weight.global_scale_decode for weight in shared),
    )
    sizes = (views["logits"].dtype == numpy_dtype("f32"), *(dims[name] for name in "METIHJ"))
    scheduling = (schedule.repeats, schedule.blocks, schedule.shared_blocks)
    order = gemv_order(2 * dims["J"], dims["H"], True)
    entry = f"fused_gate_up_{split_of('gate_up', dims['H']).name}"
    return LaunchPlan(entry, schedule.grid, (*arrays, *sizes, *scheduling, *order))


def _plan_down(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    split, shared = split_of("down", dims["I"]), bound.arguments["shared_down"]
    if split.name == "k512" and dims["J"] != dims["I"]:
        split = Split("to_512", split.slices)
    arrays = (
        *weights_of(bound, "w_down"),
        view_of(shared.data),
        *(views[name] for name in ("h", "h_shared", "ids", "weights", "gate", "out")),
        shared.global_scale_decode,
    )
    sizes = (*(dims[name] for name in "ETHIJ"), *gemv_order(dims["H"], dims["J"], False))
    return LaunchPlan(f"fused_down_{split.name}", (ceil_div(dims["H"], TILE_N), dims["M"], 1), (*arrays, *sizes))


_ENTRIES = (
    *(EntryPoint(f"fused_gate_up_{s.name}", ("ptr",) * 14 + ("f32",) * 2 + ("i32",) * 12) for s in SPLITS["gate_up"]),
    *(EntryPoint(f"fused_down_{s.name}", ("ptr",) * 9 + ("f32",) + ("i32",) * 7) for s in SPLITS["down"]),
)
FUSED_GATE_UP = cuda_kernel(_FOLDER / "fused_shared.cu", _ENTRIES, _plan_gate_up)
FUSED_DOWN = cuda_kernel(_FOLDER / "fused_shared.cu", _ENTRIES, _plan_down)
