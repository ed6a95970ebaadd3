"""Launching the experts: which split of K serves a shape, and the arguments of each form."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel
from kernel_muster.plugins._cuda.nvfp4_layout import TILE_N
from kernel_muster.registry.arrays import ArrayView, view_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.backends.workspace import Scratch
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound
from kernel_muster.registry.target import read_devices
from kernel_muster.registry.values import frozen

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]
_MOST_ON_AN_AXIS = 65535  # of a grid's second axis
_ROUND_THREADS = 256  # atomic.cu
GROUPED_WARPS, PAIRWISE_WARPS = 4, 8  # grouped.cuh, pairwise.cu


@frozen
class Split:
    """How K is summed (experts.cuh): in so many chains, by an entry point for one K or for any."""

    name: str
    chains: int

    def teams(self, warps: int) -> int:
        """Return how many tiles a block of so many warps has side by side."""
        return warps // min(self.chains, warps)


_STATIC = {512: Split("k512", 1), 2048: Split("k2048", 8)}
_UP_TO = ((512, Split("to_512", 1)), (1024, Split("to_1024", 2)))
_ANY = Split("any", 8)


def split_of(depth: int) -> Split:
    """Return the split for depth K. Never a function of the rows; the chains of one K are the same for every form."""
    if depth in _STATIC:
        return _STATIC[depth]
    return next((split for most, split in _UP_TO if depth <= most), _ANY)


def repeats_of(form: str, slots: int) -> int:
    """Return how many tiles follow each other in a team of a block, for so many slots; no bit depends on it."""
    return next(repeats for most, repeats in _REPEATS[form] if slots <= most)


# Tiles after tiles share a block's beginning and its rows of x, and leave fewer blocks to balance. Measured on an H200
# (records/): us of 256 experts, 2048 / 512, by slots.
_ALL = 1 << 62
_REPEATS = {"gate_up": ((64, 1), (_ALL, 2)), "down": ((32, 1), (_ALL, 4))}


@lru_cache
def _early_blocks(device: int) -> int:
    """Return how many blocks of the down projections fit a device at once: those that may begin early."""
    return 5 * read_devices()[device].multiprocessors


def _groups(experts: int, slots: int) -> int:
    groups = min(experts, slots)
    if groups > _MOST_ON_AN_AXIS:
        raise ContractError(f"{groups} experts may have rows, expected at most {_MOST_ON_AN_AXIS}")
    return groups


def _weights(bound: Bound, *names: str) -> tuple[ArrayView, ...]:
    """Return the data of some experts' weights, then their global scales."""
    weights = [bound.arguments[name] for name in names]
    return (*(view_of(w.data) for w in weights), *(view_of(w.global_scale_decode) for w in weights))


def _grouped_grid(form: str, features: int, split: Split, experts: int, slots: int) -> tuple[int, tuple[int, int, int]]:
    """Return the repeats of a grouped launch, and its grid."""
    repeats = repeats_of(form, slots)
    tiles = ceil_div(features, TILE_N)
    return repeats, (ceil_div(tiles, split.teams(GROUPED_WARPS) * repeats), _groups(experts, slots), 1)


def _plan_grouped_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], views["slots"].size, dims["I"], dims["H"]
    split = split_of(depth)
    repeats, grid = _grouped_grid("gate_up", features, split, experts, slots)
    arrays = tuple(views[name] for name in ("x", "slots", "offsets", "work", "out"))
    sizes = (experts, slots, dims["top_k"], features, depth, repeats)
    return LaunchPlan(f"grouped_gate_up_{split.name}", grid, (*_weights(bound, "w_gate", "w_up"), *arrays, *sizes))


