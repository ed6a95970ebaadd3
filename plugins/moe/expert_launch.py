"""Launching the experts: which split of K serves a shape, and the arguments of each form."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, multiprocessors_of
from kernel_muster.plugins._cuda.nvfp4_layout import TILE_N
from kernel_muster.registry.arrays import ArrayView, view_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.backends.workspace import Scratch
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound
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
SPLITS = (*_STATIC.values(), *(split for _, split in _UP_TO), _ANY)  # experts.cuh


def split_of(depth: int) -> Split:
    """Return the split for depth K. Never a function of the rows; the chains of one K are the same for every form."""
    if depth in _STATIC:
        return _STATIC[depth]
    return next((split for most, split in _UP_TO if depth <= most), _ANY)


# Up to so many slots all tiles are shared out equally among as many blocks as fit the device. More slots may give
# experts very different numbers of rows: then each block has few tiles of one expert. No bit depends on it.
FEW_SLOTS = 1024
_REPEATS = {"gate_up": 2, "down": 4}
_BLOCKS_A_MULTIPROCESSOR = 4  # grouped.cuh
# Two tokens and more: a block has two tiles, so that all blocks fit an H200 at once (n = 2: 14.2 us against 15.9).
_PAIRWISE_REPEATS = ((8, 1), (1 << 62, 2))


def _groups(experts: int, slots: int) -> int:
    groups = min(experts, slots)
    if groups > _MOST_ON_AN_AXIS:
        raise ContractError(f"{groups} experts may have rows, expected at most {_MOST_ON_AN_AXIS}")
    return groups


def weights_of(bound: Bound, *names: str) -> tuple[ArrayView, ...]:
    """Return the data of some experts' weights, then their global scales."""
    weights = [bound.arguments[name] for name in names]
    return (*(view_of(w.data) for w in weights), *(view_of(w.global_scale_decode) for w in weights))


@frozen
class Shares:
    """How tiles are shared out (grouped.cuh): ``repeats`` tiles of one expert a team, or with 0 equal shares."""

    repeats: int
    grid: tuple[int, int, int]


def shares_of(form: str, features: int, depth: int, experts: int, slots: int, multiprocessors: int) -> Shares:
    """Return the shares of ``gate_up`` or ``down`` for so many features of a depth."""
    split, tiles, groups = split_of(depth), ceil_div(features, TILE_N), _groups(experts, slots)
    teams = split.teams(GROUPED_WARPS)
    if slots <= FEW_SLOTS:
        most = _BLOCKS_A_MULTIPROCESSOR * multiprocessors
        return Shares(0, (min(most, ceil_div(tiles * groups, teams)), 1, 1))
    repeats = _REPEATS[form]
    return Shares(repeats, (ceil_div(tiles, teams * repeats), groups, 1))


def _plan_grouped_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], views["slots"].size, dims["I"], dims["H"]
    shares = shares_of("gate_up", features, depth, experts, slots, multiprocessors_of(views["x"].device))
    arrays = tuple(views[name] for name in ("x", "slots", "offsets", "work", "out"))
    sizes = (experts, slots, dims["top_k"], features, depth, shares.repeats)
    arguments = (*weights_of(bound, "w_gate", "w_up"), *arrays, *sizes)
    return LaunchPlan(f"grouped_gate_up_{split_of(depth).name}", shares.grid, arguments)


def _plan_grouped_down(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], dims["S"], dims["H"], dims["I"]
    shares = shares_of("down", features, depth, experts, slots, multiprocessors_of(views["h"].device))
    arrays = tuple(views[name] for name in ("h", "offsets", "work", "out"))
    # Where blocks come one after the other, most begin when the launch before has ended.
    sizes = (experts, slots, features, depth, shares.repeats, shares.repeats == 0)
    arguments = (*weights_of(bound, "w_down"), *arrays, *sizes)
    return LaunchPlan(f"grouped_down_{split_of(depth).name}", shares.grid, arguments)


def _plan_grouped_down_atomic(bound: Bound, entries: Entries) -> tuple[LaunchPlan, ...]:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], views["slots"].size, dims["H"], dims["I"]
    shares = shares_of("down", features, depth, experts, slots, multiprocessors_of(views["h"].device))
    count = dims["M"] * features
    arrays = tuple(views[name] for name in ("h", "slots", "work", "weights"))
    sizes = (experts, slots, dims["T"], features, depth, shares.repeats, False)
    sums, blocks = Scratch(4 * count, "sums"), (ceil_div(count, _ROUND_THREADS), 1, 1)
    return (
        LaunchPlan("clear_sums", blocks, (sums, count)),
        LaunchPlan(
            f"grouped_down_atomic_{split_of(depth).name}",
            shares.grid,
            (*weights_of(bound, "w_down"), *arrays, sums, *sizes),
        ),
        LaunchPlan("round_sums", blocks, (sums, views["out"], count)),
    )


def _plan_pairwise_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    slots, features, depth = dims["M"] * dims["T"], dims["I"], dims["H"]
    split = split_of(depth)
    if slots > _MOST_ON_AN_AXIS:
        raise ContractError(f"{slots} choices, expected at most {_MOST_ON_AN_AXIS}: launch in parts")
    repeats = next(repeats for most, repeats in _PAIRWISE_REPEATS if slots <= most)
    grid = (ceil_div(ceil_div(features, TILE_N), split.teams(PAIRWISE_WARPS) * repeats), slots, 1)
    arrays = tuple(views[name] for name in ("x", "ids", "out"))
    sizes = (dims["E"], slots, dims["T"], features, depth, repeats)
    return LaunchPlan(f"pairwise_gate_up_{split.name}", grid, (*weights_of(bound, "w_gate", "w_up"), *arrays, *sizes))


def _plan_pairwise_down(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    arrays = (*weights_of(bound, "w_down"), *(views[name] for name in ("h", "ids", "weights", "out")))
    sizes = (dims["E"], dims["T"], dims["H"], dims["I"])
    grid = (ceil_div(dims["H"], TILE_N), dims["M"], 1)
    return LaunchPlan(f"pairwise_down_{split_of(dims['I']).name}", grid, (*arrays, *sizes))


def _entries(form: str, pointers: int, integers: int) -> tuple[EntryPoint, ...]:
    return tuple(EntryPoint(f"{form}_{split.name}", ("ptr",) * pointers + ("i32",) * integers) for split in SPLITS)


_GROUPED = (*_entries("grouped_gate_up", 9, 6), *_entries("grouped_down", 6, 6))
_ATOMIC = (
    *_entries("grouped_down_atomic", 7, 7),
    EntryPoint("clear_sums", ("ptr", "i32")),
    EntryPoint("round_sums", ("ptr", "ptr", "i32")),
)
_PAIRWISE = (*_entries("pairwise_gate_up", 7, 6), *_entries("pairwise_down", 6, 4))
GROUPED_GATE_UP = cuda_kernel(_FOLDER / "grouped.cu", _GROUPED, _plan_grouped_gate_up)
GROUPED_DOWN = cuda_kernel(_FOLDER / "grouped.cu", _GROUPED, _plan_grouped_down)
GROUPED_DOWN_ATOMIC = cuda_kernel(_FOLDER / "atomic.cu", _ATOMIC, _plan_grouped_down_atomic)
PAIRWISE_GATE_UP = cuda_kernel(_FOLDER / "pairwise.cu", _PAIRWISE, _plan_pairwise_gate_up)
PAIRWISE_DOWN = cuda_kernel(_FOLDER / "pairwise.cu", _PAIRWISE, _plan_pairwise_down)
