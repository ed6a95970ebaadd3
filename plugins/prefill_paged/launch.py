"""Launching paged prefill: the kernels of paged decode, over rows."""

from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins.paged_decode.launch import FOLDER as DECODE_FOLDER
from kernel_muster.plugins.paged_decode.launch import (
    HEAD_DIMS,
    Entries,
    cache_sizes,
    head_entry,
    in_base_two,
    ranks_of,
    teams_of,
)
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint
from kernel_muster.registry.signature import Bound

_ARRAYS = ("q", "k_cache", "v_cache", "block_table", "cu_rows", "context_lens", "out")


def _plan_prefill(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, entry = bound.dims, head_entry("prefill_paged", bound)
    tensors = (bound.views[name] for name in _ARRAYS)
    sizes = (dims["S"], dims["L"], *cache_sizes(bound))
    arguments = (*tensors, in_base_two(bound.arguments["scale"]), *sizes)
    if entry.endswith("_any"):
        return LaunchPlan(entry, (dims["M"] * dims["Hq"], 1, 1), (*arguments, dims["D"]))
    teams = teams_of(bound, dims["M"])
    return LaunchPlan(entry, (teams * ranks_of(entries, entry), 1, 1), (*arguments, teams))


PREFILL = CudaKernel(
    Path(__file__).parent / "prefill_paged.cu",
    # The last parameter is the number of teams, or, where any head size is taken, that size.
    tuple(
        EntryPoint(f"prefill_paged_{size}", ("ptr",) * 7 + ("f32",) + ("i32",) * 7)
        for size in (*(f"d{head_dim}" for head_dim in HEAD_DIMS), "any")
    ),
    _plan_prefill,
    include_dirs=(DECODE_FOLDER, INCLUDE_DIR),
)
