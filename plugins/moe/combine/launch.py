"""Launching the kernels that reduce experts' results to tokens."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]
_WIDTHS = (1, 8)
_COMBINE_THREADS, MAX_CHOICES = constants(_FOLDER / "combine.cu", "THREADS", "MAX_CHOICES")
# Up to this number of slots each thread has one, read before pdl_wait, and more multiprocessors share the columns of a
# row.
_FEW_SLOTS = 64


def _plan_unpermute(bound: Bound, entries: Entries) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    tokens, choices, columns = dims["M"], dims["T"], dims["H"]
    if choices > MAX_CHOICES:
        raise ContractError(f"T is {choices}, expected at most {MAX_CHOICES} choices a token")
    width = width_of(columns)
    arrays = tuple(views[name] for name in ("y", "slots", "weights", "out"))
    slots = tokens * choices
    threads = _FEW_SLOTS if slots <= _FEW_SLOTS else _COMBINE_THREADS
    grid, sizes = (tokens, ceil_div(columns // width, threads), 1), (slots, choices, columns)
    return LaunchPlan(f"unpermute_reduce_w{width}", grid, (*arrays, *sizes), block=(threads, 1, 1))


def _plan_unpermute_shared(bound: Bound, entries: Entries) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    tokens, choices, columns = dims["M"], dims["T"], dims["H"]
    if choices > MAX_CHOICES:
        raise ContractError(f"T is {choices}, expected at most {MAX_CHOICES} choices a token")
    arrays = tuple(views[name] for name in ("y", "slots", "weights", "x", "gate_weight", "shared", "out"))
    entry = f"unpermute_shared_add_w{width_of(columns)}"
    return LaunchPlan(entry, (tokens, 1, 1), (*arrays, tokens * choices, choices, columns))


def _plan_shared(bound: Bound, entries: Entries) -> LaunchPlan:
    arrays = tuple(bound.views[name] for name in ("x", "gate_weight", "shared", "out"))
    columns = bound.dims["H"]
    return LaunchPlan(f"shared_gate_add_w{width_of(columns)}", (bound.dims["M"], 1, 1), (*arrays, columns))


_COMBINE_ENTRIES = (
    *(EntryPoint(f"unpermute_reduce_w{width}", ("ptr",) * 4 + ("i32",) * 3) for width in _WIDTHS),
    *(EntryPoint(f"shared_gate_add_w{width}", ("ptr",) * 4 + ("i32",)) for width in _WIDTHS),
    *(EntryPoint(f"unpermute_shared_add_w{width}", ("ptr",) * 7 + ("i32",) * 3) for width in _WIDTHS),
)
UNPERMUTE = cuda_kernel(_FOLDER / "combine.cu", _COMBINE_ENTRIES, _plan_unpermute)
SHARED_GATE_ADD = cuda_kernel(_FOLDER / "combine.cu", _COMBINE_ENTRIES, _plan_shared)
UNPERMUTE_SHARED_ADD = cuda_kernel(_FOLDER / "combine.cu", _COMBINE_ENTRIES, _plan_unpermute_shared)
