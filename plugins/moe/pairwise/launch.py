"""Launching the pairwise experts."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel
from kernel_muster.plugins._cuda.nvfp4_layout import TILE_N
from kernel_muster.plugins.moe.experts.splits import MAX_ON_AN_AXIS, entries_of, split_of, weights_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryResources
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]
(PAIRWISE_WARPS,) = constants(_FOLDER / "pairwise.cuh", "PAIRWISE_WARPS")
# By choices: so many tiles a block that all blocks fit an H200 at once (n = 2: 14.2 us against 15.9).
_PAIRWISE_REPEATS = ((8, 1), (16, 2), (24, 3), (1 << 62, 4))


def _plan_pairwise_gate_up(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, views = bound.dims, bound.views
    slots, features, depth = dims["M"] * dims["T"], dims["I"], dims["H"]
    split = split_of("gate_up", depth)
    if slots > MAX_ON_AN_AXIS:
        raise ContractError(f"{slots} choices, expected at most {MAX_ON_AN_AXIS}: launch in parts")
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
    return LaunchPlan(f"pairwise_down_{split_of('down', dims['I']).name}", grid, (*arrays, *sizes))


_PAIRWISE = (*entries_of("pairwise_gate_up", "gate_up", 7, 6), *entries_of("pairwise_down", "down", 6, 4))
PAIRWISE_GATE_UP = cuda_kernel(_FOLDER / "pairwise.cu", _PAIRWISE, _plan_pairwise_gate_up)
PAIRWISE_DOWN = cuda_kernel(_FOLDER / "pairwise.cu", _PAIRWISE, _plan_pairwise_down)
