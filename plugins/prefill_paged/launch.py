"""Launching paged prefill: the kernels of paged decode over rows, and tiles of rows, by wgmma on sm_90a."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import VECTOR, ceil_div, cuda_kernel, multiprocessors_of
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
from kernel_muster.registry.arrays import HOST
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.limits import KIB, LIMITS
from kernel_muster.registry.backends.request import EntryPoint
from kernel_muster.registry.backends.workspace import Scratch
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound
from kernel_muster.registry.target import read_devices

_FOLDER = Path(__file__).parent
_ARRAYS = ("q", "k_cache", "v_cache", "block_table", "cu_rows", "context_lens", "out")
# Pairs of a row and a query head in a block, tokens of a tile (prompts.cuh), and its shared memory by head size.
_PAIRS, _TOKENS = 64, 64
_MMA = {128: 48 * 1024 + 16, 256: 96 * 1024 + 16}
_HOPPER = {128: 80 * 1024 + 16, 256: 96 * 1024 + 16}
_MOST_PIECES = 2**32 - 1
# Parts of a context, at most (parts.cuh), and tiles of tokens of one, at least.
_MOST_PARTS, _LEAST_TILES = 32, 4
# Columns that a block puts together (parts.cuh).
_COLUMNS = 32
_NO_ARRAY = 0  # a null pointer
_IMAGINARY = (9, 0)  # the compute capability that plans on host memory, which are never launched, are made for


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


@cache
def _blocks_at_once(device: int, shared_bytes: int) -> int:
    """Return how many blocks of tiles a device runs at a time: two a multiprocessor where they fit, else one."""
    capability = _IMAGINARY if device == HOST else read_devices()[device].capability
    has_room_for_two = 2 * shared_bytes + KIB <= LIMITS[capability].shared_bytes_per_block
    return multiprocessors_of(device) * (2 if has_room_for_two else 1)


def parts_of(tiles: int, longest: int, at_once: int) -> int:
    """Return into how many parts contexts of at most ``longest`` tokens are cut, so that tiles keep a device busy.

    A tile of rows is a block for each part. One part: where tiles are enough, or contexts too short.
    """
    return max(1, min(at_once // tiles, ceil_div(longest, _LEAST_TILES * _TOKENS), _MOST_PARTS)) if tiles else 1


def _plan_tiles(name: str, shared_bytes: Mapping[int, int], bound: Bound, _entries: Entries) -> tuple[LaunchPlan, ...]:
    """Return the launch over slots of 64 pairs: as many as any division of the rows among the sequences may need.

    Few of them get a part of the context each, which a second launch puts together.
    """
    dims, views = bound.dims, bound.views
    if dims["D"] not in shared_bytes:
        raise ContractError(f"{name}: head_dim is {dims['D']}, expected 128 or 256")
    pieces = max(dims["P"] * dims["B"] * dims["Hk"], dims["M"] * dims["Hq"]) * dims["D"] // VECTOR
    if pieces > _MOST_PIECES:
        raise ContractError(f"{name}: an array has {pieces} x 16 bytes, expected at most {_MOST_PIECES}")
    shared = shared_bytes[dims["D"]]
    per_key = dims["Hq"] // dims["Hk"]
    slots = ceil_div(dims["M"] * per_key, _PAIRS) + dims["S"] - 1 if dims["M"] and dims["S"] else 0
    tiles = slots * dims["Hk"]
    parts = parts_of(tiles, dims["L"] * dims["B"], _blocks_at_once(views["q"].device, shared))
    partials = Scratch(tiles * parts * _PAIRS * (dims["D"] + 2) * 4, "parts") if parts > 1 else _NO_ARRAY
    _, page_size, *heads = sizes = cache_sizes(bound)
    counts, cut = (dims["M"], dims["S"], dims["L"]), (parts, _LEAST_TILES)
    attend = LaunchPlan(
        f"{name}_d{dims['D']}",
        (tiles, parts, 1),
        (*(views[one] for one in _ARRAYS), partials, in_base_two(bound.arguments["scale"]), *counts, *sizes, *cut),
        dynamic_shared_bytes=shared,
    )
    if parts == 1:
        return (attend,)
    given = (*(views[one] for one in ("cu_rows", "context_lens", "out")), partials, *counts, page_size, *heads, *cut)
    given = (*given, dims["D"])
    return attend, LaunchPlan(f"{name}_combine", (tiles, dims["D"] // _COLUMNS, 1), given)


def _tiles(name: str, shared_bytes: Mapping[int, int]) -> CudaKernel:
    parameters = ("ptr",) * 8 + ("f32",) + ("i32",) * 9
    entries = tuple(EntryPoint(f"{name}_d{size}", parameters, shared) for size, shared in shared_bytes.items())
    combine = EntryPoint(f"{name}_combine", ("ptr",) * 4 + ("i32",) * 9)
    return cuda_kernel(_FOLDER / f"{name}.cu", (*entries, combine), partial(_plan_tiles, name, shared_bytes))


PREFILL_MMA = _tiles("prefill_mma", _MMA)
PREFILL_HOPPER = _tiles("prefill_hopper", _HOPPER)
