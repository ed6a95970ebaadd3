"""The launcher of the dense products: its decisions, and its source of the Hopper tile configurations."""

import re
import sys
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from kernel_muster.plugins import dense_gemm
from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins.dense_gemm import contracts, launch
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.request import EntryResources
from kernel_muster.registry.contract.contracts import Case
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.hardware.arch import parse_arch

SOURCE = Path(dense_gemm.__file__).parent
HOPPER, OTHERS = launch.DENSE_GEMM_HOPPER, launch.DENSE_GEMM


def names(backend):
    return {entry.name for entry in backend.entries}


def plan(backend, contract, dims, **changes):
    """Plan a launch on an imaginary device of 132 multiprocessors."""
    entries = dict.fromkeys(names(backend), EntryResources(1, 0, 0, 256, None, (), 3))
    given = contract.arguments(Case("here", dims), np.random.default_rng(1))
    return backend.plan(contract.signature.bind("test", (), {**given, **changes}), entries)[0]


@pytest.mark.parametrize(
    ("rows", "features", "form"),
    [
        (128, 5120, "n64"),  # one round of any: the smallest tile takes least
        (256, 14336, "n256"),  # 112 tiles are one round, 150 and 224 are two
        (512, 5120, "n192"),  # 108 tiles in a round, 160 of n128 in two, 320 of n64 in three
        (2048, 14336, "n256"),
        (8192, 96, "n128"),  # x is read once, although two tiles of n64 take less
        (8192, 64, "n64"),
    ],
)
def test_form_of_the_wide_tile_by_rounds(rows, features, form):
    assert launch.wgmma_config(rows, features, 132) == form


def test_router_and_few_rows_never_take_the_wide_tile():
    assert launch.tile_of(4096, 256) != "wide"
    assert launch.tile_of(64, 5120) != "wide"
    assert launch.tile_of(65, 513) == "wide"


@pytest.mark.parametrize(
    ("rows", "features", "ranks"),
    [
        (128, 96, 8),
        (512, 96, 8),
        (512, 256, 4),
        (2048, 64, 4),
        (2048, 96, 2),
        (64, 4096, 2),
        (64, 5120, 1),
        (2048, 256, 1),
    ],
)
def test_as_many_blocks_share_k_as_multiprocessors_are_there_for(rows, features, ranks):
    assert launch.split_ranks(rows, features, 132) == ranks


