"""Launching paged prefill in tiles of rows, by mma.sync, and by wgmma on sm_90a."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from kernel_muster.plugins._cuda.launching import VECTOR, ceil_div, cuda_kernel, multiprocessors_of
from kernel_muster.plugins.paged_decode.launch import Entries, cache_sizes, in_base_two
from kernel_muster.registry.backends.cubin.limits import KIB, LIMITS
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint
from kernel_muster.registry.contract.arrays import HOST
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.hardware.target import read_devices
from kernel_muster.registry.launch.workspace import Scratch
from kernel_muster.registry.values import frozen

_FOLDER = Path(__file__).parent
_ARRAYS = ("q", "k_cache", "v_cache", "block_table", "cu_rows", "context_lens", "out")
# Pairs of a row and a query head in a block, tokens of a tile (prompts.cuh), and its shared memory by head size.
_PAIRS, _TOKENS = 64, 64
_MMA = {128: 48 * 1024 + 16, 256: 96 * 1024 + 16}
_HOPPER = {128: 80 * 1024 + 16, 256: 96 * 1024 + 16}
_MAX_PIECES = 2**32 - 1
# Parts of a context, at most (parts.cuh), and tiles of tokens of one, at least.
_MAX_PARTS, _MIN_TILES = 32, 2
# A context of so many tiles of tokens is not cut: the first number, and the second over the parts; the third, where
# blocks run in two turns. On an H200, heads 16/2 of 256, us whole / cut: 64 rows behind 256 tokens 12.6 / 12.5, 384
# 16.3 / 13.0, 512 19.5 / 13.4; 256 rows behind 256 18.5 / 18.0, 512 24.9 / 20.0; 512 rows behind 512 32.3 / 30.4, 1024
# 45.0 / 37.9.
_WHOLE, _WHOLE_OVER_PARTS, _TWO_TURNS_WHOLE = 4, 20, 64
# Two turns of shorter parts are taken where they are to need less than this share of one turn's time, and contexts are
# long. On an H200, us in one / two turns: 256 rows of heads 24/4 behind 2048 tokens 47.3 / 53.6, 4096 76.6 / 76.5, 8192
# 138 / 130; 400 of 16/2 behind 8192 135 / 124.
_TWO_TURNS_SHARE = 0.85
# Columns that a block puts together at a time (parts.cuh).
_COLUMNS = 32
_NO_ARRAY = 0  # a null pointer
_IMAGINARY = (9, 0)  # the compute capability that plans on host memory, which are never launched, are made for


@cache
def _blocks_at_once(device: int, shared_bytes: int) -> int:
    """Return how many blocks of tiles a device runs at a time: two a multiprocessor where they fit, else one."""
    capability = _IMAGINARY if device == HOST else read_devices()[device].capability
    has_room_for_two = 2 * shared_bytes + KIB <= LIMITS[capability].shared_bytes_per_block
    return multiprocessors_of(device) * (2 if has_room_for_two else 1)


@frozen
class Cut:
    """Into how many parts contexts are cut at most; so many tiles of tokens stay whole, and a part has at least."""

    parts: int
    whole: int
    least: int = _MIN_TILES


def cut_of(tiles: int, longest: int, at_once: int) -> Cut:
    """Return how contexts of at most ``longest`` tokens are cut, so that tiles of rows keep a device busy.

    A tile of rows is a block for each part: as many as run at a time, or for long contexts in two turns, where that
    leaves less of a device idle. One part: where tiles are enough, or contexts too short for what putting parts
    together takes.
    """
    one_turn, two_turns = (turns * at_once // max(tiles, 1) for turns in (1, 2))
    is_long = longest > _TWO_TURNS_WHOLE * _TOKENS
    parts = two_turns if is_long and two_turns * _TWO_TURNS_SHARE > 2 * one_turn else one_turn
    whole = _WHOLE + _WHOLE_OVER_PARTS // one_turn if one_turn > 1 else _TWO_TURNS_WHOLE
    parts = min(parts, ceil_div(longest, _MIN_TILES * _TOKENS), _MAX_PARTS)
    return Cut(parts, whole) if tiles and longest > whole * _TOKENS and parts > 1 else Cut(1, whole)


def _entry(name: str, head_dim: int, parts: int) -> str:
    """Return the entry point of tiles; whole contexts and parts have one each where one for both would be slower."""
    is_apart = parts > 1 and (name, head_dim) == ("prefill_hopper", 256)
    return f"{name}_parts_d{head_dim}" if is_apart else f"{name}_d{head_dim}"


def _plan_tiles(name: str, shared_bytes: Mapping[int, int], bound: Bound, _entries: Entries) -> tuple[LaunchPlan, ...]:
    """Return the launch over slots of 64 pairs: as many as any division of the rows among the sequences may need.

    Few of them get a part of the context each, which a second launch puts together.
    """
    dims, views = bound.dims, bound.views
    if dims["D"] not in shared_bytes:
        raise ContractError(f"{name}: head_dim is {dims['D']}, expected 128 or 256")
    pieces = max(dims["P"] * dims["B"] * dims["Hk"], dims["M"] * dims["Hq"]) * dims["D"] // VECTOR
    if pieces > _MAX_PIECES:
        raise ContractError(f"{name}: an array has {pieces} x 16 bytes, expected at most {_MAX_PIECES}")
    shared = shared_bytes[dims["D"]]
    per_key = dims["Hq"] // dims["Hk"]
    slots = ceil_div(dims["M"] * per_key, _PAIRS) + dims["S"] - 1 if dims["M"] and dims["S"] else 0
    tiles = slots * dims["Hk"]
    at_once = _blocks_at_once(views["q"].device, shared)
    cut = cut_of(tiles, dims["L"] * dims["B"], at_once)
    partials = Scratch(tiles * cut.parts * _PAIRS * (dims["D"] + 2) * 4, "parts") if cut.parts > 1 else _NO_ARRAY
    _, page_size, *heads = sizes = cache_sizes(bound)
    counts, cuts = (dims["M"], dims["S"], dims["L"]), (cut.parts, cut.whole, cut.least)
    attend = LaunchPlan(
        _entry(name, dims["D"], cut.parts),
        (tiles, cut.parts, 1),
        (*(views[one] for one in _ARRAYS), partials, in_base_two(bound.arguments["scale"]), *counts, *sizes, *cuts),
        dynamic_shared_bytes=shared,
    )
    if cut.parts == 1:
        return (attend,)
    given = (*(views[one] for one in ("cu_rows", "context_lens", "out")), partials, *counts, page_size, *heads, *cuts)
    sharing = max(1, min(dims["D"] // _COLUMNS, at_once // tiles))
    return attend, LaunchPlan(f"{name}_combine", (tiles, sharing, 1), (*given, dims["D"]))


def _tiles(name: str, shared_bytes: Mapping[int, int]) -> CudaKernel:
    parameters = ("ptr",) * 8 + ("f32",) + ("i32",) * 10
    named = {_entry(name, size, parts): shared for size, shared in shared_bytes.items() for parts in (1, 2)}
    entries = tuple(EntryPoint(entry, parameters, shared) for entry, shared in named.items())
    combine = EntryPoint(f"{name}_combine", ("ptr",) * 4 + ("i32",) * 10)
    return cuda_kernel(_FOLDER / f"{name}.cu", (*entries, combine), partial(_plan_tiles, name, shared_bytes))


PREFILL_MMA = _tiles("prefill_mma", _MMA)
PREFILL_HOPPER = _tiles("prefill_hopper", _HOPPER)
