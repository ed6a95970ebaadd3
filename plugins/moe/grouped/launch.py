"""Launching the grouped experts: which kernel serves a shape, and how blocks share the tiles."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, multiprocessors_of
from kernel_muster.plugins._cuda.nvfp4_layout import TILE_N
from kernel_muster.plugins.moe.experts.splits import MAX_ON_AN_AXIS, entries_of, split_of, weights_of
from kernel_muster.registry.backends.cubin.limits import KIB, LIMITS
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import BuildRequest, EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import HOST
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.hardware.target import read_devices
from kernel_muster.registry.launch.workspace import Scratch
from kernel_muster.registry.values import frozen

_FOLDER = Path(__file__).parent


Entries = Mapping[str, EntryResources]


GROUPED_WARPS = {"gate_up": 8, "down": 4}  # grouped.cuh


_ROUND_THREADS = 256  # atomic.cu


# Up to so many slots all tiles are shared out equally among as many blocks as fit the device. More slots may give
# experts very different numbers of rows: then each block has few tiles of one expert. No bit depends on it.
FEW_SLOTS = 1024


_REPEATS = {"gate_up": 4, "down": 4}


_BLOCKS_PER_MULTIPROCESSOR = {"gate_up": 2, "down": 4}  # grouped.cuh


def _groups(experts: int, slots: int) -> int:
    groups = min(experts, slots)
    if groups > MAX_ON_AN_AXIS:
        raise ContractError(f"{groups} experts may have rows, expected at most {MAX_ON_AN_AXIS}")
    return groups


@frozen
class Shares:
    """How tiles are shared out (grouped.cuh): ``repeats`` tiles of one expert a team, or with 0 equal shares."""

    repeats: int
    grid: tuple[int, int, int]


def shares_of(form: str, features: int, depth: int, experts: int, slots: int, multiprocessors: int) -> Shares:
    """Return the shares of ``gate_up`` or ``down`` for so many features of a depth."""
    split, tiles, groups = split_of(form, depth), ceil_div(features, TILE_N), _groups(experts, slots)
    teams = split.teams(GROUPED_WARPS[form])
    if slots <= FEW_SLOTS:
        most = _BLOCKS_PER_MULTIPROCESSOR[form] * multiprocessors
        return Shares(0, (min(most, ceil_div(tiles * groups, teams)), 1, 1))
    repeats = _REPEATS[form]
    return Shares(repeats, (ceil_div(tiles, teams * repeats), groups, 1))


# Where experts have many rows, tiles are multiplied by many of them at once (grouped_many.cuh), for one depth of each.
_MANY = {"gate_up": 2048, "down": 512}


_MANY_ROWS_AN_EXPERT, _MANY_WARPS = 8, 16


# Waves of blocks that a device should have at least, of one block a multiprocessor.
_MANY_WAVES = 4


_MAX_SLICES = {"gate_up": 4, "down": 8}


_MAX_SHARED = 163 * KIB


# What a plan on host memory, for no device that anybody named, is made for: it fits them all.
_SMALLEST = (8, 6)


@cache
def _capability_of(device: int) -> tuple[int, int]:
    return _SMALLEST if device == HOST else read_devices()[device].capability


def many_rows(capability: tuple[int, int]) -> int:
    """Return how many rows a block of grouped_many.cuh has in shared memory."""
    return 32 if LIMITS[capability].shared_bytes_per_block >= _MAX_SHARED else 16


def _many_bytes(form: str, capability: tuple[int, int]) -> int:
    return many_rows(capability) * (2 * _MANY[form] + 16)


@frozen
class GroupedKernel(CudaKernel):
    """Grouped experts, whose blocks of many rows have what shared memory an architecture has for them."""

    def request(self, arch: Arch) -> BuildRequest:
        """Return what must be built for an architecture."""
        asked = super().request(arch)
        many = {f"grouped_many_{form}_k{depth}": form for form, depth in _MANY.items()}
        entries = (
            replace(entry, dynamic_shared_bytes=_many_bytes(many[entry.name], arch.capability))
            if entry.name in many
            else entry
            for entry in asked.entries
        )
        return replace(asked, entries=tuple(entries))


def has_many(form: str, depth: int, experts: int, slots: int) -> bool:
    """Whether experts have so many rows on average that grouped_many.cuh serves them; no bit depends on it."""
    return depth == _MANY[form] and slots >= _MANY_ROWS_AN_EXPERT * experts


def many_grid(
    form: str, features: int, experts: int, slots: int, rows: int, multiprocessors: int
) -> tuple[int, int, int]:
    """Return the slices of tiles, and as many parts of up to ``rows`` slots of one expert as there may be."""
    parts = slots // rows + min(experts, slots)
    if parts > MAX_ON_AN_AXIS:
        raise ContractError(f"{slots} choices make {parts} parts, expected at most {MAX_ON_AN_AXIS}: launch in parts")
    slices, likely = 1, slots // rows + min(experts, slots) // 2  # half of the last parts of experts are none
    while slices * 2 * _MANY_WARPS * TILE_N <= features and slices * likely < _MANY_WAVES * multiprocessors:
        slices *= 2
    return min(slices, _MAX_SLICES[form]), parts, 1


def _plan_many(form: str, bound: Bound, slots: int, features: int, arguments: tuple[object, ...]) -> LaunchPlan:
    device, experts = bound.views["offsets"].device, bound.dims["E"]
    capability = _capability_of(device)
    grid = many_grid(form, features, experts, slots, many_rows(capability), multiprocessors_of(device))
    size = _many_bytes(form, capability)
    return LaunchPlan(f"grouped_many_{form}_k{_MANY[form]}", grid, arguments, dynamic_shared_bytes=size)


def _plan_grouped_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], views["slots"].size, dims["I"], dims["H"]
    if has_many("gate_up", depth, experts, slots):
        given = (*weights_of(bound, "w_gate", "w_up"), *(views[name] for name in ("x", "slots", "offsets", "out")))
        return _plan_many("gate_up", bound, slots, features, (*given, experts, slots, dims["top_k"], features))
    shares = shares_of("gate_up", features, depth, experts, slots, multiprocessors_of(views["x"].device))
    arrays = tuple(views[name] for name in ("x", "slots", "offsets", "work", "out"))
    sizes = (experts, slots, dims["top_k"], features, depth, shares.repeats)
    arguments = (*weights_of(bound, "w_gate", "w_up"), *arrays, *sizes)
    return LaunchPlan(f"grouped_gate_up_{split_of('gate_up', depth).name}", shares.grid, arguments)


def _plan_grouped_down(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], dims["S"], dims["H"], dims["I"]
    if has_many("down", depth, experts, slots):
        given = (*weights_of(bound, "w_down"), *(views[name] for name in ("h", "offsets", "out")))
        return _plan_many("down", bound, slots, features, (*given, experts, slots, features))
    shares = shares_of("down", features, depth, experts, slots, multiprocessors_of(views["h"].device))
    arrays = tuple(views[name] for name in ("h", "offsets", "work", "out"))
    # Where blocks come one after the other, most begin when the launch before has ended.
    sizes = (experts, slots, features, depth, shares.repeats, shares.repeats == 0)
    arguments = (*weights_of(bound, "w_down"), *arrays, *sizes)
    return LaunchPlan(f"grouped_down_{split_of('down', depth).name}", shares.grid, arguments)


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
            f"grouped_down_atomic_{split_of('down', depth).name}",
            shares.grid,
            (*weights_of(bound, "w_down"), *arrays, sums, *sizes),
        ),
        LaunchPlan("round_sums", blocks, (sums, views["out"], count)),
    )


_GROUPED = (
    *entries_of("grouped_gate_up", "gate_up", 9, 6),
    *entries_of("grouped_down", "down", 6, 6),
    EntryPoint("grouped_many_gate_up_k2048", ("ptr",) * 8 + ("i32",) * 4),
    EntryPoint("grouped_many_down_k512", ("ptr",) * 5 + ("i32",) * 3),
)


_ATOMIC = (
    *entries_of("grouped_down_atomic", "down", 7, 7),
    EntryPoint("clear_sums", ("ptr", "i32")),
    EntryPoint("round_sums", ("ptr", "ptr", "i32")),
)


GROUPED_GATE_UP, GROUPED_DOWN = (
    GroupedKernel(_FOLDER / "grouped.cu", _GROUPED, planner, include_dirs=(INCLUDE_DIR,))
    for planner in (_plan_grouped_gate_up, _plan_grouped_down)
)


GROUPED_DOWN_ATOMIC = cuda_kernel(_FOLDER / "atomic.cu", _ATOMIC, _plan_grouped_down_atomic)