def _plan_grouped_down(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], dims["S"], dims["H"], dims["I"]
    split = split_of(depth)
    repeats, grid = _grouped_grid("down", features, split, experts, slots)
    arrays = tuple(views[name] for name in ("h", "offsets", "work", "out"))
    sizes = (experts, slots, features, depth, repeats, _early_blocks(views["h"].device))
    return LaunchPlan(f"grouped_down_{split.name}", grid, (*_weights(bound, "w_down"), *arrays, *sizes))


def _plan_grouped_down_atomic(bound: Bound, entries: Entries) -> tuple[LaunchPlan, ...]:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], views["slots"].size, dims["H"], dims["I"]
    split, count = split_of(depth), dims["M"] * features
    repeats, grid = _grouped_grid("down", features, split, experts, slots)
    arrays = tuple(views[name] for name in ("h", "slots", "work", "weights"))
    sizes = (experts, slots, dims["T"], features, depth, repeats, 0)
    sums, blocks = Scratch(4 * count, "sums"), (ceil_div(count, _ROUND_THREADS), 1, 1)
    return (
        LaunchPlan("clear_sums", blocks, (sums, count)),
        LaunchPlan(f"grouped_down_atomic_{split.name}", grid, (*_weights(bound, "w_down"), *arrays, sums, *sizes)),
        LaunchPlan("round_sums", blocks, (sums, views["out"], count)),
    )


def _plan_pairwise_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    slots, features, depth = dims["M"] * dims["T"], dims["I"], dims["H"]
    split = split_of(depth)
    if slots > _MOST_ON_AN_AXIS:
        raise ContractError(f"{slots} choices, expected at most {_MOST_ON_AN_AXIS}: launch in parts")
    grid = (ceil_div(ceil_div(features, TILE_N), split.teams(PAIRWISE_WARPS)), slots, 1)
    arrays = tuple(views[name] for name in ("x", "ids", "out"))
    sizes = (dims["E"], slots, dims["T"], features, depth)
    return LaunchPlan(f"pairwise_gate_up_{split.name}", grid, (*_weights(bound, "w_gate", "w_up"), *arrays, *sizes))


def _plan_pairwise_down(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    arrays = (*_weights(bound, "w_down"), *(views[name] for name in ("h", "ids", "weights", "out")))
    sizes = (dims["E"], dims["T"], dims["H"], dims["I"])
    grid = (ceil_div(dims["H"], TILE_N), dims["M"], 1)
    return LaunchPlan(f"pairwise_down_{split_of(dims['I']).name}", grid, (*arrays, *sizes))


def _entries(form: str, pointers: int, integers: int) -> tuple[EntryPoint, ...]:
    splits = (*_STATIC.values(), *(split for _, split in _UP_TO), _ANY)
    return tuple(EntryPoint(f"{form}_{split.name}", ("ptr",) * pointers + ("i32",) * integers) for split in splits)


_GROUPED = (*_entries("grouped_gate_up", 9, 6), *_entries("grouped_down", 6, 6))
_ATOMIC = (
    *_entries("grouped_down_atomic", 7, 7),
    EntryPoint("clear_sums", ("ptr", "i32")),
    EntryPoint("round_sums", ("ptr", "ptr", "i32")),
)
_PAIRWISE = (*_entries("pairwise_gate_up", 7, 5), *_entries("pairwise_down", 6, 4))
GROUPED_GATE_UP = cuda_kernel(_FOLDER / "grouped.cu", _GROUPED, _plan_grouped_gate_up)
GROUPED_DOWN = cuda_kernel(_FOLDER / "grouped.cu", _GROUPED, _plan_grouped_down)
GROUPED_DOWN_ATOMIC = cuda_kernel(_FOLDER / "atomic.cu", _ATOMIC, _plan_grouped_down_atomic)
PAIRWISE_GATE_UP = cuda_kernel(_FOLDER / "pairwise.cu", _PAIRWISE, _plan_pairwise_gate_up)
PAIRWISE_DOWN = cuda_kernel(_FOLDER / "pairwise.cu", _PAIRWISE, _plan_pairwise_down)
