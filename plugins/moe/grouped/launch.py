"""Launching the grouped experts: which kernel serves a shape, and how blocks share the tiles."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.constants import constants
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
_PROJECTIONS = ("gate_up", "down")
GROUPED_WARPS = dict(zip(_PROJECTIONS, constants(_FOLDER / "grouped.cuh", "GATE_UP_WARPS", "DOWN_WARPS"), strict=True))
(_ROUND_THREADS,) = constants(_FOLDER / "atomic.cu", "CLEAR_THREADS")
# Up to this number of slots the persistent scheduler of grouped.cuh gives each block an equal range of tiles. With more
# slots, experts may have very different numbers of rows: then a block computes a few tiles of one expert. The bits are
# the same.
PERSISTENT_SLOTS = 1024
_REPEATS = {"gate_up": 4, "down": 4}
_BLOCKS_PER_MULTIPROCESSOR = dict(
    zip(_PROJECTIONS, constants(_FOLDER / "grouped.cuh", "GATE_UP_BLOCKS", "DOWN_BLOCKS"), strict=True)
)


def _groups(experts: int, slots: int) -> int:
    groups = min(experts, slots)
    if groups > MAX_ON_AN_AXIS:
        raise ContractError(f"{groups} experts may have rows, expected at most {MAX_ON_AN_AXIS}")
    return groups


@frozen
class Schedule:
    """The tile scheduler (grouped.cuh): ``repeats`` tiles of one expert for each team; 0 is the persistent one."""

    repeats: int
    grid: tuple[int, int, int]


def schedule_of(projection: str, features: int, depth: int, experts: int, slots: int, multiprocessors: int) -> Schedule:
    """Return the schedule of projection ``gate_up`` or ``down`` for N features of depth K."""
    split, tiles, groups = split_of(projection, depth), ceil_div(features, TILE_N), _groups(experts, slots)
    teams = split.teams(GROUPED_WARPS[projection])
    if slots <= PERSISTENT_SLOTS:
        most = _BLOCKS_PER_MULTIPROCESSOR[projection] * multiprocessors
        return Schedule(0, (min(most, ceil_div(tiles * groups, teams)), 1, 1))
    repeats = _REPEATS[projection]
    return Schedule(repeats, (ceil_div(tiles, teams * repeats), groups, 1))


# Projections and depths K that have a large-M kernel (grouped_large_m.cuh).
_LARGE_M_DEPTHS = {"gate_up": 2048, "down": 512}
# Its average rows of an expert from which it serves, and its warps.
_LARGE_M_ROWS, _LARGE_M_WARPS = 8, 16
# The grid should have at least this number of waves, at one block a multiprocessor.
_LARGE_M_WAVES = 4
# At most this number of blocks share the output tiles of a row tile.
_MAX_TILE_PARTS = {"gate_up": 4, "down": 8}
_MAX_SHARED = 163 * KIB  # of a block with 32 rows
# A plan on host memory, which names no device, fits the smallest shared memory of all.
_SMALLEST = (8, 6)


@cache
def _capability_of(device: int) -> tuple[int, int]:
    return _SMALLEST if device == HOST else read_devices()[device].capability


def large_m_rows(capability: tuple[int, int]) -> int:
    """Return the rows of a row tile of grouped_large_m.cuh: as many as fit shared memory."""
    return 32 if LIMITS[capability].shared_bytes_per_block >= _MAX_SHARED else 16


def _large_m_bytes(projection: str, capability: tuple[int, int]) -> int:
    return large_m_rows(capability) * (2 * _LARGE_M_DEPTHS[projection] + 16)


@frozen
class GroupedKernel(CudaKernel):
    """Grouped experts; the shared memory of their large-M kernels depends on the architecture."""

    def request(self, arch: Arch) -> BuildRequest:
        """Return the build request of an architecture."""
        asked = super().request(arch)
        large_m = {f"grouped_many_{projection}_k{depth}": projection for projection, depth in _LARGE_M_DEPTHS.items()}
        entries = (
            replace(entry, dynamic_shared_bytes=_large_m_bytes(large_m[entry.name], arch.capability))
            if entry.name in large_m
            else entry
            for entry in asked.entries
        )
        return replace(asked, entries=tuple(entries))


def is_large_m(projection: str, depth: int, experts: int, slots: int) -> bool:
    """Whether the average expert has enough rows for grouped_large_m.cuh. The bits are the same."""
    return depth == _LARGE_M_DEPTHS[projection] and slots >= _LARGE_M_ROWS * experts


def large_m_grid(
    projection: str, features: int, experts: int, slots: int, rows: int, multiprocessors: int
) -> tuple[int, int, int]:
    """Return the parts of the output tiles, and an upper bound of the row tiles of ``rows`` slots of one expert."""
    row_tiles = slots // rows + min(experts, slots)
    if row_tiles > MAX_ON_AN_AXIS:
        raise ContractError(
            f"{slots} choices make {row_tiles} row tiles, expected at most {MAX_ON_AN_AXIS}: launch in parts"
        )
    parts, likely = 1, slots // rows + min(experts, slots) // 2  # half of the experts end in a partial row tile
    while parts * 2 * _LARGE_M_WARPS * TILE_N <= features and parts * likely < _LARGE_M_WAVES * multiprocessors:
        parts *= 2
    return min(parts, _MAX_TILE_PARTS[projection]), row_tiles, 1


def _plan_large_m(
    projection: str, bound: Bound, slots: int, features: int, arguments: tuple[object, ...]
) -> LaunchPlan:
    device, experts = bound.views["offsets"].device, bound.dims["E"]
    capability = _capability_of(device)
    grid = large_m_grid(projection, features, experts, slots, large_m_rows(capability), multiprocessors_of(device))
    size = _large_m_bytes(projection, capability)
    return LaunchPlan(
        f"grouped_many_{projection}_k{_LARGE_M_DEPTHS[projection]}", grid, arguments, dynamic_shared_bytes=size
    )


def _plan_grouped_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], views["slots"].size, dims["I"], dims["H"]
    if is_large_m("gate_up", depth, experts, slots):
        given = (*weights_of(bound, "w_gate", "w_up"), *(views[name] for name in ("x", "slots", "offsets", "out")))
        return _plan_large_m("gate_up", bound, slots, features, (*given, experts, slots, dims["top_k"], features))
    schedule = schedule_of("gate_up", features, depth, experts, slots, multiprocessors_of(views["x"].device))
    arrays = tuple(views[name] for name in ("x", "slots", "offsets", "work", "out"))
    sizes = (experts, slots, dims["top_k"], features, depth, schedule.repeats)
    arguments = (*weights_of(bound, "w_gate", "w_up"), *arrays, *sizes)
    return LaunchPlan(f"grouped_gate_up_{split_of('gate_up', depth).name}", schedule.grid, arguments)


def _plan_grouped_down(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], dims["S"], dims["H"], dims["I"]
    if is_large_m("down", depth, experts, slots):
        given = (*weights_of(bound, "w_down"), *(views[name] for name in ("h", "offsets", "out")))
        return _plan_large_m("down", bound, slots, features, (*given, experts, slots, features))
    schedule = schedule_of("down", features, depth, experts, slots, multiprocessors_of(views["h"].device))
    arrays = tuple(views[name] for name in ("h", "offsets", "work", "out"))
    # Only the first wave starts before the previous kernel has ended: several waves have no speculative prologue.
    sizes = (experts, slots, features, depth, schedule.repeats, schedule.repeats == 0)
    arguments = (*weights_of(bound, "w_down"), *arrays, *sizes)
    return LaunchPlan(f"grouped_down_{split_of('down', depth).name}", schedule.grid, arguments)


def _plan_grouped_down_atomic(bound: Bound, entries: Entries) -> tuple[LaunchPlan, ...]:
    dims, views = bound.dims, bound.views
    experts, slots, features, depth = dims["E"], views["slots"].size, dims["H"], dims["I"]
    schedule = schedule_of("down", features, depth, experts, slots, multiprocessors_of(views["h"].device))
    count = dims["M"] * features
    arrays = tuple(views[name] for name in ("h", "slots", "work", "weights"))
    sizes = (experts, slots, dims["T"], features, depth, schedule.repeats, False)
    sums, blocks = Scratch(4 * count, "sums"), (ceil_div(count, _ROUND_THREADS), 1, 1)
    return (
        LaunchPlan("clear_sums", blocks, (sums, count)),
        LaunchPlan(
            f"grouped_down_atomic_{split_of('down', depth).name}",
            schedule.grid,
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
