"""Launching paged attention: blocks for a row and key head, and a simple kernel for uncommon head sizes."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
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

#: Head sizes that the tensor-core kernel is compiled for, and the largest that the simple one takes (attention.cuh).
HEAD_DIMS = (64, 128, 256)
LARGEST_HEAD_DIM = 1024
_HEADS_PER_BLOCK = 8
_MAX_ROWS, _MAX_VECTORS = 2**31 - 1, 2**32 - 1
_NO_ARRAY = 0  # a null pointer
# pieces.cuh: the fewest tokens of a piece.
_PIECE_TOKENS = 64
# A row has pieces for so many blocks, and a piece's groups of 8 are at most 8 (pieces.cuh).
_MAX_BLOCKS, _MAX_PIECES, _GROUP = 128, 64, 8
# Up to so many blocks have a piece each; with more, a block takes a group of pieces. Mail takes 10 KB a piece.
_SPREAD_BLOCKS = 256
# So many blocks keep a device busy: with fewer rows several share one.
_ENOUGH_BLOCKS = 528
# attention.cuh: what a block has in shared memory for tiles, where two blocks have room for three of them a warp and
# where they do not, and beside them.
_TILES_BYTES, _FEWER_TILES_BYTES, _BESIDE_BYTES = 96 * 1024, 64 * 1024, 12 * 1024
_SMALLEST = (8, 0)
# pieces.cuh: the mail of a piece, a column; and the columns that a warp combines.
_MAIL_BYTES, _COLUMNS = 40, 8
# pieces.cuh: there is mail for a multiple of so many pieces.
_MAIL_PIECES = 16


def _shared_bytes(capability: tuple[int, int]) -> int:
    """Return the shared memory of a block."""
    return _BESIDE_BYTES + (_TILES_BYTES if capability[0] in (9, 10) else _FEWER_TILES_BYTES)


@cache
def _capability_of(device: int) -> tuple[int, int]:
    return _SMALLEST if device == HOST else read_devices()[device].capability


@frozen
class AttentionKernel(CudaKernel):
    """A kernel whose blocks have as much shared memory as their architecture has for two of them."""

    def request(self, arch: Arch) -> BuildRequest:
        """Return what must be built for an architecture."""
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


def most_pieces(teams_per_row: int) -> int:
    """Return how many pieces a context has at most: it depends on the heads alone, so that every launch cuts alike."""
    return min(_MAX_PIECES, max(1, _MAX_BLOCKS // teams_per_row))


@frozen
class Shares:
    """How rows are shared out: a piece a block, or groups of pieces; and among how many blocks a team's."""

    is_spread: bool
    sharing: int


def shares_of(teams: int, longest: int, most: int) -> Shares:
    """Return how rows with at most ``longest`` tokens are shared out. Their bits do not depend on it."""
    pieces = max(1, min(most, ceil_div(longest, _PIECE_TOKENS)))
    # A block is soon done with few pieces: to send those of many teams to others would take longer.
    if 1 < pieces <= min(_SPREAD_BLOCKS, 2 ** (2 * pieces - 1)) // teams:
        return Shares(True, pieces)
    return Shares(False, min(ceil_div(pieces, _GROUP), ceil_div(_ENOUGH_BLOCKS, teams)))


def combining_blocks(head_dim: int, pieces: int) -> int:
    """Return how many blocks combine the pieces of a row and key head: 8 columns a warp, or two, four or eight."""
    of_block = 8 if head_dim >= 128 else 4
    warps = next(count for count in (1, 2, 4, 8) if pieces <= count * (_MAX_PIECES // of_block))
    return head_dim // _COLUMNS * warps // of_block


def _shared_launch(
    name: str, bound: Bound, rows: int, tensors: tuple[object, ...], numbers: tuple[object, ...]
) -> LaunchPlan:
    """Return the launch of blocks with a piece each, or with groups, and what they combine their results in."""
    dims = bound.dims
    vectors = dims["P"] * dims["B"] * dims["Hk"] * dims["D"] // VECTOR
    if vectors > _MAX_VECTORS:
        raise ContractError(f"attention: the cache has {vectors} x 16 bytes, expected at most {_MAX_VECTORS}")
    teams_per_row = dims["Hk"] * ceil_div(dims["Hq"] // dims["Hk"], _HEADS_PER_BLOCK)
    teams, most = rows * teams_per_row, most_pieces(teams_per_row)
    shares = shares_of(teams, dims["L"] * dims["B"], most)
    workspace: tuple[object, ...] = (_NO_ARRAY, _NO_ARRAY)
    if shares.is_spread:
        pieces = ceil_div(shares.sharing, _MAIL_PIECES) * _MAIL_PIECES
        workspace = _NO_ARRAY, Counters(teams * pieces * _MAIL_BYTES * dims["D"], "mail")
    elif shares.sharing > 1:
        slice_bytes = 4 * _HEADS_PER_BLOCK * (dims["D"] + 2)
        workspace = Scratch(teams * ceil_div(most, _GROUP) * slice_bytes, "slices"), Counters(4 * teams, "counts")
    waiting = combining_blocks(dims["D"], shares.sharing) if shares.is_spread else 0
    return LaunchPlan(
        f"{name}_spread_d{dims['D']}" if shares.is_spread else f"{name}_d{dims['D']}",
        (rows, teams_per_row, shares.sharing + waiting),
        (*tensors, *workspace, *numbers, shares.sharing, most),
        dynamic_shared_bytes=_shared_bytes(_capability_of(bound.views["q"].device)),
    )


_SIZES = ("i32", "i32", "u32", "i32", "i32", "i32")  # of paged_sizes


def _shared_entries(name: str, parameters: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    forms = name, f"{name}_spread"
    return tuple(EntryPoint(f"{form}_d{head_dim}", parameters) for head_dim in HEAD_DIMS for form in forms)


_TENSORS = ("q", "k_cache", "v_cache", "block_table", "cu_rows", "context_lens", "gate", "out")
_NUMBERS = ("f32", "i32", "i32", *_SIZES)


def _plan_rows(bound: Bound, _entries: Entries) -> tuple[LaunchPlan, ...]:
    """Return the launch of blocks that share rows out, a row a sequence or those of ``cu_rows``; or for any head size.

    A team has a row, a key head, and eight of its query heads.
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


#: For each head size a kernel for many rows and one for few; and one for any.
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
