"""Launching the preprocessing between projections and mixers."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, row_blocks, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan, row_stride
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound

Entries = Mapping[str, EntryResources]

_FOLDER = Path(__file__).parent
_GATE_THREADS = 128
_QG = ("ptr", "ptr", "ptr", "i64", "i32", "i32", "i32")
_QKVZ = ("ptr", "ptr", "ptr", "i64", "i32", "i32", "i32", "i32")


def _plan_qg(bound: Bound, entries: Entries) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    stride = row_stride(views["qg"])
    width = width_of(dims["head_dim"], stride)
    blocks = row_blocks(2 * dims["Q"], width)
    arguments = (views["qg"], views["out_q"], views["out_gate"], stride, dims["Q"], dims["head_dim"], blocks)
    return LaunchPlan(f"deinterleave_qg_w{width}", (dims["M"] * blocks, 1, 1), arguments)


def _plan_qkvz(bound: Bound, entries: Entries) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    stride = row_stride(views["qkvz"])
    heads, key_dim = dims["key_heads"], dims["key_dim"]
    group_values = dims["value_heads"] // heads * dims["value_dim"]
    width = width_of(key_dim, group_values, stride)
    blocks = row_blocks(2 * heads * (key_dim + group_values), width)
    tensors = (views["qkvz"], views["out_qkv"], views["out_z"])
    arguments = (*tensors, stride, heads, key_dim, group_values, blocks)
    return LaunchPlan(f"deinterleave_qkvz_w{width}", (dims["M"] * blocks, 1, 1), arguments)


def _plan_gates(bound: Bound, entries: Entries) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    tensors = tuple(views[name] for name in ("a", "b", "a_log", "dt_bias", "out_decay", "out_beta"))
    strides = row_stride(views["a"]), row_stride(views["b"])
    grid = (ceil_div(dims["M"] * dims["Hv"], _GATE_THREADS), 1, 1)
    return LaunchPlan("compute_gdn_gates", grid, (*tensors, *strides, dims["M"], dims["Hv"]))


_deinterleave = partial(
    cuda_kernel,
    _FOLDER / "deinterleave.cu",
    (
        *(EntryPoint(f"deinterleave_qg_w{width}", _QG) for width in (1, 8)),
        *(EntryPoint(f"deinterleave_qkvz_w{width}", _QKVZ) for width in (1, 8)),
    ),
)
DEINTERLEAVE_QG = _deinterleave(_plan_qg, strided=frozenset({"qg"}))
DEINTERLEAVE_QKVZ = _deinterleave(_plan_qkvz, strided=frozenset({"qkvz"}))
GDN_GATES = cuda_kernel(
    _FOLDER / "gdn_gates.cu",
    (EntryPoint("compute_gdn_gates", ("ptr",) * 6 + ("i64",) * 3 + ("i32",)),),
    _plan_gates,
    strided=frozenset({"a", "b"}),
)
