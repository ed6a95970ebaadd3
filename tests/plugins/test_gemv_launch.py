"""The GEMV's launcher: the split of K, the tiles of a warp, and the resulting grid."""

import re

import numpy as np
import pytest
from kernel_muster.plugins import nvfp4_gemv
from kernel_muster.plugins._cuda.nvfp4_layout import MmaWeight
from kernel_muster.plugins.nvfp4_gemv import launch
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.request import EntryResources
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import ScalarParam, WeightParam, evaluate_dim
from kernel_muster.registry.hardware.arch import parse_arch

SHAPES = [(n, k) for n in (1, 2048, 12288, 17408, 248320) for k in (16, 2048, 4096, 5120, 6144, 17408)]
CONTRACTS = {contract.name: contract for contract in nvfp4_gemv.muster_contracts()}
PLAIN, CLUSTER = EntryResources(1, 0, 0, 128, None, (), 3), EntryResources(1, 0, 0, 128, (2, 1, 1), (), 3)


class Entries(dict):
    """Entry points as they are compiled: some splits take two blocks."""

    def __missing__(self, name):
        return CLUSTER if any(part in name for part in ("6144", "17408", "5120_few", "wide_4x2", "_10x2")) else PLAIN


def launches(backend, name, **dims):
    """Plan launches; of a weight the launcher needs no more than its shape and where it lies."""
    signature = CONTRACTS[name].signature
    given = {}
    for param in signature.params:
        if isinstance(param, ScalarParam):
            given[param.name] = dims[param.name]
            continue
        shape = tuple(evaluate_dim(dim, dims) for dim in param.shape)
        weight = MmaWeight(np.zeros(16, np.uint8), 1.0, shape)
        given[param.name] = weight if isinstance(param, WeightParam) else np.zeros(shape, numpy_dtype(param.dtype))
    return backend.plan(signature.bind("test", (), given), Entries())


def plan(backend, name, **dims):
    """Return entry point and grid of a launch, or of several."""
    found = [(one.entry, one.grid) for one in launches(backend, name, **dims)]
    return found if len(found) > 1 else found[0] if found else None


def arguments(backend, name, **dims):
    """Return the arguments of the one launch."""
    (one,) = launches(backend, name, **dims)
    return one.arguments


@pytest.mark.parametrize(
    ("features", "depth", "at_8", "at_16"),
    [
        (14336, 5120, ("k5120_pair", 2), ("k5120_pair", 2)),
        (16896, 5120, ("k5120_pair", 2), ("k5120_pair", 2)),
        (17408, 5120, ("k5120", 1), ("k5120", 1)),
        (9216, 5120, ("k5120", 1), ("k5120_pair", 2)),
        (248320, 5120, ("k5120", 1), ("k5120_many", 2)),
        (1024, 5120, ("k5120_few", 1), ("k5120_few", 1)),
        (9216, 2048, ("k2048", 1), ("k2048", 1)),
        (12288, 2048, ("k2048", 1), ("k2048_pair", 2)),
        (248320, 2048, ("k2048_pair", 2), ("k2048_pair", 2)),
        (512, 2048, ("k2048_few", 1), ("k2048_few", 1)),
        (2048, 4096, ("k4096_early", 1), ("k4096", 1)),
        (2113, 4096, ("k4096", 1), ("k4096", 1)),
        (5120, 17408, ("k17408", 1), ("k17408", 1)),
        (5120, 6144, ("k6144", 1), ("k6144", 1)),
        (14336, 5104, ("any", 1), ("any", 1)),
    ],
)
def test_shape_depends_on_the_rows_and_the_split_of_k_does_not(features, depth, at_8, at_16):
    assert [launch.config_of(features, depth, rows, 132) for rows in (8, 16)] == [at_8, at_16]
    split = launch.split_of(features, depth)
    assert {re.sub("_(pair|many|early)$", "", name) for name, _ in (at_8, at_16)} == {split}


