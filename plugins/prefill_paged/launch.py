"""Launching paged prefill: the kernels of paged decode, over rows."""

from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins.paged_decode.launch import FOLDER as DECODE_FOLDER
from kernel_muster.plugins.paged_decode.launch import Entries, cache_sizes, entry_points, in_base_two, launches
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.signature import Bound

_ARRAYS = ("q", "k_cache", "v_cache", "block_table", "cu_rows", "context_lens", "out")


def _plan_prefill(bound: Bound, entries: Entries) -> tuple[LaunchPlan, ...]:
    dims = bound.dims
    tensors = tuple(bound.views[name] for name in _ARRAYS)
    numbers = (in_base_two(bound.arguments["scale"]), dims["S"], dims["L"], *cache_sizes(bound))
    return launches("prefill_paged", bound, entries, dims["M"], tensors, numbers)


PREFILL = CudaKernel(
    Path(__file__).parent / "prefill_paged.cu",
    entry_points("prefill_paged", 7, 6),
    _plan_prefill,
    include_dirs=(DECODE_FOLDER, INCLUDE_DIR),
)
