"""Launching paged prefill: the kernels of paged decode over rows, and tiles of rows, by wgmma on sm_90a."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import VECTOR, cuda_kernel
from kernel_muster.plugins.paged_decode.launch import FOLDER as DECODE_FOLDER
from kernel_muster.plugins.paged_decode.launch import (
    AttentionKernel,
    Entries,
    cache_sizes,
    entry_points,
    in_base_two,
    launches,
    paged_sizes,
)
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound

_FOLDER = Path(__file__).parent
_ARRAYS = ("q", "k_cache", "v_cache", "block_table", "cu_rows", "context_lens", "out")
# Pairs of a row and a query head in a block (prompts.cuh), and its shared memory by head size.
_PAIRS = 64
_MMA = {128: 48 * 1024 + 16, 256: 96 * 1024 + 16}
_HOPPER = {128: 80 * 1024 + 16, 256: 96 * 1024 + 16}
_MOST_PIECES = 2**32 - 1


def _plan_prefill(bound: Bound, _entries: Entries) -> tuple[LaunchPlan, ...]:
    dims = bound.dims
    tensors = tuple(bound.views[name] for name in _ARRAYS)
    numbers = (in_base_two(bound.arguments["scale"]), dims["S"], dims["L"], *paged_sizes(bound))
    return launches("prefill_paged", bound, dims["M"], tensors, numbers)


PREFILL = AttentionKernel(
    _FOLDER / "prefill_paged.cu",
    entry_points("prefill_paged", 7, 2),
    _plan_prefill,
    include_dirs=(DECODE_FOLDER, INCLUDE_DIR),
)


def _plan_tiles(name: str, shared_bytes: Mapping[int, int], bound: Bound, _entries: Entries) -> LaunchPlan:
    """Return the launch over slots of 64 pairs: as many as any division of the rows among the sequences may need."""
    dims = bound.dims
    if dims["D"] not in shared_bytes:
        raise ContractError(f"{name}: head_dim is {dims['D']}, expected 128 or 256")
    pieces = max(dims["P"] * dims["B"] * dims["Hk"], dims["M"] * dims["Hq"]) * dims["D"] // VECTOR
    if pieces > _MOST_PIECES:
        raise ContractError(f"{name}: an array has {pieces} x 16 bytes, expected at most {_MOST_PIECES}")
    per_key = dims["Hq"] // dims["Hk"]
    slots = dims["M"] * per_key // _PAIRS + dims["S"] if dims["M"] else 0
    arguments = (*(bound.views[name] for name in _ARRAYS), in_base_two(bound.arguments["scale"]), dims["M"], dims["S"])
    return LaunchPlan(
        f"{name}_d{dims['D']}",
        (slots * dims["Hk"], 1, 1),
        (*arguments, dims["L"], *cache_sizes(bound)),
        dynamic_shared_bytes=shared_bytes[dims["D"]],
    )


def _tiles(name: str, shared_bytes: Mapping[int, int]) -> CudaKernel:
    parameters = ("ptr",) * 7 + ("f32",) + ("i32",) * 7
    entries = tuple(EntryPoint(f"{name}_d{size}", parameters, shared) for size, shared in shared_bytes.items())
    return cuda_kernel(_FOLDER / f"{name}.cu", entries, partial(_plan_tiles, name, shared_bytes))


PREFILL_MMA = _tiles("prefill_mma", _MMA)
PREFILL_HOPPER = _tiles("prefill_hopper", _HOPPER)
