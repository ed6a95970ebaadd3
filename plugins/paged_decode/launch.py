"""Launching paged attention: split-KV over blocks, and a simple kernel for uncommon head sizes."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.launching import VECTOR, ceil_div
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import BuildRequest, EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import HOST
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.hardware.target import read_devices
from kernel_muster.registry.launch.workspace import Counters, Scratch
from kernel_muster.registry.values import frozen

FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]

#: Head sizes of the tensor-core kernel, and the largest of the simple one (any_size.cuh).
HEAD_DIMS = (64, 128, 256)
LARGEST_HEAD_DIM = 1024
(_HEADS_PER_BLOCK,) = constants(FOLDER / "paged_cache.cuh", "HEADS_PER_BLOCK")
_MAX_ROWS, _MAX_VECTORS = 2**31 - 1, 2**32 - 1
_NO_ARRAY = 0  # a null pointer
# The fewest tokens of a KV split, the splits of a group, and the most groups.
_MIN_SPLIT_TOKENS, _GROUP_SPLITS, _MAX_GROUPS = constants(
    FOLDER / "split_kv.cuh", "MIN_SPLIT_TOKENS", "GROUP_SPLITS", "MAX_GROUPS"
)
# The most splits of a key head, and of all key heads of a row together.
_MAX_SPLITS, _MAX_ROW_SPLITS = _GROUP_SPLITS * _MAX_GROUPS, 128
# Up to so many blocks have a split each. With more, a block has a group of splits. Partials take 10 KB a split.
_SPLIT_KV_BLOCKS = 256
# So many blocks fill a device. With fewer rows, several blocks share one.
_ENOUGH_BLOCKS = 528
# The shared memory of a block for tiles, with three tiles a warp and with two, and for everything else
# (attention_tiles.cuh).
_TILES_BYTES, _FEWER_TILES_BYTES = 96 * 1024, 64 * 1024
(_OTHER_BYTES,) = constants(FOLDER / "attention_tiles.cuh", "OTHER_BYTES")
_SMALLEST = (8, 0)
# split_kv.cuh: bytes of the partials of a split, for one column, and the columns that a warp combines.
_PARTIAL_BYTES, _COLUMNS = 40, 8
# split_kv.cuh: the buffer of partials has room for a multiple of so many splits.
_PARTIAL_SPLITS = 16


def _shared_bytes(capability: tuple[int, int]) -> int:
    """Return the shared memory of a block."""
    return _OTHER_BYTES + (_TILES_BYTES if capability[0] in (9, 10) else _FEWER_TILES_BYTES)


@cache
def _capability_of(device: int) -> tuple[int, int]:
    return _SMALLEST if device == HOST else read_devices()[device].capability


@frozen
class AttentionKernel(CudaKernel):
    """A kernel with half of an architecture's shared memory for each block."""

    def request(self, arch: Arch) -> BuildRequest:
        """Return the build request of an architecture."""
        asked = super().request(arch)
        shared = _shared_bytes(arch.capability)
        entries = (
            entry if entry.name.endswith("_any") else replace(entry, dynamic_shared_bytes=shared)
            for entry in asked.entries
        )  # fmt: skip
        return replace(asked, entries=tuple(entries))


def head_entry(name: str, bound: Bound) -> str:
    """Return the entry point for a head size; ContractError for sizes that no kernel takes."""
    dims = bound.dims
    if dims["D"] > LARGEST_HEAD_DIM:
        raise ContractError(f"attention: head_dim is {dims['D']}, expected at most {LARGEST_HEAD_DIM}")
    if dims["P"] * dims["B"] > _MAX_ROWS:
        raise ContractError(f"attention: the cache has {dims['P'] * dims['B']} tokens, expected at most {_MAX_ROWS}")
    return f"{name}_d{dims['D']}" if dims["D"] in HEAD_DIMS else f"{name}_any"


