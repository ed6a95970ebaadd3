"""Launching paged attention: clusters of blocks a row and key head, and a simple kernel for uncommon head sizes."""

import math
from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import ceil_div
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.backends.workspace import Scratch
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound

FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]

#: Head sizes that the tensor-core kernel is compiled for, and the largest that the simple one takes (attention.cuh).
HEAD_DIMS = (64, 128, 256)
LARGEST_HEAD_DIM = 1024
_HEADS_A_BLOCK = 8
_MOST_ROWS = 2**31 - 1
# attention.cuh: how a context is cut into pieces, and the floats of a piece that a rank hands on besides its columns.
_PIECE_TOKENS, _MOST_PIECES = 256, 32
_SLICE_EXTRA = 32
_NO_ARRAY = 0  # a null pointer
# So many clusters keep a device busy (of two blocks, two blocks an SM): with fewer rows several share one.
_ENOUGH_CLUSTERS = 256


def head_entry(name: str, bound: Bound) -> str:
    """Return the entry point for a head size; ContractError for sizes that no kernel takes."""
    dims = bound.dims
    if dims["D"] > LARGEST_HEAD_DIM:
        raise ContractError(f"{name}: head_dim is {dims['D']}, expected at most {LARGEST_HEAD_DIM}")
    if dims["P"] * dims["B"] > _MOST_ROWS:
        raise ContractError(f"{name}: the cache has {dims['P'] * dims['B']} tokens, expected at most {_MOST_ROWS}")
    return f"{name}_d{dims['D']}" if dims["D"] in HEAD_DIMS else f"{name}_any"


def cache_sizes(bound: Bound) -> tuple[int, ...]:
    """Return pages, page size, key heads, and query heads a key head."""
    dims = bound.dims
    return (dims["P"], dims["B"], dims["Hk"], dims["Hq"] // dims["Hk"])


def in_base_two(scale: float) -> float:
    """Return a scale of scores for powers of two."""
    return float(scale) * math.log2(math.e)


def clusters_a_team(teams: int, longest: int) -> int:
    """Return how many clusters share a row with at most ``longest`` tokens. Its bits do not depend on it."""
    pieces = min(_MOST_PIECES, ceil_div(longest, _PIECE_TOKENS))
    return max(1, min(pieces, ceil_div(_ENOUGH_CLUSTERS, teams)))


def launches(
    name: str, bound: Bound, entries: Entries, rows: int, tensors: tuple[object, ...], numbers: tuple[object, ...]
) -> tuple[LaunchPlan, ...]:
    """Return the launches over some rows: clusters, and what combines several of a row; or that for any head size.

    A team has a row, a key head, and eight of its query heads.
    """
    dims, entry = bound.dims, head_entry(name, bound)
    if entry.endswith("_any"):
        return (LaunchPlan(entry, (rows * dims["Hq"], 1, 1), (*tensors, *numbers, dims["D"])),)
    cluster, per_key = entries[entry].cluster, dims["Hq"] // dims["Hk"]
    ranks = cluster[0] if cluster else 1
    teams = rows * dims["Hk"] * ceil_div(per_key, _HEADS_A_BLOCK)
    clusters = clusters_a_team(teams, dims["L"] * dims["B"])
    grid = (clusters * teams * ranks, 1, 1)
    if clusters == 1:
        return (LaunchPlan(entry, grid, (*tensors, _NO_ARRAY, _NO_ARRAY, *numbers, clusters, teams)),)
    slice_bytes = 4 * (_HEADS_A_BLOCK * dims["D"] // ranks + _SLICE_EXTRA)
    workspace = Scratch(teams * _MOST_PIECES * ranks * slice_bytes, "slices"), Scratch(4 * teams, "counts")
    combined = (teams * _HEADS_A_BLOCK, 1, 1)
    return (
        LaunchPlan(entry, grid, (*tensors, *workspace, *numbers, clusters, teams)),
        LaunchPlan(f"{name}_combine_d{dims['D']}", combined, (*workspace, bound.views["out"], per_key)),
    )


def entry_points(name: str, pointers: int, sizes: int) -> tuple[EntryPoint, ...]:
    """Return the entry points of a source: for each head size its two launches, and one for any size."""
    by_size = (
        entry
        for head_dim in HEAD_DIMS
        for entry in (
            EntryPoint(f"{name}_d{head_dim}", ("ptr",) * (pointers + 2) + ("f32",) + ("i32",) * (sizes + 2)),
            EntryPoint(f"{name}_combine_d{head_dim}", ("ptr", "ptr", "ptr", "i32")),
        )
    )
    return (*by_size, EntryPoint(f"{name}_any", ("ptr",) * pointers + ("f32",) + ("i32",) * (sizes + 1)))


def _plan_decode(bound: Bound, entries: Entries) -> tuple[LaunchPlan, ...]:
    views, dims = bound.views, bound.dims
    tensors = tuple(views[name] for name in ("q", "k_cache", "v_cache", "block_table", "context_lens", "out"))
    numbers = (in_base_two(bound.arguments["scale"]), dims["L"], *cache_sizes(bound))
    return launches("paged_decode", bound, entries, dims["S"], tensors, numbers)


DECODE = CudaKernel(
    FOLDER / "paged_decode.cu", entry_points("paged_decode", 6, 5), _plan_decode, include_dirs=(INCLUDE_DIR,)
)
