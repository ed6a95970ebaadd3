"""Launching the experts: which split of K serves a shape, and the arguments of each form."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel
from kernel_muster.plugins._cuda.nvfp4_layout import TILE_N
from kernel_muster.registry.arrays import ArrayView, view_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]

# Up to which K which split serves, and how many tiles of 16 outputs a block then has (experts.cuh): every warp has one
# supertile of 256 k or none, up to 2048.
_SPLITS = ((512, "k512", 4), (1024, "k1024", 2))
_ANY_K = ("any", 1)
_MOST_ON_AN_AXIS = 65535  # of a grid's second axis


def split_of(depth: int) -> tuple[str, int]:
    """Return the split of K for depth K and its tiles a block. Never a function of the rows."""
    return next(((name, tiles) for most, name, tiles in _SPLITS if depth <= most), _ANY_K)


def _grid(features: int, tiles: int, groups: int) -> tuple[int, int, int]:
    if groups > _MOST_ON_AN_AXIS:
        raise ContractError(f"{groups} groups of rows, expected at most {_MOST_ON_AN_AXIS}: launch in parts")
    return (ceil_div(ceil_div(features, TILE_N), tiles), groups, 1)


def _weights(bound: Bound, *names: str) -> tuple[ArrayView, ...]:
    """Return the data of some experts' weights, then their global scales."""
    weights = [bound.arguments[name] for name in names]
    return (*(view_of(w.data) for w in weights), *(view_of(w.global_scale_decode) for w in weights))


def _plan_grouped_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], views["slots"].size, dims["I"], dims["H"]
    split, tiles = split_of(depth)
    arrays = (*_weights(bound, "w_gate", "w_up"), *(views[name] for name in ("x", "slots", "offsets", "out")))
    sizes = (experts, slots, dims["top_k"], features, depth)
    return LaunchPlan(f"grouped_gate_up_{split}", _grid(features, tiles, min(experts, slots)), (*arrays, *sizes))


def _plan_grouped_down(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], dims["S"], dims["H"], dims["I"]
    split, tiles = split_of(depth)
    arrays = (*_weights(bound, "w_down"), *(views[name] for name in ("h", "offsets", "out")))
    sizes = (experts, slots, features, depth)
    return LaunchPlan(f"grouped_down_{split}", _grid(features, tiles, min(experts, slots)), (*arrays, *sizes))


def _plan_pairwise_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    slots, features, depth = dims["M"] * dims["T"], dims["I"], dims["H"]
    split, tiles = split_of(depth)
    arrays = (*_weights(bound, "w_gate", "w_up"), *(views[name] for name in ("x", "ids", "out")))
    sizes = (dims["E"], slots, dims["T"], features, depth)
    return LaunchPlan(f"pairwise_gate_up_{split}", _grid(features, tiles, slots), (*arrays, *sizes))


def _plan_pairwise_down(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    arrays = (*_weights(bound, "w_down"), *(views[name] for name in ("h", "ids", "weights", "out")))
    sizes = (dims["E"], dims["T"], dims["H"], dims["I"])
    return LaunchPlan("pairwise_down", _grid(dims["H"], 1, dims["M"]), (*arrays, *sizes))


def _entries(form: str, pointers: int, integers: int) -> tuple[EntryPoint, ...]:
    names = (*(name for _, name, _ in _SPLITS), _ANY_K[0])
    return tuple(EntryPoint(f"{form}_{name}", ("ptr",) * pointers + ("i32",) * integers) for name in names)


_GROUPED = (*_entries("grouped_gate_up", 8, 5), *_entries("grouped_down", 5, 4))
_PAIRWISE = (*_entries("pairwise_gate_up", 7, 5), EntryPoint("pairwise_down", ("ptr",) * 6 + ("i32",) * 4))
GROUPED_GATE_UP = cuda_kernel(_FOLDER / "grouped.cu", _GROUPED, _plan_grouped_gate_up)
GROUPED_DOWN = cuda_kernel(_FOLDER / "grouped.cu", _GROUPED, _plan_grouped_down)
PAIRWISE_GATE_UP = cuda_kernel(_FOLDER / "pairwise.cu", _PAIRWISE, _plan_pairwise_gate_up)
PAIRWISE_DOWN = cuda_kernel(_FOLDER / "pairwise.cu", _PAIRWISE, _plan_pairwise_down)
