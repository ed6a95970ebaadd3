"""Launching paged prefill in tiles of rows, by mma.sync, and by wgmma on sm_90a."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from kernel_muster.plugins._cuda.constants import constants
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
# Pairs of a row and a query head in a block, and tokens of a tile. Shared memory by head size.
_PAIRS, _TOKENS = constants(_FOLDER / "prefill_tile.cuh", "ROWS", "TOKENS")
_MMA = {128: 48 * 1024 + 16, 256: 96 * 1024 + 16}
_HOPPER = {128: 80 * 1024 + 16, 256: 96 * 1024 + 16}
_MAX_VECTORS = 2**32 - 1
# The most KV splits of a context, and the fewest tiles of tokens of one.
(_MAX_SPLITS,), _MIN_TILES = constants(_FOLDER / "split_kv.cuh", "MAX_SPLITS"), 2
# A context of so many tiles of tokens is not split: the first number plus the second over the splits, or the third if
# blocks run in two waves. H200, heads 16/2 of 256, us whole / split: 64 rows after 256 tokens 12.6 / 12.5, 384
# 16.3 / 13.0, 512 19.5 / 13.4; 256 rows after 256 18.5 / 18.0, 512 24.9 / 20.0; 512 rows after 512 32.3 / 30.4, 1024
# 45.0 / 37.9.
_WHOLE, _WHOLE_OVER_SPLITS, _TWO_WAVES_WHOLE = 4, 20, 64
# Long contexts run in two waves of shorter splits if these take at most this fraction of the estimated time of one
# wave. H200, us in one / two waves: 256 rows of heads 24/4 after 2048 tokens 47.3 / 53.6, 4096 76.6 / 76.5, 8192
# 138 / 130; 400 of 16/2 after 8192 135 / 124.
_TWO_WAVES_SHARE = 0.85
# Columns that a block combines at a time (split_kv.cuh).
_COLUMNS = 32
_NO_ARRAY = 0  # a null pointer
_IMAGINARY = (9, 0)  # the compute capability of plans on host memory, which are never launched


@cache
def _blocks_of_wave(device: int, shared_bytes: int) -> int:
    """Return the blocks of a wave: two for each multiprocessor where they fit, else one."""
    capability = _IMAGINARY if device == HOST else read_devices()[device].capability
    has_room_for_two = 2 * shared_bytes + KIB <= LIMITS[capability].shared_bytes_per_block
    return multiprocessors_of(device) * (2 if has_room_for_two else 1)


@frozen
class KvSplits:
    """The most splits of a context, the tiles of tokens that stay whole, and the fewest tiles of a split."""

    splits: int
    max_whole: int
    min_tiles: int = _MIN_TILES


def kv_splits(tiles: int, longest: int, wave_blocks: int) -> KvSplits:
    """Return the KV splits of contexts of at most ``longest`` tokens, so that tiles of rows fill a device.

    A tile of rows has a block for each split. The blocks run in one wave, or for long contexts in two waves if these
    leave less of the device idle. There is one split if the tiles alone fill the device, or if contexts are short, so
    that the second launch would cost more.
    """
    one_wave, two_waves = (waves * wave_blocks // max(tiles, 1) for waves in (1, 2))
    is_long = longest > _TWO_WAVES_WHOLE * _TOKENS
    splits = two_waves if is_long and two_waves * _TWO_WAVES_SHARE > 2 * one_wave else one_wave
    max_whole = _WHOLE + _WHOLE_OVER_SPLITS // one_wave if one_wave > 1 else _TWO_WAVES_WHOLE
    splits = min(splits, ceil_div(longest, _MIN_TILES * _TOKENS), _MAX_SPLITS)
    return KvSplits(splits if tiles and longest > max_whole * _TOKENS and splits > 1 else 1, max_whole)


def _entry(name: str, head_dim: int, splits: int) -> str:
    """Return the entry point of tiles. Split contexts have their own where one for both would be slower."""
    is_apart = splits > 1 and (name, head_dim) == ("prefill_hopper", 256)
    return f"{name}_split_kv_d{head_dim}" if is_apart else f"{name}_d{head_dim}"


def _plan_tiles(name: str, shared_bytes: Mapping[int, int], bound: Bound, _entries: Entries) -> tuple[LaunchPlan, ...]:
    """Return the launch over slots of 64 pairs: enough for any division of the rows among the sequences.

    With few slots, contexts are split, and a second launch combines the splits.
    """
    dims, views = bound.dims, bound.views
    if dims["D"] not in shared_bytes:
        raise ContractError(f"{name}: head_dim is {dims['D']}, expected 128 or 256")
    vectors = max(dims["P"] * dims["B"] * dims["Hk"], dims["M"] * dims["Hq"]) * dims["D"] // VECTOR
    if vectors > _MAX_VECTORS:
        raise ContractError(f"{name}: an array has {vectors} x 16 bytes, expected at most {_MAX_VECTORS}")
    shared = shared_bytes[dims["D"]]
    per_key = dims["Hq"] // dims["Hk"]
    slots = ceil_div(dims["M"] * per_key, _PAIRS) + dims["S"] - 1 if dims["M"] and dims["S"] else 0
    tiles = slots * dims["Hk"]
    wave_blocks = _blocks_of_wave(views["q"].device, shared)
    kv = kv_splits(tiles, dims["L"] * dims["B"], wave_blocks)
    partials = Scratch(tiles * kv.splits * _PAIRS * (dims["D"] + 2) * 4, "partials") if kv.splits > 1 else _NO_ARRAY
    _, page_size, *heads = sizes = cache_sizes(bound)
    counts, splits = (dims["M"], dims["S"], dims["L"]), (kv.splits, kv.max_whole, kv.min_tiles)
    attend = LaunchPlan(
        _entry(name, dims["D"], kv.splits),
        (tiles, kv.splits, 1),
        (*(views[one] for one in _ARRAYS), partials, in_base_two(bound.arguments["scale"]), *counts, *sizes, *splits),
        dynamic_shared_bytes=shared,
    )
    if kv.splits == 1:
        return (attend,)
    given = (*(views[one] for one in ("cu_rows", "context_lens", "out")), partials, *counts, page_size, *heads, *splits)
    blocks = max(1, min(dims["D"] // _COLUMNS, wave_blocks // tiles))
    return attend, LaunchPlan(f"{name}_combine", (tiles, blocks, 1), (*given, dims["D"]))


def _tiles(name: str, shared_bytes: Mapping[int, int]) -> CudaKernel:
    parameters = ("ptr",) * 8 + ("f32",) + ("i32",) * 10
    named = {_entry(name, size, splits): shared for size, shared in shared_bytes.items() for splits in (1, 2)}
    entries = tuple(EntryPoint(entry, parameters, shared) for entry, shared in named.items())
    combine = EntryPoint(f"{name}_combine", ("ptr",) * 4 + ("i32",) * 10)
    return cuda_kernel(_FOLDER / f"{name}.cu", (*entries, combine), partial(_plan_tiles, name, shared_bytes))


PREFILL_MMA = _tiles("prefill_mma", _MMA)
PREFILL_HOPPER = _tiles("prefill_hopper", _HOPPER)