@pytest.mark.parametrize(
    ("features", "depth", "rows", "few", "many"),
    [
        (8448, 5120, 8, ("k5120_pair", 2), ("k5120", 1)),
        (8448, 5120, 16, ("k5120", 1), ("k5120_pair", 2)),
        (9216, 2048, 8, ("k2048_pair", 2), ("k2048", 1)),
        (2048, 4096, 8, ("k4096", 1), ("k4096_early", 1)),
    ],
)
def test_tiles_a_warp_depend_on_the_multiprocessors_of_the_device(features, depth, rows, few, many):
    multiprocessors = 66 if rows == 8 else 64
    assert launch.config_of(features, depth, rows, multiprocessors) == few
    assert launch.config_of(features, depth, rows, 2 * multiprocessors) == many
    assert [launch.wide_of(2048, 4096, 32, count) for count in (127, 128)] == [("8_pair", 2), ("8", 1)]


@pytest.mark.parametrize(
    ("features", "depth", "expected"),
    [
        (33, 80, ("gemv_any_m8", (3, 1, 1))),
        (1, 5120, ("gemv_k5120_few_m8", (2, 1, 1))),
        (17, 6144, ("gemv_k6144_m8", (4, 1, 1))),
        (10577, 5120, ("gemv_k5120_pair_m8", (331, 1, 1))),
        (1024, 5120, ("gemv_k5120_m8", (64, 1, 1))),
        (512, 5120, ("gemv_k5120_few_m8", (64, 1, 1))),
    ],
)
def test_grid_covers_every_feature_once(features, depth, expected):
    assert plan(launch.GEMV8, "w4a16_gemv", M=1, N=features, K=depth) == expected


@pytest.mark.parametrize("depth", [256, 2048, 4096, 5120, 6144, 17408])
@pytest.mark.parametrize("features", [16, 504, 512, 528, 1024, 1040, 6144])
def test_key_and_value_are_summed_alike_together_and_one_by_one(features, depth):
    def split_in(entry):
        return re.sub("^gemv_(parts_)?|(_pair|_early)?_m8$", "", entry)

    alone, _ = plan(launch.GEMV8, "w4a16_gemv", M=1, N=features, K=depth)
    joint, _ = plan(launch.DUAL, "w4a16_gemv_dual", M=1, A=features, B=features, K=depth)
    # deeper forms of inputs have no split of their own: their layers' weights do not come alone
    assert split_in(joint) in (split_in(alone), "any")
    if depth in (2048, 5120):
        assert split_in(joint) == split_in(alone)


def test_grid_of_two_weights_covers_each_alone():
    made = plan(launch.DUAL, "w4a16_gemv_dual", M=1, A=10561, B=17, K=5120)
    assert made == ("gemv_parts_k5120_pair_m8", (331 + 1, 1, 1))


@pytest.mark.parametrize(
    ("rows", "features", "depth", "expected"),
    [(17, 9216, 2048, ("4_pair", 288, 1)), (128, 512, 2048, ("8", 32, 4)), (256, 512, 2048, ("8_pair", 16, 8)),
     (64, 2048, 512, ("2", 128, 2)), (65, 2048, 512, ("2_pair", 64, 3)), (32, 2048, 4096, ("8", 128, 1)),
     (64, 2048, 4096, ("8_pair", 64, 2)), (65, 5120, 6144, ("4x2", 640, 3)), (32, 17, 17408, ("4x2", 4, 1)),
     (1, 1024, 5120, ("4_pair", 32, 1)), (1, 512, 5120, ("10x2", 64, 1)),
     (1, 1025, 5120, ("4_pair", 33, 1)), (200, 33, 528, ("any", 3, 7))],
)  # fmt: skip
def test_rows_of_the_wide_tier_are_blocks_of_32_that_add_up_k_as_one_row_does(rows, features, depth, expected):
    entry, groups, chunks = expected
    made = plan(launch.GEMV_WIDE, "w4a16_gemv_batch256", M=rows, N=features, K=depth)
    assert made == (f"gemv_wide_{entry}", (groups, chunks, 1))


