"""Launching paged prefill: the kernels of paged decode over rows, and tiles of rows."""

from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import VECTOR, cuda_kernel
from kernel_muster.plugins.paged_decode.launch import FOLDER as DECODE_FOLDER
from kernel_muster.plugins.paged_decode.launch import Entries, cache_sizes, entry_points, in_base_two, launches
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound

_FOLDER = Path(__file__).parent
_ARRAYS = ("q", "k_cache", "v_cache", "block_table", "cu_rows", "context_lens", "out")
# prefill_mma.cu: pairs of a row and a query head in a block, and the shared memory of a block by head size.
_PAIRS = 64
_SHARED_BYTES = {128: 48 * 1024, 256: 96 * 1024}
_MOST_PIECES = 2**32 - 1


def _plan_prefill(bound: Bound, entries: Entries) -> tuple[LaunchPlan, ...]:
    dims = bound.dims
    tensors = tuple(bound.views[name] for name in _ARRAYS)
    numbers = (in_base_two(bound.arguments["scale"]), dims["S"], dims["L"], *cache_sizes(bound))
    return launches("prefill_paged", bound, entries, dims["M"], tensors, numbers)


PREFILL = CudaKernel(
    _FOLDER / "prefill_paged.cu",
    entry_points("prefill_paged", 7, 6),
    _plan_prefill,
    include_dirs=(DECODE_FOLDER, INCLUDE_DIR),
)


def _plan_mma(bound: Bound, _entries: Entries) -> LaunchPlan:
    """Return the launch over slots of 64 pairs: as many as any division of the rows among the sequences may need."""
    dims = bound.dims
    if dims["D"] not in _SHARED_BYTES:
        raise ContractError(f"prefill_mma: head_dim is {dims['D']}, expected 128 or 256")
    pieces = max(dims["P"] * dims["B"] * dims["Hk"], dims["M"] * dims["Hq"]) * dims["D"] // VECTOR
    if pieces > _MOST_PIECES:
        raise ContractError(f"prefill_mma: an array has {pieces} x 16 bytes, expected at most {_MOST_PIECES}")
    per_key = dims["Hq"] // dims["Hk"]
    slots = dims["M"] * per_key // _PAIRS + dims["S"] if dims["M"] else 0
    arguments = (*(bound.views[name] for name in _ARRAYS), in_base_two(bound.arguments["scale"]), dims["M"], dims["S"])
    return LaunchPlan(
        f"prefill_mma_d{dims['D']}",
        (slots * dims["Hk"], 1, 1),
        (*arguments, dims["L"], *cache_sizes(bound)),
        dynamic_shared_bytes=_SHARED_BYTES[dims["D"]],
    )


PREFILL_MMA = cuda_kernel(
    _FOLDER / "prefill_mma.cu",
    tuple(
        EntryPoint(f"prefill_mma_d{head_dim}", ("ptr",) * 7 + ("f32",) + ("i32",) * 7, dynamic_shared_bytes=shared)
        for head_dim, shared in _SHARED_BYTES.items()
    ),
    _plan_mma,
)
