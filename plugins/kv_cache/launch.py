"""Launching the append to a paged cache: one block a row."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import cuda_kernel, head_rows, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound

_PARAMETERS = ("ptr", "ptr", "ptr", "ptr", "ptr", "i64", "i64", "i64", "i32")


def _plan(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan | tuple[LaunchPlan, ...]:
    views, dims = bound.views, bound.dims
    if dims["M"] == 0:
        return ()
    columns = dims["Hk"] * dims["D"]
    strides = head_rows("k", views["k"]), head_rows("v", views["v"])
    tensors = tuple(views[name] for name in ("k", "v", "slots", "k_cache", "v_cache"))
    arguments = (*tensors, *strides, dims["P"] * dims["B"], columns)
    return LaunchPlan(f"kv_cache_append_w{width_of(columns, *strides)}", (dims["M"], 1, 1), arguments)


APPEND = cuda_kernel(
    Path(__file__).with_name("append.cu"),
    tuple(EntryPoint(f"kv_cache_append_w{width}", _PARAMETERS) for width in (1, 8)),
    _plan,
    strided=frozenset({"k", "v"}),
)