@pytest.mark.parametrize(("depth", "shared"), [(2048, 102400), (5120, 200704)])
def test_weights_of_very_many_features_keep_x_in_shared_memory_on_hopper(monkeypatch, depth, shared):
    monkeypatch.setattr(launch, "multiprocessors_of", lambda ordinal: 132)
    (made,) = launches(launch.GEMV16_HOPPER, "w4a16_gemv_batch16", M=9, N=248320, K=depth)
    assert (made.entry, made.grid) == (f"gemv_k{depth}_resident_m16", (132, 1, 1))
    assert made.dynamic_shared_bytes == shared
    entries = launch.GEMV16_HOPPER.request(parse_arch("sm_90a")).entries
    assert {entry.name: entry.dynamic_shared_bytes for entry in entries}[made.entry] == shared
    for features, deep in ((17408, depth), (248320, 4096)):
        assert plan(launch.GEMV16_HOPPER, "w4a16_gemv_batch16", M=9, N=features, K=deep) == plan(
            launch.GEMV16, "w4a16_gemv_batch16", M=9, N=features, K=deep
        )


@pytest.mark.parametrize("backend", [launch.GEMV8, launch.GEMV16])
def test_every_choice_has_an_entry_point_and_every_entry_point_is_chosen(backend):
    names = {entry.name for entry in backend.request(parse_arch("sm_90a")).entries}
    chosen = {plan(backend, "w4a16_gemv", M=1, N=n, K=k)[0] for n, k in SHAPES}
    assert chosen == names


def test_every_form_of_a_layers_input_has_an_entry_point_and_every_entry_point_serves_one():
    splits = {launch._input_config(n, k, 132)[0] for n, k in SHAPES}
    for backend, form in ((launch.GDN_IN, "gemv_gdn_in"), (launch.QG, "gemv_parts")):
        names = {entry.name for entry in backend.request(parse_arch("sm_90a")).entries}
        own = splits - {"k2048_few"} if backend is launch.GDN_IN else splits
        assert {f"{form}_{split}_m8" for split in own} == names - {"gemv_parts_k2048_and_few_m8"}


def test_forms_of_a_layers_input_are_compiled_once():
    requests = {each.request(parse_arch("sm_90a")) for each in (launch.QG, launch.QKVZ, launch.DUAL, launch.QGKV)}
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((6144, 1024, 1024, 5120), ("gemv_parts_k5120_pair_m8", (384 + 64, 1, 1))),
     ((1024, 1024, 1024, 5120), ("gemv_parts_k5120_m8", (128 + 128, 1, 1))),
     ((4096, 512, 512, 2048), ("gemv_parts_k2048_and_few_m8", (256 + 64, 1, 1))),
     ((4096, 1024, 1024, 2048), ("gemv_parts_k2048_m8", (512 + 128, 1, 1))),
     ((8, 512, 512, 2048), ("gemv_parts_k2048_few_m8", (1 + 64, 1, 1))),
     ((4096, 512, 512, 4096), ("gemv_parts_any_m8", (512 + 64, 1, 1))),
     ((8, 17, 16, 5120), ("gemv_parts_k5120_few_m8", (2 * (1 + 2 + 1), 1, 1))),
     ((6144, 512, 512, 5120), [("gemv_parts_k5120_pair_m8", (384, 1, 1)), ("gemv_parts_k5120_few_m8", (128, 1, 1))]),
     ((8, 1024, 1024, 5120), [("gemv_parts_k5120_few_m8", (2, 1, 1)), ("gemv_parts_k5120_m8", (128, 1, 1))]),
     ((8, 1024, 1024, 2048), [("gemv_parts_k2048_few_m8", (1, 1, 1)), ("gemv_parts_k2048_m8", (128, 1, 1))])],
)  # fmt: skip
def test_query_key_and_value_share_a_launch_where_a_block_suits_both_splits(sizes, expected):
    dims = dict(zip(("Q", "A", "B", "K"), sizes, strict=True))
    assert plan(launch.QGKV, "w4a16_gemv_qgkv", M=1, head_dim=8, **dims) == expected


