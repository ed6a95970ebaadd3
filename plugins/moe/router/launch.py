"""Launching routing: logits, the choice of experts, the sort by expert."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import view_of
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]
_NO_ARRAY = 0  # a null pointer
_WIDTHS = (1, 8)
# Experts of a block of the sort, and of a router.
_SORT_WARPS, MAX_EXPERTS, _LOCAL_THREADS = constants(_FOLDER / "sort.cu", "WARPS", "MAX_EXPERTS", "LOCAL_THREADS")
# Experts and rows of a block of the logits.
_ROUTER_EXPERTS, _ROUTER_ROWS = constants(_FOLDER / "router_logits.cu", "WARPS", "ROWS")
_MAX_ROW_TILES = 65535  # the limit of a grid's second axis


def _plan_topk(kind: str, bound: Bound, entries: Entries) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    dtype = "bf16" if views["logits"].dtype == numpy_dtype("bf16") else "f32"
    arrays = (views["logits"], views.get("bias", _NO_ARRAY), views["out_ids"], views["out_weights"])
    return LaunchPlan(f"topk_{kind}_{dtype}", (dims["M"], 1, 1), (*arrays, dims["E"], dims["top_k"]))


def _plan_sort(bound: Bound, entries: Entries) -> LaunchPlan:
    views, experts = bound.views, bound.dims["experts"]
    if experts > MAX_EXPERTS:
        raise ContractError(f"experts is {experts}, expected at most {MAX_EXPERTS}")
    arrays = tuple(views[name] for name in ("ids", "out_slots", "out_offsets", "out_work"))
    return LaunchPlan(
        "sort_by_expert", (ceil_div(experts, _SORT_WARPS), 1, 1), (*arrays, views["out_slots"].size, experts)
    )


def _plan_local_ids(bound: Bound, entries: Entries) -> LaunchPlan:
    ids, out, dims = bound.views["ids"], bound.views["out"], bound.dims
    grid = (ceil_div(ids.size, _LOCAL_THREADS), 1, 1)
    return LaunchPlan("local_ids", grid, (ids, out, ids.size, dims["first"], dims["experts"]))


def _plan_logits(bound: Bound, entries: Entries) -> LaunchPlan:
    views, sizes = bound.views, tuple(bound.dims[name] for name in ("M", "E", "H"))
    weight = view_of(bound.arguments["w"].values)
    if not weight.is_contiguous:
        raise ContractError(f"w has strides {weight.strides}, expected rows without gaps")
    grid = (ceil_div(sizes[1], _ROUTER_EXPERTS), ceil_div(sizes[0], _ROUTER_ROWS), 1)
    if grid[1] > _MAX_ROW_TILES:
        raise ContractError(f"M is {sizes[0]}, expected at most {_MAX_ROW_TILES * _ROUTER_ROWS}: launch in parts")
    return LaunchPlan(f"router_logits_w{width_of(sizes[2])}", grid, (views["x"], weight, views["out"], *sizes))


_TOPK_ENTRIES = tuple(
    EntryPoint(f"topk_{kind}_{dtype}", ("ptr",) * 4 + ("i32",) * 2)
    for kind in ("softmax", "sigmoid")
    for dtype in ("bf16", "f32")
)
TOPK_SOFTMAX = cuda_kernel(_FOLDER / "topk.cu", _TOPK_ENTRIES, partial(_plan_topk, "softmax"))
TOPK_SIGMOID = cuda_kernel(_FOLDER / "topk.cu", _TOPK_ENTRIES, partial(_plan_topk, "sigmoid"))
_SORT_ENTRIES = (
    EntryPoint("sort_by_expert", ("ptr",) * 4 + ("i32",) * 2),
    EntryPoint("local_ids", ("ptr",) * 2 + ("i32",) * 3),
)
SORT = cuda_kernel(_FOLDER / "sort.cu", _SORT_ENTRIES, _plan_sort)
LOCAL_IDS = cuda_kernel(_FOLDER / "sort.cu", _SORT_ENTRIES, _plan_local_ids)
LOGITS = cuda_kernel(
    _FOLDER / "router_logits.cu",
    tuple(EntryPoint(f"router_logits_w{width}", ("ptr",) * 3 + ("i32",) * 3) for width in _WIDTHS),
    _plan_logits,
)