@pytest.mark.parametrize(
    ("form", "rows", "features", "tile"),
    [
        ("n64", 65, 5120, (65, 64)),
        ("n64", 300, 96, (100, 48)),
        ("n192", 129, 5120, (65, 192)),
        ("n256", 1, 1, (1, 8)),
        ("n128", 1030, 3500, (115, 128)),
    ],
)
def test_tiles_are_even_and_cover_all_rows_and_features(form, rows, features, tile):
    form = launch._WGMMA[form]
    assert launch.even_tile(form, rows, features) == tile
    assert tile[0] * -(-rows // form.rows) >= rows
    assert tile[1] * -(-features // form.features) >= features


@pytest.mark.parametrize(
    ("dims", "entry", "grid"),
    [
        ((1, 512, 64), "few_n8", (64, 1, 1)),
        ((16, 17, 6144), "few_n8", (3, 1, 1)),
        ((16, 17, 6208), "few_any", (3, 1, 1)),
        ((9, 512, 32), "few_any", (64, 1, 1)),
        ((8, 513, 32), "m8", (33, 1, 1)),
        ((16, 513, 32), "m16", (33, 1, 1)),
        ((16, 4225, 32), "m16_brought", (89, 1, 1)),
        ((8, 4225, 32), "m8", (265, 1, 1)),
    ],
)
def test_gemv_takes_the_form_of_its_features_and_rows(dims, entry, grid):
    sizes = dict(zip("MNK", dims, strict=True))
    planned = plan(launch.DENSE_GEMV_HOPPER, contracts.DENSE_GEMV_BATCHM, sizes)
    assert (planned.entry, planned.grid) == (f"dense_gemv_{entry}", grid)
    assert plan(HOPPER, contracts.DENSE_GEMM, sizes).entry == planned.entry


@pytest.mark.parametrize(
    ("rows", "features", "depth", "form"),
    [
        (16, 96, 5120, ("n8", (96, 1, 1))),
        (17, 96, 5120, ("n16", (48, 2, 1))),
        (16, 256, 2048, ("n8", (256, 1, 1))),
        (17, 256, 2048, ("n16", (128, 2, 1))),
        (1, 264, 2048, ("n8", (264, 1, 1))),
        (1, 265, 2048, ("n16", (136, 1, 1))),
        (1, 8, 80, ("any", (8, 1, 1))),
    ],
)
def test_tiles_of_eight_features_are_for_few_blocks(rows, features, depth, form):
    entries = dict.fromkeys(names(HOPPER), EntryResources(1, 0, 0, 128, (8, 1, 1), (), 3))
    entry, grid = launch.small_n_entry(rows, features, depth, 132, entries)
    assert (entry.removeprefix("dense_gemv_few_"), grid) == form


def test_few_features_have_all_of_k_on_its_way_that_the_source_says():
    text = (INCLUDE_DIR / "dense_gemv.cuh").read_text()
    (sharing,) = re.findall(r"using SmallN = SplitK<(\d+), (\d+), (\d+)>;", text)
    warps, ranks, rounds = map(int, sharing)
    assert f"constexpr int BLOCK_K = {launch.SMALL_N_BLOCK};" in text
    assert warps * ranks * rounds * launch.SMALL_N_BLOCK == launch.SMALL_N_DEPTH


def test_more_rows_of_few_features_are_groups_of_rows_of_the_gemv_on_hopper():
    dims = {"M": 40, "N": 96, "K": 64}
    planned = plan(HOPPER, contracts.DENSE_GEMM, dims)
    assert (planned.entry, planned.grid) == ("dense_gemv_few_n8", (12, 3, 1))
    assert plan(OTHERS, contracts.DENSE_GEMM, dims).entry == "dense_gemm_spread"
    assert plan(HOPPER, contracts.DENSE_GEMM, {**dims, "K": 40}).entry == "dense_gemm_split"


def test_rows_in_falling_order_are_refused_and_those_that_overlap_take_no_bulk_copies():
    contract, dims = contracts.DENSE_GEMM, {"M": 100, "N": 9000, "K": 64}
    x = contract.arguments(Case("here", dims), np.random.default_rng(1))["x"]
    assert plan(HOPPER, contract, dims).entry == "dense_gemm_n128"
    overlapping = np.lib.stride_tricks.as_strided(x, (100, 64), (64, 2))
    assert plan(HOPPER, contract, dims, x=overlapping).entry == "dense_gemm_any"
    with pytest.raises(ContractError, match="rows are -64 elements apart"):
        plan(HOPPER, contract, dims, x=x[::-1])
    few = {**dims, "M": 16}
    overlapping = np.lib.stride_tricks.as_strided(x, (16, 64), (64, 2))
    assert plan(HOPPER, contract, few, x=overlapping).entry == "dense_gemv_m16"


def test_shared_memory_is_what_the_source_asks_for():
    text = (SOURCE / "dense_gemm_hopper.cu").read_text()
    asked = {name: (int(n), int(stages) * (128 + int(n)) * 128 + 8 * 2048 + int(stages) * 16 + 1024)
             for name, n, stages in re.findall(r"DENSE_WGMMA\((\w+), (\d+), (\d+)\)", text)}  # fmt: skip
    assert {name: (form.features, form.shared_bytes) for name, form in launch._WGMMA.items()} == asked
    ((features, stages),) = re.findall(r"DENSE_SPLIT\(split, (\d+), (\d+)\)", text)
    split, stages = launch._SPLIT, int(stages)
    assert split.features == int(features)
    assert split.shared_bytes == stages * (split.rows + split.features) * 128 + stages * 16 + 1024
    (brought,) = re.findall(r"gemv_tma_tiles<GemvTmaConfig<(.*)>>", (SOURCE / "gemv_tma.cuh").read_text())
    groups, tiles, stages = map(int, brought.split(", "))
    rows, features, warps = 8 * groups, 16 * tiles, 8
    assert (launch._GEMV_TMA.rows, launch._GEMV_TMA.features) == (rows, features)
    sums = warps * rows * (features + 4) * 4
    assert launch._GEMV_TMA.shared_bytes == stages * (rows + features) * 128 + sums + stages * 16 + 1024


def test_hopper_has_every_entry_that_the_plan_can_name_there():
    forms = {f"dense_gemm_{form}" for form in launch._WGMMA}
    assert names(HOPPER) - names(OTHERS) == {*forms, "dense_gemm_split", "dense_gemv_m16_brought"}
    assert names(OTHERS) - names(HOPPER) == {f"dense_gemm_{tile}" for tile in ("narrow", "spread", "wide")}


@pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA ships no disassembler for macOS")
def test_few_features_ask_for_all_rows_before_they_use_any(machine_code, build_cache, tmp_path):
    built = Builder(build_cache).build(HOPPER.request(parse_arch("sm_90a")))
    (code,) = machine_code.read_entries("sm_90a", [built], tmp_path)
    for entry in ("dense_gemv_few_n8", "dense_gemv_few_n16"):
        brought, uses, asked = set(), [], []
        for one in takewhile(lambda one: one.base != "HMMA", code[entry]):
            first, *others = [int(number) for number in re.findall(r"\bR(\d+)\b", one.operands)] or [-1]
            if one.base == "LDG":
                brought.update(range(first, first + 4))
                asked.append(one.place)
            elif brought & set(others):
                uses.append(one.place)
        assert max(asked) < min(uses), entry
