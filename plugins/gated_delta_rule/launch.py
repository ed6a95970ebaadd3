"""Launching the gated delta rule: row by row, with the norm of a decode step, and in chunks."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.workspace import Scratch

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]

# The sizes of all models. Other sizes take the simple kernels.
KEY_DIM, COLUMNS = constants(_FOLDER / "delta_rule.cuh", "KEY_DIM", "COLUMNS")
(VALUE_DIM,) = constants(_FOLDER / "decode_norm.cu", "VALUE_DIM")
_SIZES = ("key_heads", "key_dim", "value_heads", "value_dim")
# From so many heads on a block has half of a head, with fewer a quarter. H200, after a convolution, us, quarter / half:
# 64 heads 5.61 / 6.56, 96 7.26 / 8.15, 128 8.16 / 8.15, 192 11.40 / 11.12, 512 23.21 / 22.07, 768 32.42 / 30.67.
_LARGE_M_HEADS = 128
_NO_ARRAY = 0  # a null pointer
_MAX_BLOCKS = 2**16 - 1  # of a grid, in its second and third dimension


def _sizes(bound: Bound) -> tuple[int, ...]:
    return tuple(int(bound.dims[name]) for name in _SIZES)


def _check(heads: int, sequences: int) -> None:
    """Raise ContractError above the limits of a grid, which are also those of the FP32 division in delta_rule.cuh."""
    if max(heads, sequences) > _MAX_BLOCKS:
        raise ContractError(
            f"gated_delta_rule: {heads} heads of {sequences} sequences, expected at most {_MAX_BLOCKS} of each"
        )


def _plan(bound: Bound, entries: Entries) -> LaunchPlan | tuple[LaunchPlan, ...]:
    """Plan a launch without a norm: sequences of ``cu_rows``, else one row each, else (chunks) all rows of one."""
    dims, views = bound.dims, bound.views
    is_chunk = "S" not in dims
    sequences = 1 if is_chunk else dims["S"]
    rows = dims.get("M", sequences)
    arrays = tuple(views[name] for name in ("qkv", "decay", "beta", "state", "slots"))
    _check(dims["value_heads"], sequences)
    heads = sequences * dims["value_heads"]
    if not heads:
        return ()  # a pool without sequences
    is_128 = dims["key_dim"] == KEY_DIM and dims["value_dim"] % COLUMNS == 0
    grid = (dims["value_dim"] // COLUMNS, dims["value_heads"], sequences) if is_128 else (heads, 1, 1)
    if is_128 and "cu_rows" not in views and not is_chunk:
        return LaunchPlan("delta_rule_decode_128", grid, (*arrays, views["out"], dims["R"], *_sizes(bound)))
    optional = tuple(views.get(name, _NO_ARRAY) for name in ("cu_rows", "out", "out_states"))
    arguments = (*arrays, *optional, rows, dims["R"], rows if is_chunk else 1, *_sizes(bound))
    return LaunchPlan(f"delta_rule_{'rows_128' if is_128 else 'any'}", grid, arguments)


def _plan_norm(bound: Bound, entries: Entries) -> LaunchPlan | tuple[LaunchPlan, ...]:
    dims, views = bound.dims, bound.views
    arrays = (views[name] for name in ("qkv", "decay", "beta", "gate", "norm_weight", "state", "slots", "out"))
    is_bf16 = int(views["norm_weight"].dtype == numpy_dtype("bf16"))
    arguments = (*arrays, float(bound.arguments["eps"]), is_bf16, dims["R"], *_sizes(bound))
    _check(dims["value_heads"], dims["S"])
    heads = dims["S"] * dims["value_heads"]
    if not heads:
        return ()
    if (dims["key_dim"], dims["value_dim"]) != (KEY_DIM, VALUE_DIM):
        return LaunchPlan("delta_rule_norm_any", (heads, 1, 1), arguments)
    entry = f"delta_rule_norm_{'large' if heads >= _LARGE_M_HEADS else 'small'}_m_128"
    cluster = entries[entry].cluster
    return LaunchPlan(entry, (cluster[0] if cluster else 1, dims["value_heads"], dims["S"]), arguments)


# Rows of a chunk, its bytes between the launches (of a value head, of a key head), and the shared memory of both
# launches. The sources assert these sizes.
(_CHUNK,), _CHUNK_BYTES, _TILES_BYTES = constants(_FOLDER / "chunked.cuh", "CHUNK"), 21760, 32768
_INTRA_BYTES, _INTER_BYTES = 57088, 99600
# Chunks of a head in scratch memory at a time: 78 MB with 32 value heads and 16 key heads.
_MAX_CHUNKS = 64


def _plan_chunked(bound: Bound, entries: Entries) -> tuple[LaunchPlan, ...]:
    """Plan pairs of launches, each over a range of chunk indices (first_chunk_index in chunked.cuh)."""
    dims, views = bound.dims, bound.views
    if dims["key_dim"] != KEY_DIM or dims["value_dim"] % COLUMNS:
        raise ContractError(
            f"gated_delta_rule_prefill_chunked: key_dim is {dims['key_dim']} and value_dim {dims['value_dim']}, "
            f"expected {KEY_DIM} and a multiple of {COLUMNS}"
        )
    _check(dims["value_heads"], dims["S"])
    rows, heads = dims["M"], dims["value_heads"]
    places = rows // _CHUNK + dims["S"] if rows and dims["S"] else 0
    qkv, decay, beta, state, slots, cu_rows, out = (
        views[name] for name in ("qkv", "decay", "beta", "state", "slots", "cu_rows", "out")
    )
    most = min(places, _MAX_CHUNKS)
    chunks = Scratch(most * heads * _CHUNK_BYTES, "chunks")
    tiles = Scratch(most * dims["key_heads"] * _TILES_BYTES, "tiles")
    sizes = (dims["key_heads"], heads, dims["value_dim"])
    plans = []
    for first in range(0, places, _MAX_CHUNKS):
        last = min(first + _MAX_CHUNKS, places)
        intra = (qkv, decay, beta, cu_rows, chunks, tiles, rows, dims["S"], first, *sizes)
        inter = (qkv, state, slots, cu_rows, chunks, tiles, out, rows, first, last, dims["R"], *sizes)
        grids = (last - first) * heads, dims["S"] * heads * dims["value_dim"] // COLUMNS
        plans += [
            LaunchPlan("delta_rule_intra_chunk", (grids[0], 1, 1), intra, dynamic_shared_bytes=_INTRA_BYTES),
            LaunchPlan("delta_rule_inter_chunk", (grids[1], 1, 1), inter, dynamic_shared_bytes=_INTER_BYTES),
        ]
    return tuple(plans)


_kernel = partial(CudaKernel, include_dirs=(INCLUDE_DIR,))
_PLAIN = ("ptr",) * 8 + ("i32",) * 7
_NORM = ("ptr",) * 8 + ("f32",) + ("i32",) * 6
DELTA_RULE = _kernel(
    _FOLDER / "gated_delta_rule.cu",
    (
        EntryPoint("delta_rule_decode_128", ("ptr",) * 6 + ("i32",) * 5),
        EntryPoint("delta_rule_rows_128", _PLAIN),
        EntryPoint("delta_rule_any", _PLAIN),
    ),
    _plan,
)
DECODE_NORM = _kernel(
    _FOLDER / "decode_norm.cu",
    tuple(EntryPoint(f"delta_rule_norm_{size}", _NORM) for size in ("small_m_128", "large_m_128", "any")),
    _plan_norm,
)
CHUNKED = _kernel(
    _FOLDER / "chunked.cu",
    (
        EntryPoint("delta_rule_intra_chunk", ("ptr",) * 6 + ("i32",) * 6, _INTRA_BYTES),
        EntryPoint("delta_rule_inter_chunk", ("ptr",) * 7 + ("i32",) * 7, _INTER_BYTES),
    ),
    _plan_chunked,
)
