"""Launching paged attention: clusters of blocks a row and key head, and a simple kernel for uncommon head sizes."""

import math
from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import ceil_div
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.backends.workspace import Counters, Scratch
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
_PIECE_TOKENS, _MOST_PIECES = 1024, 8
_SLICE_EXTRA = 32
# So many clusters keep a device busy (two blocks an SM): with fewer rows several clusters share one.
_ENOUGH_CLUSTERS = 64


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


def teams_of(bound: Bound, rows: int) -> int:
    """Return how many teams there are: one a row, key head, and eight of its query heads."""
    return rows * bound.dims["Hk"] * ceil_div(bound.dims["Hq"] // bound.dims["Hk"], _HEADS_A_BLOCK)


def ranks_of(entries: Entries, entry: str) -> int:
    """Return the blocks of a cluster."""
    cluster = entries[entry].cluster
    return cluster[0] if cluster else 1


def in_base_two(scale: float) -> float:
    """Return a scale of scores for powers of two."""
    return float(scale) * math.log2(math.e)


def clusters_a_team(teams: int, longest: int) -> int:
    """Return how many clusters share a row with at most ``longest`` tokens. Its bits do not depend on it."""
    pieces = min(_MOST_PIECES, ceil_div(longest, _PIECE_TOKENS))
    return max(1, min(pieces, ceil_div(_ENOUGH_CLUSTERS, teams)))


def _plan_decode(bound: Bound, entries: Entries) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    entry = head_entry("paged_decode", bound)
    tensors = tuple(views[name] for name in ("q", "k_cache", "v_cache", "block_table", "context_lens", "out"))
    numbers = (in_base_two(bound.arguments["scale"]), dims["L"], *cache_sizes(bound))
    if entry.endswith("_any"):
        return LaunchPlan(entry, (dims["S"] * dims["Hq"], 1, 1), (*tensors, *numbers, dims["D"]))
    teams, ranks = teams_of(bound, dims["S"]), ranks_of(entries, entry)
    clusters = clusters_a_team(teams, dims["L"] * dims["B"])
    workspace: tuple[object, object] = (0, 0)
    if clusters > 1:
        slice_bytes = 4 * (_HEADS_A_BLOCK * dims["D"] // ranks + _SLICE_EXTRA)
        workspace = Scratch(teams * _MOST_PIECES * ranks * slice_bytes), Counters(4 * teams * ranks)
    return LaunchPlan(entry, (clusters * teams * ranks, 1, 1), (*tensors, *workspace, *numbers, clusters, teams))


DECODE = CudaKernel(
    FOLDER / "paged_decode.cu",
    (
        *(EntryPoint(f"paged_decode_d{head_dim}", ("ptr",) * 8 + ("f32",) + ("i32",) * 7) for head_dim in HEAD_DIMS),
        EntryPoint("paged_decode_any", ("ptr",) * 6 + ("f32",) + ("i32",) * 6),
    ),
    _plan_decode,
    include_dirs=(INCLUDE_DIR,),
)
