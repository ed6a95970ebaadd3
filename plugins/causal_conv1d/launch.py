"""Launching the causal convolution: a kernel for decode steps, and one for ragged sequences and all states."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.launching import VECTOR, ceil_div, cuda_kernel
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound

_SOURCE = Path(__file__).with_name("causal_conv1d.cu")
# Threads of a block, channels of a thread in the decode kernel, and the taps of the kernels on vectors.
_THREADS, _CHANNELS = constants(_SOURCE, "THREADS", "CHANNELS")
(_TAPS,) = constants(INCLUDE_DIR / "causal_conv.cuh", "TAPS")
# Rows of a thread in turn. Longer chunks read fewer rows twice (W - 1 a chunk), shorter ones fill the device.
_ROWS_PER_CHUNK = 16
_NULL = 0


def _plan(
    bound: Bound, entries: Mapping[str, EntryResources], *, is_ragged: bool
) -> LaunchPlan | tuple[LaunchPlan, ...]:
    views, dims = bound.views, bound.dims
    sequences, channels, taps = dims["S"], dims["C"], dims["W"]
    rows = dims["M"] if is_ragged else sequences
    if rows == 0:  # no state moves
        return ()
    width = VECTOR if taps == _TAPS and channels % VECTOR == 0 else 1
    rows_per_chunk = max(_ROWS_PER_CHUNK, taps - 1)
    chunks = rows // rows_per_chunk + sequences if is_ragged else sequences
    blocks = ceil_div(channels // width, _THREADS)
    if width > 1 and not is_ragged:
        blocks = ceil_div(channels // _CHANNELS, _THREADS)
        arrays = (views[name] for name in ("x", "weight", "state", "slots", "out"))
        return LaunchPlan("causal_conv1d_decode", (chunks * blocks, 1, 1), (*arrays, dims["R"], channels, blocks))
    cu_rows = views["cu_rows"] if is_ragged else _NULL
    tensors = (views["x"], cu_rows, views["weight"], views["state"], views["slots"], views["out"])
    sizes = (rows, sequences, dims["R"], channels, taps, rows_per_chunk, blocks)
    return LaunchPlan(
        f"causal_conv1d_w{width}", (chunks * blocks, 1, 1), (*tensors, views.get("out_states", _NULL), *sizes)
    )


_kernel = partial(
    cuda_kernel,
    _SOURCE,
    (
        *(EntryPoint(f"causal_conv1d_w{width}", ("ptr",) * 7 + ("i32",) * 7) for width in (1, 8)),
        EntryPoint("causal_conv1d_decode", ("ptr",) * 5 + ("i32",) * 3),
    ),
)
UPDATE = _kernel(partial(_plan, is_ragged=False))
RAGGED = _kernel(partial(_plan, is_ragged=True))
