"""Launching the GEMV kernels: which split of K serves a shape, and the arguments of each form."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import ceil_div
from kernel_muster.plugins._cuda.nvfp4_layout import TILE_N
from kernel_muster.registry.arrays import ArrayView, view_of
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan, row_stride
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]

# Splits that entry points exist for (splits.cuh), by depth; measured on an H200 (records/), cold L2. Where there are
# few tiles, more warps share one.
_STATIC_K = (2048, 4096, 5120, 6144, 17408)
_FEW_AT_K, FEW_FEATURES = (2048, 5120), 1024
_INPUT_SPLITS = ("any", "k2048_few", "k2048", "k5120_few", "k5120", "k5120_pair")  # all forms have these
_SPLITS = (*_INPUT_SPLITS, "k2048_pair", "k4096", "k6144", "k17408")
_SPLITS_8, _SPLITS_16 = (*_SPLITS, "k4096_early"), (*_SPLITS, "k5120_many")
# Query and gate with key and value, by the splits of both; splits that no block suits are two launches.
_QGKV_SPLITS = {
    ("any", "any"): "any",
    ("k2048_few", "k2048_few"): "k2048_few",
    ("k2048", "k2048_few"): "k2048_and_few",
    ("k2048", "k2048"): "k2048",
    ("k5120", "k5120"): "k5120",
}
_QGKV_APART = {
    "qg": ("k2048_few", "k5120_few", "k5120", "k5120_pair"),
    "dual": ("k2048", "k5120_few", "k5120", "k5120_pair"),
}
_JOINT_SPLITS = ("any", "k2048_few", "k2048", "k5120_few", "k5120")
# From so many features on it no longer counts how evenly the last tiles fill the device.
_MANY_FEATURES = 100_000
# So few that each multiprocessor of an H200 has one tile at most, whose warps may use all registers.
_ONE_A_MULTIPROCESSOR = 132 * TILE_N
# BF16 weights of so few features (gates, routers) are shared by the blocks of a cluster; like the split, by N alone.
DENSE_FEW_FEATURES = 512
# gemv_gdn_in.cu: heads whose gates a block makes.
GATE_HEADS = 4


def split_of(features: int, depth: int) -> str:
    """Return the split of K for N features of depth K. Never a function of M: rows must not depend on each other."""
    if depth not in _STATIC_K:
        return "any"
    return f"k{depth}_few" if depth in _FEW_AT_K and features <= FEW_FEATURES else f"k{depth}"


def shape_of(features: int, depth: int, rows: int) -> tuple[str, int]:
    """Return which entry point of a split serves up to 8 rows, or up to 16, and how many tiles a warp of it takes.

    Two tiles a warp read x once, and their blocks are fewer and live longer: of an H200's multiprocessors each holds
    four. Where a block has a multiprocessor for itself, its warps decode weights before they wait for the launch ahead.
    No bit of a result depends on it.
    """
    split = split_of(features, depth)
    if split == "k5120":
        if features >= _MANY_FEATURES and rows == 16:
            return "k5120_many", 2
        # one tile a warp: five blocks a multiprocessor, four from nine rows on
        return ("k5120_pair", 2) if (10560 if rows == 8 else 8448) < features <= 16896 else (split, 1)
    if split == "k2048" and features > (12672 if rows == 8 else 10560):
        return "k2048_pair", 2
    if split == "k4096" and rows == 8 and features <= _ONE_A_MULTIPROCESSOR:
        return "k4096_early", 1
    return split, 1


def _entries(form: str, parameters: tuple[str, ...], rows: int) -> tuple[EntryPoint, ...]:
    splits = _INPUT_SPLITS if form != "gemv" else _SPLITS_8 if rows == 8 else _SPLITS_16
    return tuple(EntryPoint(f"{form}_{split}_m{rows}", parameters) for split in splits)


def _entry(form: str, features: int, depth: int, rows: int) -> tuple[str, int]:
    """Return the entry point that serves a shape, and how many tiles a warp of it takes."""
    shape, share = shape_of(features, depth, rows)
    if form != "gemv" and shape not in _INPUT_SPLITS:
        shape, share = _input_split(features, depth), 1
    return f"{form}_{shape}_m{rows}", share


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
    entry, share = _entry("gemv", dims["N"], dims["K"], rows)
    arguments = (view_of(weight.data), x, bound.views["out"], weight.global_scale_decode, stride)
    sizes = (dims["M"], dims["N"], dims["K"])
    return LaunchPlan(entry, _grid(entries, entry, _tiles(dims["N"], share)), (*arguments, *sizes))


def _plan_qg(bound: Bound, entries: Entries) -> LaunchPlan:
    (x, stride), weight, dims = _x(bound), bound.arguments["w"], bound.dims
    entry, share = _entry("gemv_qg", 2 * dims["Q"], dims["K"], 8)
    outputs = (bound.views["out_q"], bound.views["out_gate"])
    sizes = (dims["M"], dims["Q"], dims["K"], dims["head_dim"])
    arguments = (view_of(weight.data), x, *outputs, weight.global_scale_decode, stride, *sizes)
    return LaunchPlan(entry, _grid(entries, entry, _tiles(2 * dims["Q"], share)), arguments)


def _plan_qkvz(bound: Bound, entries: Entries) -> LaunchPlan:
    (x, stride), weight, dims = _x(bound), bound.arguments["w"], bound.dims
    features = weight.shape[0]
    entry, share = _entry("gemv_qkvz", features, dims["K"], 8)
    group_values = dims["value_heads"] // dims["key_heads"] * dims["value_dim"]
    outputs = (bound.views["out_qkv"], bound.views["out_z"])
    sizes = (dims["M"], dims["K"], dims["key_heads"], dims["key_dim"], group_values)
    arguments = (view_of(weight.data), x, *outputs, weight.global_scale_decode, stride, *sizes)
    return LaunchPlan(entry, _grid(entries, entry, _tiles(features, share)), arguments)


def _plan_gdn_in(bound: Bound, entries: Entries) -> LaunchPlan | tuple[LaunchPlan, ...]:
    views, dims, weight = bound.views, bound.dims, bound.arguments["w"]
    if dims["M"] == 0:  # no state moves
        return ()
    features, heads = weight.shape[0], dims["value_heads"]
    entry, share = _entry("gemv_gdn_in", features, dims["K"], 8)
    # Blocks of the gates come first, to begin first; whole clusters of them.
    ranks = _grid(entries, entry, 1)[0]
    gate_blocks = ceil_div(ceil_div(heads, GATE_HEADS), ranks) * ranks
    names = ("w_ba", "x", "a_log", "dt_bias", "conv_weight", "state", "slots")
    tensors = (*(views[name] for name in (*names, "out_qkv", "out_z", "out_decay", "out_beta")),)
    sizes = (dims["K"], dims["key_heads"], dims["key_dim"], heads // dims["key_heads"] * dims["value_dim"])
    arguments = (view_of(weight.data), *tensors, weight.global_scale_decode, *sizes, heads, dims["R"], gate_blocks)
    return LaunchPlan(entry, (gate_blocks + _tiles(features, share) * ranks, 1, 1), arguments)


def _plan_dual(bound: Bound, entries: Entries) -> LaunchPlan:
    (x, stride), dims = _x(bound), bound.dims
    a, b = bound.arguments["w_a"], bound.arguments["w_b"]
    entry, share = _entry("gemv_dual", dims["A"] + dims["B"], dims["K"], 8)
    outputs = (bound.views["out_a"], bound.views["out_b"])
    scales = (a.global_scale_decode, b.global_scale_decode)
    sizes = (dims["M"], dims["A"], dims["B"], dims["K"])
    arguments = (view_of(a.data), view_of(b.data), x, *outputs, *scales, stride, *sizes)
    return LaunchPlan(entry, _grid(entries, entry, _tiles(dims["A"], share) + _tiles(dims["B"], share)), arguments)


def _plan_qgkv(bound: Bound, entries: Entries) -> LaunchPlan | tuple[LaunchPlan, ...]:
    (x, stride), dims, depth = _x(bound), bound.dims, bound.dims["K"]
    rows = (2 * dims["Q"], dims["A"], dims["B"])
    form = _QGKV_SPLITS.get((_input_split(rows[0], depth), _input_split(rows[1] + rows[2], depth)))
    if form is None:
        return _plan_qg(bound, entries), _plan_dual(bound, entries)
    if form == "k5120":
        form, _ = shape_of(sum(rows), depth, 8)
    share = 2 if form == "k5120_pair" else 1
    weights = [bound.arguments[name] for name in ("w", "w_a", "w_b")]
    tensors = (*(view_of(weight.data) for weight in weights), x)
    outputs = (*(bound.views[name] for name in ("out_q", "out_gate", "out_a", "out_b")),)
    scales = (*(weight.global_scale_decode for weight in weights), stride)
    sizes = (*(dims[name] for name in ("M", "Q", "A", "B", "K", "head_dim")),)
    # Two tiles of query and gate share a block of k2048_and_few.
    shares = (2 if form == "k2048_and_few" else share, share, share)
    blocks = sum(_tiles(features, each) for features, each in zip(rows, shares, strict=True))
    return LaunchPlan(f"gemv_qgkv_{form}_m8", (blocks, 1, 1), (*tensors, *outputs, *scales, *sizes))


def _plan_dual_silu(bound: Bound, entries: Entries) -> LaunchPlan:
    (x, stride), dims = _x(bound), bound.dims
    gate, up = bound.arguments["w_gate"], bound.arguments["w_up"]
    # As two weights have it that are projected in one launch.
    entry = f"gemv_dual_silu_{_input_split(2 * dims['N'], dims['K'])}_m8"
    scales = (gate.global_scale_decode, up.global_scale_decode)
    sizes = (dims["M"], dims["N"], dims["K"])
    arguments = (view_of(gate.data), view_of(up.data), x, bound.views["out"], *scales, stride, *sizes)
    return LaunchPlan(entry, _grid(entries, entry, _tiles(dims["N"])), arguments)


def plan_dense(name: str, bound: Bound, entries: Entries) -> LaunchPlan:
    """Return the launch for at most 16 rows: ``name_few_m8`` and its like, of dense_gemv.cuh."""
    (x, stride), dims = _x(bound), bound.dims
    weight = view_of(bound.arguments["w"].values)
    if not weight.is_contiguous:
        raise ContractError(f"w has strides {weight.strides}, expected rows without gaps")
    few = "few_" if dims["N"] <= DENSE_FEW_FEATURES else ""
    entry = f"{name}_{few}m{8 if dims['M'] <= 8 else 16}"
    arguments = (weight, x, bound.views["out"], stride, dims["M"], dims["N"], dims["K"])
    return LaunchPlan(entry, _grid(entries, entry, _tiles(dims["N"])), arguments)


def dense_entries(name: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of dense_gemv.cuh under a name."""
    parameters = ("ptr",) * 3 + ("i32",) * 4
    return tuple(EntryPoint(f"{name}_{few}m{rows}", parameters) for few in ("", "few_") for rows in (8, 16))


