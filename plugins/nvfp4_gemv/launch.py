"""Launching the GEMV kernels: which split of K serves a shape, and the arguments of each form."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import ceil_div, multiprocessors_of
from kernel_muster.plugins._cuda.nvfp4_layout import TILE_K, TILE_N
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan, row_stride
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import ArrayView, view_of
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]

# Splits that entry points exist for (splits.cuh), by depth; measured on an H200 (records/), cold L2. Where there are
# few tiles, more warps share one.
_STATIC_K = (2048, 4096, 5120, 6144, 17408)
_FEW_AT_K, FEW_FEATURES = (2048, 5120), 1024
_INPUT_SPLITS = ("any", "k2048_few", "k2048", "k5120_few", "k5120", "k5120_pair")  # all forms have these
_GDN_IN_SPLITS = ("any", "k2048", "k5120_few", "k5120", "k5120_pair")
_SPLITS = (*_INPUT_SPLITS, "k2048_pair", "k4096", "k6144", "k17408")
_SPLITS_8, _SPLITS_16 = (*_SPLITS, "k4096_early"), (*_SPLITS, "k5120_many")
# gemv_resident.cuh: splits with an entry point for very many features on Hopper, and its shared memory for their sums.
_RESIDENT, _RESIDENT_ROWS, _RESIDENT_SUMS = ("k2048", "k5120"), 16, 36864
# gemv_wide.cu: which of its entry points sums K as a split does, and those of two tiles a warp.
_WIDE = {"k2048": "4_pair", "k5120": "4_pair", "k6144": "4x2", "k17408": "4x2", "k5120_few": "10x2"}
_WIDE_ENTRIES = ("any", "8", "8_pair", "2", "2_pair", "4_pair", "4x2", "10x2")
_WIDE_ROWS = 32  # of a block
# Two splits of gemv_parts.cu whose blocks are of one size; others that differ are two launches.
_K2048_AND_FEW = "k2048_and_few"
# What stands in each place of gemv_parts.cu.
_WEIGHTS = (("w",), ("w_a",), ("w_b",))
_OUTPUTS = (("out_q", "out_qkv"), ("out_gate", "out_z"), ("out_a",), ("out_b",))
_JOINT_SPLITS = ("any", "k2048_few", "k2048", "k5120_few", "k5120")
# From so many features on it no longer counts how evenly the last tiles fill the device.
_MANY_FEATURES = 100_000
# So few that each multiprocessor of an H200 has one tile at most, whose warps may use all registers.
_ONE_PER_MULTIPROCESSOR = 132 * TILE_N
# gemv_gdn_in.cu: heads whose gates a block makes.
GATE_HEADS = 4


def split_of(features: int, depth: int) -> str:
    """Return the split of K for N features of depth K. Never a function of M: rows must not depend on each other."""
    if depth not in _STATIC_K:
        return "any"
    return f"k{depth}_few" if depth in _FEW_AT_K and features <= FEW_FEATURES else f"k{depth}"


def split_alone(features: int, depth: int) -> str:
    """Return the split of K for one weight in a launch of its own.

    It is that of two such weights in one launch: key and value are projected together at few rows and one by one at
    more, and a row must not depend on that. At 1024 x 5120 the rule for one weight alone was another one.
    """
    return split_of(2 * features, depth)


def shape_of(features: int, depth: int, rows: int, split: str | None = None) -> tuple[str, int]:
    """Return which entry point of a split serves up to 8 rows, or up to 16, and how many tiles a warp of it takes.

    ``split`` is that of one weight alone; without it, that of so many features in one launch.

    Two tiles a warp read x once, and their blocks are fewer and live longer: of an H200's multiprocessors each holds
    four. Where a block has a multiprocessor for itself, its warps decode weights before they wait for the launch ahead.
    No bit of a result depends on it.
    """
    split = split or split_of(features, depth)
    if split == "k5120":
        if features >= _MANY_FEATURES and rows == 16:
            return "k5120_many", 2
        # one tile a warp: five blocks a multiprocessor, four from nine rows on
        return ("k5120_pair", 2) if (10560 if rows == 8 else 8448) < features <= 16896 else (split, 1)
    if split == "k2048" and features > (12672 if rows == 8 else 10560):
        return "k2048_pair", 2
    if split == "k4096" and rows == 8 and features <= _ONE_PER_MULTIPROCESSOR:
        return "k4096_early", 1
    return split, 1


def _entries(form: str, parameters: tuple[str, ...], splits: Iterable[str], rows: int = 8) -> tuple[EntryPoint, ...]:
    return tuple(EntryPoint(f"{form}_{split}_m{rows}", parameters) for split in splits)


def _input_split(features: int, depth: int) -> str:
    """Return the split of K of the forms that layers' inputs go through."""
    split = split_of(features, depth)
    return split if split in _INPUT_SPLITS else "any"


