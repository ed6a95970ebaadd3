"""Launching the NVFP4 GEMV: the split of K and the tile configuration of a shape, and the arguments of each kernel."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.launching import ceil_div, multiprocessors_of
from kernel_muster.plugins._cuda.nvfp4_layout import TILE_K, TILE_N
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan, row_stride
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import ArrayView, view_of
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError

_FOLDER = Path(__file__).parent
Entries = Mapping[str, EntryResources]

# Splits of K with entry points (splits.cuh), by depth K; measured on an H200 (records/), cold L2. With small N more
# warps split K of a tile.
_STATIC_K = (2048, 4096, 5120, 6144, 17408)
_SMALL_N_DEPTHS, SMALL_N = (2048, 5120), 1024
_INPUT_SPLITS = ("any", "k2048_few", "k2048", "k5120_few", "k5120", "k5120_pair")  # of all kernels
_GDN_IN_SPLITS = ("any", "k2048", "k5120_few", "k5120", "k5120_pair")
_SPLITS = (*_INPUT_SPLITS, "k2048_pair", "k4096", "k6144", "k17408")
_SPLITS_8, _SPLITS_16 = (*_SPLITS, "k4096_early"), (*_SPLITS, "k5120_many")
# gemv_persistent.cuh: splits with a persistent kernel for large N on Hopper, and its shared memory for partials.
_PERSISTENT, _PERSISTENT_ROWS, _PERSISTENT_PARTIALS = ("k2048", "k5120"), 16, 36864
# gemv_wide.cu: the entry point with the summation order of a split, and all entry points.
_WIDE = {"k2048": "4_pair", "k5120": "4_pair", "k6144": "4x2", "k17408": "4x2", "k5120_few": "10x2"}
_WIDE_ENTRIES = ("any", "8", "8_pair", "2", "2_pair", "4_pair", "4x2", "10x2")
(_WIDE_ROWS,) = constants(_FOLDER / "gemv_wide.cu", "ROWS")  # of a block
# Two splits of gemv_parts.cu with one block size. Other different splits are two launches.
_K2048_AND_FEW = "k2048_and_few"
# The arguments of each weight and each output of gemv_parts.cu.
_WEIGHTS = (("w",), ("w_a",), ("w_b",))
_OUTPUTS = (("out_q", "out_qkv"), ("out_gate", "out_z"), ("out_a",), ("out_b",))
_JOINT_SPLITS = ("any", "k2048_few", "k2048", "k5120_few", "k5120")
# From this N on, the utilisation of the last wave does not matter.
_LARGE_N = 100_000
# By rows and split: up to this number of tiles for each multiprocessor a warp computes one tile, above two. That is the
# number of blocks that fit a multiprocessor at once, measured on an H200 (132 multiprocessors, records/h200.md).
ONE_TILE_WAVES = {8: {"k5120": 5, "k2048": 6}, 16: {"k5120": 4, "k2048": 5}}
# Above this number of tiles for each multiprocessor, two tiles a warp need a second wave.
_MOST_PAIR_TILES = 8
# Heads whose gates a block computes.
(GATE_HEADS,) = constants(_FOLDER / "gemv_gdn_in.cu", "HEADS")


def split_of(features: int, depth: int) -> str:
    """Return the split of K for N features of depth K. It never depends on M, so that rows are independent."""
    if depth not in _STATIC_K:
        return "any"
    return f"k{depth}_few" if depth in _SMALL_N_DEPTHS and features <= SMALL_N else f"k{depth}"


def split_alone(features: int, depth: int) -> str:
    """Return the split of K for one weight in a launch of its own.

    It is that of two such weights in one launch. Key and value are one launch at small M and two at larger M, and the
    bits must be the same.
    """
    return split_of(2 * features, depth)


def config_of(features: int, depth: int, rows: int, multiprocessors: int, split: str | None = None) -> tuple[str, int]:
    """Return the entry point of a split for up to 8 or up to 16 rows, and the tiles that a warp of it computes.

    ``split`` is that of one weight alone; without it, that of all features of the launch. Two tiles a warp read x once,
    and need fewer blocks, each of which runs longer: four fit a multiprocessor. With at most one block a
    multiprocessor, warps decode weights before pdl_wait. The bits are the same.
    """
    split, most_waves = split or split_of(features, depth), ONE_TILE_WAVES[rows]

    def exceeds(waves: int) -> bool:
        """Whether the tiles are more than a number of tiles for each multiprocessor."""
        return features > waves * multiprocessors * TILE_N

    if split == "k5120":
        if features >= _LARGE_N and rows == 16:
            return "k5120_many", 2
        return ("k5120_pair", 2) if exceeds(most_waves[split]) and not exceeds(_MOST_PAIR_TILES) else (split, 1)
    if split == "k2048" and exceeds(most_waves[split]):
        return "k2048_pair", 2
    if split == "k4096" and rows == 8 and not exceeds(1):
        return "k4096_early", 1
    return split, 1


def _entries(config: str, parameters: tuple[str, ...], splits: Iterable[str], rows: int = 8) -> tuple[EntryPoint, ...]:
    return tuple(EntryPoint(f"{config}_{split}_m{rows}", parameters) for split in splits)


def _input_split(features: int, depth: int) -> str:
    """Return the split of K of the kernels for layer inputs."""
    split = split_of(features, depth)
    return split if split in _INPUT_SPLITS else "any"


def _grid(entries: Entries, entry: str, tiles: int) -> tuple[int, int, int]:
    cluster = entries[entry].cluster
    return (tiles * (cluster[0] if cluster else 1), 1, 1)


def _tiles(features: int, tiles_a_warp: int = 1) -> int:
    """Return the tiles of 16 features, or the groups of tiles of a warp."""
    return -(-features // (tiles_a_warp * TILE_N))


def _multiprocessors(bound: Bound) -> int:
    return multiprocessors_of(bound.views["x"].device)


def _x(bound: Bound) -> tuple[ArrayView, int]:
    x = bound.views["x"]
    stride = row_stride(x)
    if stride % 8:
        raise ContractError(f"x has rows {stride} elements apart, expected a multiple of 8 (16 bytes): copy the slice")
    return x, stride


def _plan_gemv(rows: int, bound: Bound, entries: Entries) -> LaunchPlan:
    (x, stride), weight, dims = _x(bound), bound.arguments["w"], bound.dims
    entry_split, tiles_a_warp = config_of(
        dims["N"], dims["K"], rows, multiprocessors_of(x.device), split_alone(dims["N"], dims["K"])
    )
    entry = f"gemv_{entry_split}_m{rows}"
    arguments = (view_of(weight.data), x, bound.views["out"], weight.global_scale_decode, stride)
    sizes = (dims["M"], dims["N"], dims["K"])
    return LaunchPlan(entry, _grid(entries, entry, _tiles(dims["N"], tiles_a_warp)), (*arguments, *sizes))


def _input_config(features: int, depth: int, multiprocessors: int) -> tuple[str, int]:
    """Return the split of the kernels for layer inputs, and the tiles that a warp computes."""
    entry_split, tiles_a_warp = config_of(features, depth, 8, multiprocessors)
    return (entry_split, tiles_a_warp) if entry_split in _INPUT_SPLITS else (_input_split(features, depth), 1)


def _parts(
    bound: Bound, entries: Entries, config: tuple[str, int], rows: tuple[int, int, int], head: tuple[int, int] = (1, 0)
) -> LaunchPlan:
    """Return the launch of gemv_parts.cu for a split, the tiles of a warp, and the rows of its weights.

    ``head`` is the key and value dimension of the fused weight, whose rows are grouped by head.
    """
    (x, stride), (split, tiles_a_warp), dims = _x(bound), config, bound.dims
    weights, outputs = _present(bound.arguments, _WEIGHTS), _present(bound.views, _OUTPUTS)
    scales = (weight.global_scale_decode for weight in weights)
    widths = (2 if split == _K2048_AND_FEW else tiles_a_warp, tiles_a_warp, tiles_a_warp)
    tiles = sum(_tiles(features, each) for features, each in zip(rows, widths, strict=True))
    tensors = (*(view_of(weight.data) for weight in weights), x)
    entry = f"gemv_parts_{split}_m8"
    arguments = (*tensors, *rows, dims["K"], dims["M"], stride, *outputs, *scales, *head)
    return LaunchPlan(entry, _grid(entries, entry, tiles), arguments)


def _present(arguments: Mapping[str, Any], names: tuple[tuple[str, ...], ...]) -> list[Any]:
    """Return one argument for each weight or output. A missing weight has no rows, so that any array may be passed."""
    found = [next((arguments[name] for name in each if name in arguments), None) for each in names]
    there = next(one for one in found if one is not None)
    return [there if one is None else one for one in found]


def _persistent_bytes(depth: int) -> int:
    """Return the shared memory of a block with all of x."""
    return 2 * _PERSISTENT_ROWS * depth + _PERSISTENT_PARTIALS


def _plan_gemv16_hopper(bound: Bound, entries: Entries) -> LaunchPlan:
    dims = bound.dims
    split = split_alone(dims["N"], dims["K"])
    if dims["N"] < _LARGE_N or split not in _PERSISTENT:
        return _plan_gemv(16, bound, entries)
    (x, stride), weight = _x(bound), bound.arguments["w"]
    arguments = (view_of(weight.data), x, bound.views["out"], weight.global_scale_decode, stride)
    grid, shared = (multiprocessors_of(x.device), 1, 1), _persistent_bytes(dims["K"])
    sizes = (dims["M"], dims["N"], dims["K"])
    return LaunchPlan(f"gemv_{split}_resident_m16", grid, (*arguments, *sizes), dynamic_shared_bytes=shared)


def wide_of(features: int, depth: int, rows: int, multiprocessors: int) -> tuple[str, int]:
    """Return the entry point of gemv_wide.cu for a shape, and the tiles that a warp computes.

    It has the summation order of the shape's split.
    """
    entry = _WIDE.get(split_alone(features, depth))
    if entry is None and depth % TILE_K:
        entry = "any"
    elif entry is None:
        warps, waves = ("2", 2) if depth <= 2 * TILE_K else ("8", 1)
        blocks = _tiles(features) * ceil_div(rows, _WIDE_ROWS)
        entry = warps + ("_pair" if blocks > waves * multiprocessors else "")
    return entry, 2 if entry.endswith("_pair") else 1


def _plan_wide(bound: Bound, entries: Entries) -> LaunchPlan:
    (x, stride), weight, dims = _x(bound), bound.arguments["w"], bound.dims
    name, tiles_a_warp = wide_of(dims["N"], dims["K"], dims["M"], multiprocessors_of(x.device))
    entry = f"gemv_wide_{name}"
    arguments = (view_of(weight.data), x, bound.views["out"], weight.global_scale_decode, stride)
    blocks, _, _ = _grid(entries, entry, _tiles(dims["N"], tiles_a_warp))
    grid = (blocks, ceil_div(dims["M"], _WIDE_ROWS), 1)
    return LaunchPlan(entry, grid, (*arguments, dims["M"], dims["N"], dims["K"]))


def _plan_qg(bound: Bound, entries: Entries) -> LaunchPlan:
    features = 2 * bound.dims["Q"]
    config = _input_config(features, bound.dims["K"], _multiprocessors(bound))
    return _parts(bound, entries, config, (features, 0, 0), (bound.dims["head_dim"], 0))


def _plan_qkvz(bound: Bound, entries: Entries) -> LaunchPlan:
    dims, features = bound.dims, bound.arguments["w"].shape[0]
    head = (dims["key_dim"], dims["value_heads"] // dims["key_heads"] * dims["value_dim"])
    return _parts(bound, entries, _input_config(features, dims["K"], _multiprocessors(bound)), (features, 0, 0), head)


def _plan_dual(bound: Bound, entries: Entries) -> LaunchPlan:
    a, b = bound.dims["A"], bound.dims["B"]
    return _parts(bound, entries, _input_config(a + b, bound.dims["K"], _multiprocessors(bound)), (0, a, b))


def _plan_qgkv(bound: Bound, entries: Entries) -> LaunchPlan | tuple[LaunchPlan, ...]:
    dims, depth = bound.dims, bound.dims["K"]
    rows = (2 * dims["Q"], dims["A"], dims["B"])
    splits = (_input_split(rows[0], depth), _input_split(rows[1] + rows[2], depth))
    if splits == ("k2048", "k2048_few"):
        config = (_K2048_AND_FEW, 1)
    elif splits[0] != splits[1]:
        return _plan_qg(bound, entries), _plan_dual(bound, entries)
    else:
        config = _input_config(sum(rows), depth, _multiprocessors(bound)) if splits[0] == "k5120" else (splits[0], 1)
    return _parts(bound, entries, config, rows, (dims["head_dim"], 0))


def _plan_gdn_in(bound: Bound, entries: Entries) -> LaunchPlan | tuple[LaunchPlan, ...]:
    views, dims, weight = bound.views, bound.dims, bound.arguments["w"]
    if dims["M"] == 0:  # no state moves
        return ()
    features, heads = weight.shape[0], dims["value_heads"]
    split, tiles_a_warp = _input_config(features, dims["K"], _multiprocessors(bound))
    if split not in _GDN_IN_SPLITS:
        split = "any"  # has the split of k2048_few
    entry = f"gemv_gdn_in_{split}_m8"
    # The blocks of the gates come first, so that they start first, in whole clusters.
    ranks = _grid(entries, entry, 1)[0]
    gate_blocks = ceil_div(ceil_div(heads, GATE_HEADS), ranks) * ranks
    names = ("w_ba", "x", "a_log", "dt_bias", "conv_weight", "state", "slots")
    tensors = (*(views[name] for name in (*names, "out_qkv", "out_z", "out_decay", "out_beta")),)
    sizes = (dims["M"], dims["K"], dims["key_heads"], dims["key_dim"], heads // dims["key_heads"] * dims["value_dim"])
    arguments = (view_of(weight.data), *tensors, weight.global_scale_decode, *sizes, heads, dims["R"], gate_blocks)
    return LaunchPlan(entry, (gate_blocks + _tiles(features, tiles_a_warp) * ranks, 1, 1), arguments)


def _plan_dual_silu(bound: Bound, entries: Entries) -> LaunchPlan:
    (x, stride), dims = _x(bound), bound.dims
    gate, up = bound.arguments["w_gate"], bound.arguments["w_up"]
    # The split of two weights in one launch.
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
        *(EntryPoint(f"gemv_{split}_resident_m16", _GEMV, _persistent_bytes(int(split[1:]))) for split in _PERSISTENT),
    ),
    _plan_gemv16_hopper,
    options=("-DPERSISTENT",),
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