_kernel = partial(CudaKernel, include_dirs=(INCLUDE_DIR,), strided=frozenset({"x"}))
_GEMV = ("ptr", "ptr", "ptr", "f32", "i32", "i32", "i32", "i32")
GEMV8 = _kernel(_FOLDER / "gemv.cu", _entries("gemv", _GEMV, 8), partial(_plan_gemv, 8))
GEMV16 = _kernel(_FOLDER / "gemv16.cu", _entries("gemv", _GEMV, 16), partial(_plan_gemv, 16))
_QG, _DUAL = ("ptr",) * 4 + ("f32",) + ("i32",) * 5, ("ptr",) * 5 + ("f32",) * 2 + ("i32",) * 5
QG = _kernel(_FOLDER / "gemv_qg.cu", _entries("gemv_qg", _QG, 8), _plan_qg)
QKVZ = _kernel(_FOLDER / "gemv_qkvz.cu", _entries("gemv_qkvz", ("ptr",) * 4 + ("f32",) + ("i32",) * 6, 8), _plan_qkvz)
GDN_IN = CudaKernel(
    _FOLDER / "gemv_gdn_in.cu",
    _entries("gemv_gdn_in", ("ptr",) * 12 + ("f32",) + ("i32",) * 7, 8),
    _plan_gdn_in,
    include_dirs=(INCLUDE_DIR,),
)
DUAL = _kernel(_FOLDER / "gemv_dual.cu", _entries("gemv_dual", _DUAL, 8), _plan_dual)
QGKV = _kernel(
    _FOLDER / "gemv_qgkv.cu",
    (
        *(
            EntryPoint(f"gemv_qgkv_{form}_m8", ("ptr",) * 8 + ("f32",) * 3 + ("i32",) * 7)
            for form in (*_QGKV_SPLITS.values(), "k5120_pair")
        ),
        *(EntryPoint(f"gemv_qg_{split}_m8", _QG) for split in _QGKV_APART["qg"]),
        *(EntryPoint(f"gemv_dual_{split}_m8", _DUAL) for split in _QGKV_APART["dual"]),
    ),
    _plan_qgkv,
)
DUAL_SILU = _kernel(
    _FOLDER / "gemv_dual_silu.cu",
    tuple(
        EntryPoint(f"gemv_dual_silu_{split}_m8", ("ptr",) * 4 + ("f32",) * 2 + ("i32",) * 4) for split in _JOINT_SPLITS
    ),
    _plan_dual_silu,
)
DENSE = _kernel(_FOLDER / "dense_gemv.cu", dense_entries("dense_gemv"), partial(plan_dense, "dense_gemv"))