def _grid(entries: Entries, entry: str, tiles: int) -> tuple[int, int, int]:
    cluster = entries[entry].cluster
    return (tiles * (cluster[0] if cluster else 1), 1, 1)


def _tiles(features: int, share: int = 1) -> int:
    """Return the tiles of 16 features, or the groups of so many that a warp takes."""
    return -(-features // (share * TILE_N))


def _x(bound: Bound) -> tuple[ArrayView, int]:
    x = bound.views["x"]
    stride = row_stride(x)
    if stride % 8:
        raise ContractError(f"x has rows {stride} elements apart, expected a multiple of 8 (16 bytes): copy the slice")
    return x, stride


def _plan_gemv(rows: int, bound: Bound, entries: Entries) -> LaunchPlan:
    (x, stride), weight, dims = _x(bound), bound.arguments["w"], bound.dims
    shape, share = shape_of(dims["N"], dims["K"], rows, split_alone(dims["N"], dims["K"]))
    entry = f"gemv_{shape}_m{rows}"
    arguments = (view_of(weight.data), x, bound.views["out"], weight.global_scale_decode, stride)
    sizes = (dims["M"], dims["N"], dims["K"])
    return LaunchPlan(entry, _grid(entries, entry, _tiles(dims["N"], share)), (*arguments, *sizes))


def _input_form(features: int, depth: int) -> tuple[str, int]:
    """Return the split that features of a layer's input go through, and how many tiles a warp takes."""
    shape, share = shape_of(features, depth, 8)
    return (shape, share) if shape in _INPUT_SPLITS else (_input_split(features, depth), 1)


def _parts(
    bound: Bound, entries: Entries, form: tuple[str, int], rows: tuple[int, int, int], head: tuple[int, int] = (1, 0)
) -> LaunchPlan:
    """Return the launch of gemv_parts.cu for a split, the tiles that a warp takes, and the rows of its weights.

    ``head`` is the key and value dimension of the weight whose rows stand head by head.
    """
    (x, stride), (split, share), dims = _x(bound), form, bound.dims
    weights, outputs = _given(bound.arguments, _WEIGHTS), _given(bound.views, _OUTPUTS)
    scales = (weight.global_scale_decode for weight in weights)
    shares = (2 if split == _K2048_AND_FEW else share, share, share)
    tiles = sum(_tiles(features, each) for features, each in zip(rows, shares, strict=True))
    tensors = (*(view_of(weight.data) for weight in weights), x)
    entry = f"gemv_parts_{split}_m8"
    arguments = (*tensors, *rows, dims["K"], dims["M"], stride, *outputs, *scales, *head)
    return LaunchPlan(entry, _grid(entries, entry, tiles), arguments)


def _given(arguments: Mapping[str, Any], names: tuple[tuple[str, ...], ...]) -> list[Any]:
    """Return one argument for each place; what is missing has no rows, and any other may stand there."""
    found = [next((arguments[name] for name in each if name in arguments), None) for each in names]
    there = next(one for one in found if one is not None)
    return [there if one is None else one for one in found]


def _resident_bytes(depth: int) -> int:
    """Return the shared memory of a block that keeps x."""
    return 2 * _RESIDENT_ROWS * depth + _RESIDENT_SUMS


def _plan_gemv16_hopper(bound: Bound, entries: Entries) -> LaunchPlan:
    dims = bound.dims
    split = split_alone(dims["N"], dims["K"])
    if dims["N"] < _MANY_FEATURES or split not in _RESIDENT:
        return _plan_gemv(16, bound, entries)
    (x, stride), weight = _x(bound), bound.arguments["w"]
    arguments = (view_of(weight.data), x, bound.views["out"], weight.global_scale_decode, stride)
    grid, shared = (multiprocessors_of(x.device), 1, 1), _resident_bytes(dims["K"])
    sizes = (dims["M"], dims["N"], dims["K"])
    return LaunchPlan(f"gemv_{split}_resident_m16", grid, (*arguments, *sizes), dynamic_shared_bytes=shared)


def wide_of(features: int, depth: int, rows: int) -> tuple[str, int]:
    """Return which entry point of gemv_wide.cu serves a shape, and how many tiles a warp of it takes.

    Its warps add up K as those of the shape's split do.
    """
    entry = _WIDE.get(split_alone(features, depth))
    if entry is None and depth % TILE_K:
        entry = "any"
    elif entry is None:
        warps, most = ("2", 2 * _ONE_PER_MULTIPROCESSOR) if depth <= 2 * TILE_K else ("8", _ONE_PER_MULTIPROCESSOR)
        blocks = _tiles(features) * ceil_div(rows, _WIDE_ROWS)
        entry = warps + ("_pair" if blocks * TILE_N > most else "")
    return entry, 2 if entry.endswith("_pair") else 1


def _plan_wide(bound: Bound, entries: Entries) -> LaunchPlan:
    (x, stride), weight, dims = _x(bound), bound.arguments["w"], bound.dims
    name, share = wide_of(dims["N"], dims["K"], dims["M"])
    entry = f"gemv_wide_{name}"
    arguments = (view_of(weight.data), x, bound.views["out"], weight.global_scale_decode, stride)
    blocks, _, _ = _grid(entries, entry, _tiles(dims["N"], share))
    grid = (blocks, ceil_div(dims["M"], _WIDE_ROWS), 1)
    return LaunchPlan(entry, grid, (*arguments, dims["M"], dims["N"], dims["K"]))


def _plan_qg(bound: Bound, entries: Entries) -> LaunchPlan:
    features = 2 * bound.dims["Q"]
    form = _input_form(features, bound.dims["K"])
    return _parts(bound, entries, form, (features, 0, 0), (bound.dims["head_dim"], 0))


def _plan_qkvz(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, features = bound.dims, bound.arguments["w"].shape[0]
    head = (dims["key_dim"], dims["value_heads"] // dims["key_heads"] * dims["value_dim"])
    return _parts(bound, entries, _input_form(features, dims["K"]), (features, 0, 0), head)


def _plan_dual(bound: Bound, entries: Entries) -> LaunchPlan:
    a, b = bound.dims["A"], bound.dims["B"]
    return _parts(bound, entries, _input_form(a + b, bound.dims["K"]), (0, a, b))


def _plan_qgkv(bound: Bound, entries: Entries) -> LaunchPlan | tuple[LaunchPlan, ...]:
    dims, depth = bound.dims, bound.dims["K"]
    rows = (2 * dims["Q"], dims["A"], dims["B"])
    splits = (_input_split(rows[0], depth), _input_split(rows[1] + rows[2], depth))
    if splits == ("k2048", "k2048_few"):
        form = (_K2048_AND_FEW, 1)
    elif splits[0] != splits[1]:
        return _plan_qg(bound, entries), _plan_dual(bound, entries)
    else:
        form = _input_form(sum(rows), depth) if splits[0] == "k5120" else (splits[0], 1)
    return _parts(bound, entries, form, rows, (dims["head_dim"], 0))


def _plan_gdn_in(bound: Bound, entries: Entries) -> LaunchPlan | tuple[LaunchPlan, ...]:
    views, dims, weight = bound.views, bound.dims, bound.arguments["w"]
    if dims["M"] == 0:  # no state moves
        return ()
    features, heads = weight.shape[0], dims["value_heads"]
    split, share = _input_form(features, dims["K"])
    if split not in _GDN_IN_SPLITS:
        split = "any"  # which splits few features of 2048 alike
    entry = f"gemv_gdn_in_{split}_m8"
    # Blocks of the gates come first, to begin first; whole clusters of them.
    ranks = _grid(entries, entry, 1)[0]
    gate_blocks = ceil_div(ceil_div(heads, GATE_HEADS), ranks) * ranks
    names = ("w_ba", "x", "a_log", "dt_bias", "conv_weight", "state", "slots")
    tensors = (*(views[name] for name in (*names, "out_qkv", "out_z", "out_decay", "out_beta")),)
    sizes = (dims["M"], dims["K"], dims["key_heads"], dims["key_dim"], heads // dims["key_heads"] * dims["value_dim"])
    arguments = (view_of(weight.data), *tensors, weight.global_scale_decode, *sizes, heads, dims["R"], gate_blocks)
    return LaunchPlan(entry, (gate_blocks + _tiles(features, share) * ranks, 1, 1), arguments)


def _plan_dual_silu(bound: Bound, entries: Entries) -> LaunchPlan:
    (x, stride), dims = _x(bound), bound.dims
    gate, up = bound.arguments["w_gate"], bound.arguments["w_up"]
    # As two weights have it that are projected in one launch.
    entry = f"gemv_dual_silu_{_input_split(2 * dims['N'], dims['K'])}_m8"
    scales = (gate.global_scale_decode, up.global_scale_decode)
    sizes = (dims["M"], dims["N"], dims["K"])
    arguments = (view_of(gate.data), view_of(up.data), x, bound.views["out"], *scales, stride, *sizes)
    return LaunchPlan(entry, _grid(entries, entry, _tiles(dims["N"])), arguments)


_kernel = partial(CudaKernel, include_dirs=(INCLUDE_DIR,), strided=frozenset({"x"}))
_GEMV = ("ptr", "ptr", "ptr", "f32", "i32", "i32", "i32", "i32")
GEMV8 = _kernel(_FOLDER / "gemv.cu", _entries("gemv", _GEMV, _SPLITS_8), partial(_plan_gemv, 8))
GEMV_WIDE = _kernel(
    _FOLDER / "gemv_wide.cu", tuple(EntryPoint(f"gemv_wide_{name}", _GEMV) for name in _WIDE_ENTRIES), _plan_wide
)
GEMV16 = _kernel(_FOLDER / "gemv16.cu", _entries("gemv", _GEMV, _SPLITS_16, 16), partial(_plan_gemv, 16))
GEMV16_HOPPER = _kernel(
    _FOLDER / "gemv16.cu",
    (
        *_entries("gemv", _GEMV, _SPLITS, 16),
        *(EntryPoint(f"gemv_{split}_resident_m16", _GEMV, _resident_bytes(int(split[1:]))) for split in _RESIDENT),
    ),
    _plan_gemv16_hopper,
    options=("-DRESIDENT",),
)
_PARTS = _entries(
    "gemv_parts",
    ("ptr",) * 4 + ("i32",) * 6 + ("ptr",) * 4 + ("f32",) * 3 + ("i32",) * 2,
    (*_INPUT_SPLITS, _K2048_AND_FEW),
)
QG, QKVZ, DUAL, QGKV = (
    _kernel(_FOLDER / "gemv_parts.cu", _PARTS, planner) for planner in (_plan_qg, _plan_qkvz, _plan_dual, _plan_qgkv)
)
GDN_IN = CudaKernel(
    _FOLDER / "gemv_gdn_in.cu",
    _entries("gemv_gdn_in", ("ptr",) * 12 + ("f32",) + ("i32",) * 8, _GDN_IN_SPLITS),
    _plan_gdn_in,
    include_dirs=(INCLUDE_DIR,),
)
DUAL_SILU = _kernel(
    _FOLDER / "gemv_dual_silu.cu",
    _entries("gemv_dual_silu", ("ptr",) * 4 + ("f32",) * 2 + ("i32",) * 4, _JOINT_SPLITS),
    _plan_dual_silu,
)
