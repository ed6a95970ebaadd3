"""Launching paged prefill: the kernels of paged decode, over rows."""

from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins.paged_decode.launch import FOLDER as DECODE_FOLDER
from kernel_muster.plugins.paged_decode.launch import Entries, attention_plan, entry_points, in_base_two
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.signature import Bound

_ARRAYS = ("q", "k_cache", "v_cache", "block_table", "cu_rows", "context_lens", "out")


def _plan_prefill(bound: Bound, entries: Entries) -> LaunchPlan:
    views = (bound.views[name] for name in _ARRAYS)
    sizes = (bound.dims["S"], bound.dims["L"])
    arguments = (*views, in_base_two(bound.arguments["scale"]), *sizes)
    return attention_plan(entries, "prefill_paged", bound, bound.dims["M"], arguments)


PREFILL = CudaKernel(
    Path(__file__).parent / "prefill_paged.cu",
    entry_points("prefill_paged", ("ptr",) * 7 + ("f32",) + ("i32",) * 6),
    _plan_prefill,
    include_dirs=(DECODE_FOLDER, INCLUDE_DIR),
)
