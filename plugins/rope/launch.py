"""Launching rotary position embedding: one kernel, plain, interleaved or YaRN by its constants."""

import math
from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, width_of
from kernel_muster.plugins.rope.cpu import yarn_ramp, yarn_scale
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError

Entries = Mapping[str, EntryResources]

_MAX_PAIRS = 2**20  # of a row, which rope.cu counts in FP32
_PLAIN = (0.0, 0.0, 1.0, 1.0)  # start and slope of the ramp, stretch, scale


def _plan(bound: Bound, axes: int, ramp: tuple[float, float, float, float]) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    half = dims["rotary_dim"] // 2
    if (pairs := (dims["Hq"] + dims["Hk"]) * half) >= _MAX_PAIRS:
        raise ContractError(f"rope: a row has {pairs} pairs of values, expected fewer than {_MAX_PAIRS}")
    sections = (dims["section_h"], dims["section_w"]) if axes > 1 else (0, 0)
    sizes = (dims["M"], dims["Hq"], dims["Hk"], dims["D"], half, axes, *sections)
    log2_step = math.log2(bound.arguments["theta"]) / half
    arguments = (views["q"], views["k"], views["positions"], *sizes, log2_step, *ramp)
    return LaunchPlan(f"rope_w{width_of(dims['D'], half)}", (dims["M"], 1, 1), arguments)


def _plan_forward(bound: Bound, entries: Entries) -> LaunchPlan:
    return _plan(bound, 1, _PLAIN)


def _plan_mrope(bound: Bound, entries: Entries) -> LaunchPlan:
    return _plan(bound, 3, _PLAIN)


def _plan_yarn(bound: Bound, entries: Entries) -> LaunchPlan:
    arguments, dims = bound.arguments, bound.dims
    low, width = yarn_ramp(dims["rotary_dim"], arguments["theta"], dims["original_context"])
    factor = arguments["factor"]
    return _plan(bound, 1, (low, 1.0 / width, 1.0 / float(factor), yarn_scale(factor)))


_SOURCE = Path(__file__).with_name("rope.cu")
_ENTRIES = tuple(EntryPoint(f"rope_w{width}", ("ptr",) * 3 + ("i32",) * 8 + ("f64",) * 5) for width in (1, 8))
FORWARD = cuda_kernel(_SOURCE, _ENTRIES, _plan_forward)
MROPE_INTERLEAVED = cuda_kernel(_SOURCE, _ENTRIES, _plan_mrope)
YARN = cuda_kernel(_SOURCE, _ENTRIES, _plan_yarn)

# qk_norm_rope_append.cu: a block has at most 8 heads, and a lane up to 8 values of a small one. H200, heads 16/2, us
# with 8 / 4 / 2 / 1 heads a block: 1 row 1.66 / 1.58 / 1.58 / 1.60, 16 rows 1.80 / 1.72 / 1.77 / 1.83.
_HEADS_PER_BLOCK, _WARP, _SMALL_D = 4, 32, 256
_FUSED_PARAMETERS = ("ptr",) * 9 + ("f32", "f32", "i64") + ("i32",) * 4 + ("f64",)
_FUSED_TENSORS = ("q", "k", "v", "q_weight", "k_weight", "positions", "slots", "k_cache", "v_cache")


def _plan_fused(bound: Bound, entries: Entries) -> LaunchPlan | tuple[LaunchPlan, ...]:
    arguments, dims = bound.arguments, bound.dims
    half, heads = dims["rotary_dim"] // 2, dims["Hq"] + dims["Hk"]
    tensors = tuple(bound.views[name] for name in _FUSED_TENSORS)
    numbers = (arguments["eps"], arguments["weight_offset"], dims["P"] * dims["B"])
    sizes = (dims["Hq"], dims["Hk"], dims["D"], half, math.log2(arguments["theta"]) / half)
    if dims["M"] == 0:
        return ()
    grid, block = (dims["M"], ceil_div(heads, _HEADS_PER_BLOCK), 1), (_WARP * (_HEADS_PER_BLOCK + 1), 1, 1)
    is_small = dims["D"] <= _SMALL_D and width_of(dims["D"], half) > 1
    variant = "small_d" if is_small else f"w{width_of(dims['D'])}"
    return LaunchPlan(f"qk_norm_rope_append_{variant}", grid, (*tensors, *numbers, *sizes), block=block)


QK_NORM_ROPE_APPEND = cuda_kernel(
    Path(__file__).with_name("qk_norm_rope_append.cu"),
    tuple(EntryPoint(f"qk_norm_rope_append_{variant}", _FUSED_PARAMETERS) for variant in ("small_d", "w1", "w8")),
    _plan_fused,
)