def test_parts_that_are_missing_have_no_rows():
    sizes = {"M": 1, "Q": 24, "A": 17, "B": 16, "K": 80, "key_heads": 1, "key_dim": 8}
    sizes |= {"value_heads": 1, "value_dim": 4, "head_dim": 8}
    backends = {"qg": launch.QG, "qkvz": launch.QKVZ, "dual": launch.DUAL, "qgkv": launch.QGKV}
    made = {form: arguments(backend, f"w4a16_gemv_{form}", **sizes) for form, backend in backends.items()}
    assert {form: (*given[4:10], *given[-2:]) for form, given in made.items()} == {
        "qg": (48, 0, 0, 80, 1, 80, 8, 0),  # rows of w, of w_a, of w_b, K, M, x_stride, head
        "qkvz": (24, 0, 0, 80, 1, 80, 8, 4),
        "dual": (0, 17, 16, 80, 1, 80, 1, 0),
        "qgkv": (48, 17, 16, 80, 1, 80, 8, 0),
    }


@pytest.mark.parametrize(
    ("features", "depth", "expected"),
    [(17408, 5120, ("k5120", 1088)), (513, 5120, ("k5120", 33)), (512, 5120, ("k5120_few", 64)),
     (512, 2048, ("k2048_few", 32)), (513, 2048, ("k2048", 33)), (512, 4096, ("any", 32)), (33, 80, ("any", 3))],
)  # fmt: skip
def test_fused_activation_has_the_split_of_two_weights_and_a_block_for_a_tile_of_both(features, depth, expected):
    split, blocks = expected
    made = plan(launch.DUAL_SILU, "w4a16_gemv_dual_silu", M=1, N=features, K=depth)
    assert made == (f"gemv_dual_silu_{split}_m8", (blocks, 1, 1))
    dual, _ = launch._input_config(2 * features, depth, 132)
    assert dual.removesuffix("_pair") == split


@pytest.mark.parametrize(
    ("heads", "depth", "expected"),
    [((16, 128, 48, 128), 5120, ("k5120_pair", 12 + 512)), ((16, 128, 32, 128), 2048, ("k2048", 8 + 768)),
     ((1, 8, 5, 8), 48, ("any", 2 + 6)), ((1, 8, 5, 8), 2048, ("any", 2 + 6)),
     ((2, 33, 6, 35), 5120, ("k5120_few", 2 + 2 * 35))],
)  # fmt: skip
def test_gates_have_whole_clusters_of_blocks_ahead_of_the_tiles(heads, depth, expected):
    sizes = dict(zip(("key_heads", "key_dim", "value_heads", "value_dim"), heads, strict=True))
    split, blocks = expected
    assert plan(launch.GDN_IN, "w4a16_gemv_gdn_in", M=0, K=depth, R=2, **sizes) is None
    made = plan(launch.GDN_IN, "w4a16_gemv_gdn_in", M=1, K=depth, R=2, **sizes)
    assert made == (f"gemv_gdn_in_{split}_m8", (blocks, 1, 1))


@pytest.mark.parametrize(
    "backend", [launch.GEMV8, launch.GEMV16_HOPPER, launch.GEMV_WIDE, launch.DUAL_SILU, launch.GDN_IN, launch.QGKV]
)
def test_registers_hold_what_a_warp_works_on(backend, build_cache):
    built = Builder(build_cache).build(backend.request(parse_arch("sm_90a")))
    spilt = {name: entry.spill_store_bytes for name, entry in built.entries.items() if entry.spill_store_bytes}
    assert max(spilt.values(), default=0) <= 32  # bytes; a working set without enough registers spills hundreds
    assert len(spilt) <= 2