def cache_sizes(bound: Bound) -> tuple[int, ...]:
    """Return pages, page size, key heads, and query heads a key head."""
    dims = bound.dims
    return (dims["P"], dims["B"], dims["Hk"], dims["Hq"] // dims["Hk"])


def division_by(page_size: int) -> tuple[int, int]:
    """Return ``(factor, shift)``: ``n * factor >> shift`` is ``n // page_size`` for every n below 2^31."""
    shift = 31 + max(page_size - 1, 0).bit_length()
    return (ceil_div(1 << shift, page_size), shift) if page_size else (0, 0)


def paged_sizes(bound: Bound) -> tuple[int, ...]:
    """Return pages, page size and how to divide by it, key heads, and query heads a key head."""
    pages, page_size, *heads = cache_sizes(bound)
    return (pages, page_size, *division_by(page_size), *heads)


def in_base_two(scale: float) -> float:
    """Return a scale of scores for powers of two."""
    return float(scale) * math.log2(math.e)


def max_splits(heads_per_row: int) -> int:
    """Return the most KV splits of a context. It depends on the heads only, so that all launches split alike."""
    return min(_MAX_SPLITS, max(1, _MAX_ROW_SPLITS // heads_per_row))


@frozen
class SplitPlan:
    """The blocks of a row and key head: one for each KV split, or several with groups of splits."""

    is_split_kv: bool
    blocks: int


def split_plan(heads: int, longest: int, most: int) -> SplitPlan:
    """Return the blocks for rows with at most ``longest`` tokens and so many key heads. No bit depends on it."""
    splits = max(1, min(most, ceil_div(longest, _MIN_SPLIT_TOKENS)))
    # With few splits a block ends soon, and combining partials of many rows takes longer.
    if 1 < splits <= min(_SPLIT_KV_BLOCKS, 2 ** (2 * splits - 1)) // heads:
        return SplitPlan(True, splits)
    return SplitPlan(False, min(ceil_div(splits, _GROUP_SPLITS), ceil_div(_ENOUGH_BLOCKS, heads)))


def combining_blocks(head_dim: int, splits: int) -> int:
    """Return the blocks that combine the splits of a row and key head: one to eight warps for 8 columns."""
    of_block = 8 if head_dim >= 128 else 4
    warps = next(count for count in (1, 2, 4, 8) if splits <= count * (_MAX_SPLITS // of_block))
    return head_dim // _COLUMNS * warps // of_block


def _shared_launch(
    name: str, bound: Bound, rows: int, tensors: tuple[object, ...], numbers: tuple[object, ...]
) -> LaunchPlan:
    """Return the launch of blocks with a split or with groups of splits, and the memory for their partials."""
    dims = bound.dims
    vectors = dims["P"] * dims["B"] * dims["Hk"] * dims["D"] // VECTOR
    if vectors > _MAX_VECTORS:
        raise ContractError(f"attention: the cache has {vectors} x 16 bytes, expected at most {_MAX_VECTORS}")
    heads_per_row = dims["Hk"] * ceil_div(dims["Hq"] // dims["Hk"], _HEADS_PER_BLOCK)
    heads, most = rows * heads_per_row, max_splits(heads_per_row)
    plan = split_plan(heads, dims["L"] * dims["B"], most)
    workspace: tuple[object, ...] = (_NO_ARRAY, _NO_ARRAY)
    if plan.is_split_kv:
        splits = ceil_div(plan.blocks, _PARTIAL_SPLITS) * _PARTIAL_SPLITS
        workspace = _NO_ARRAY, Counters(heads * splits * _PARTIAL_BYTES * dims["D"], "partials")
    elif plan.blocks > 1:
        group_bytes = 4 * _HEADS_PER_BLOCK * (dims["D"] + 2)
        workspace = (
            Scratch(heads * ceil_div(most, _GROUP_SPLITS) * group_bytes, "groups"),
            Counters(4 * heads, "counts"),
        )
    combining = combining_blocks(dims["D"], plan.blocks) if plan.is_split_kv else 0
    return LaunchPlan(
        f"{name}_split_kv_d{dims['D']}" if plan.is_split_kv else f"{name}_d{dims['D']}",
        (rows, heads_per_row, plan.blocks + combining),
        (*tensors, *workspace, *numbers, plan.blocks, most),
        dynamic_shared_bytes=_shared_bytes(_capability_of(bound.views["q"].device)),
    )


_SIZES = ("i32", "i32", "u32", "i32", "i32", "i32")  # of paged_sizes


def _shared_entries(name: str, parameters: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    variants = name, f"{name}_split_kv"
    return tuple(EntryPoint(f"{variant}_d{head_dim}", parameters) for head_dim in HEAD_DIMS for variant in variants)


_TENSORS = ("q", "k_cache", "v_cache", "block_table", "cu_rows", "context_lens", "gate", "out")
_NUMBERS = ("f32", "i32", "i32", *_SIZES)


def _plan_rows(bound: Bound, _entries: Entries) -> tuple[LaunchPlan, ...]:
    """Return the launch for rows that are a sequence each, or those of ``cu_rows``.

    The blocks of a row and key head have eight of its query heads.
    """
    views, dims = bound.views, bound.dims
    rows = dims.get("M", dims["S"])
    entry = head_entry("paged_decode", bound)
    if rows * dims["Hq"] == 0:
        return ()
    tensors = tuple(views.get(name, _NO_ARRAY) for name in _TENSORS)
    numbers = (in_base_two(bound.arguments["scale"]), dims["S"], dims["L"], *paged_sizes(bound))
    if entry.endswith("_any"):
        return (LaunchPlan(entry, (rows * dims["Hq"], 1, 1), (*tensors, *numbers, dims["D"])),)
    return (_shared_launch("paged_decode", bound, rows, tensors, numbers),)


#: For each head size a kernel with a split a block and one with groups of splits. One kernel for any head size.
ROWS = AttentionKernel(
    FOLDER / "paged_decode.cu",
    (
        *_shared_entries("paged_decode", ("ptr",) * (len(_TENSORS) + 2) + (*_NUMBERS, "i32", "i32")),
        EntryPoint("paged_decode_any", ("ptr",) * len(_TENSORS) + (*_NUMBERS, "i32")),
    ),
    _plan_rows,
    include_dirs=(INCLUDE_DIR,),
)


_FRESH_TENSORS = (
    "q", "k", "v", "q_weight", "k_weight", "positions", "slots", "k_cache", "v_cache", "block_table", "context_lens",
    "gate", "out",
)  # fmt: skip


def _plan_fresh(bound: Bound, _entries: Entries) -> tuple[LaunchPlan, ...]:
    views, arguments, dims = bound.views, bound.arguments, bound.dims
    if head_entry("paged_decode_fresh", bound).endswith("_any"):
        raise ContractError(f"paged_decode_fresh: head_dim is {dims['D']}, expected one of {HEAD_DIMS}")
    if dims["S"] == 0:
        return ()
    half = dims["rotary_dim"] // 2
    scalars = (in_base_two(arguments["scale"]), arguments["eps"], arguments["weight_offset"])
    numbers = (*scalars, math.log2(arguments["theta"]) / half, half, dims["L"], *paged_sizes(bound))
    tensors = tuple(views[name] for name in _FRESH_TENSORS)
    return (_shared_launch("paged_decode_fresh", bound, dims["S"], tensors, numbers),)


DECODE_FRESH = AttentionKernel(
    FOLDER / "fresh.cu",
    _shared_entries(
        "paged_decode_fresh",
        ("ptr",) * (len(_FRESH_TENSORS) + 2) + ("f32",) * 3 + ("f64", "i32", "i32", *_SIZES, "i32", "i32"),
    ),
    _plan_fresh,
    include_dirs=(INCLUDE_DIR,),
)
