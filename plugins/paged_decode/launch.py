"""Launching paged attention: one cluster of blocks a row and key head, and a simple kernel for uncommon head sizes."""

import math
from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound

FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]

#: Head sizes that the tensor-core kernel is compiled for, and the largest that the simple one takes (attention.cuh).
HEAD_DIMS = (64, 128, 256)
LARGEST_HEAD_DIM = 1024
_HEADS_A_BLOCK = 8
_MOST_ROWS = 2**31 - 1


def attention_plan(entries: Entries, name: str, bound: Bound, rows: int, arguments: tuple[object, ...]) -> LaunchPlan:
    """Return the launch of ``name_d<D>`` or ``name_any`` over some rows; ContractError for sizes no kernel takes."""
    dims = bound.dims
    if dims["D"] > LARGEST_HEAD_DIM:
        raise ContractError(f"{name}: head_dim is {dims['D']}, expected at most {LARGEST_HEAD_DIM}")
    if dims["P"] * dims["B"] > _MOST_ROWS:
        raise ContractError(f"{name}: the cache has {dims['P'] * dims['B']} tokens, expected at most {_MOST_ROWS}")
    per_key = dims["Hq"] // dims["Hk"]
    arguments = (*arguments, dims["P"], dims["B"], dims["Hk"], per_key)
    if dims["D"] not in HEAD_DIMS:
        return LaunchPlan(f"{name}_any", (rows * dims["Hq"], 1, 1), (*arguments, dims["D"]))
    entry = f"{name}_d{dims['D']}"
    cluster = entries[entry].cluster
    blocks = rows * dims["Hk"] * -(-per_key // _HEADS_A_BLOCK) * (cluster[0] if cluster else 1)
    return LaunchPlan(entry, (blocks, 1, 1), arguments)


def entry_points(name: str, parameters: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of a source: one a head size, and one for any, which takes it as its last parameter."""
    return (
        *(EntryPoint(f"{name}_d{head_dim}", parameters) for head_dim in HEAD_DIMS),
        EntryPoint(f"{name}_any", (*parameters, "i32")),
    )


def in_base_two(scale: float) -> float:
    """Return a scale of scores for powers of two."""
    return float(scale) * math.log2(math.e)


def _plan_decode(bound: Bound, entries: Entries) -> LaunchPlan:
    views = (bound.views[name] for name in ("q", "k_cache", "v_cache", "block_table", "context_lens", "out"))
    arguments = (*views, in_base_two(bound.arguments["scale"]), bound.dims["L"])
    return attention_plan(entries, "paged_decode", bound, bound.dims["S"], arguments)


DECODE = CudaKernel(
    FOLDER / "paged_decode.cu",
    entry_points("paged_decode", ("ptr",) * 6 + ("f32",) + ("i32",) * 5),
    _plan_decode,
    include_dirs=(INCLUDE_DIR,),
)
