"""Decisions of the launcher of the tile GEMMs before a launch, and the transposed copy of its weight."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.plugins import w4a16
from kernel_muster.plugins.w4a16.contracts import W4A16_GEMM
from kernel_muster.plugins.w4a16.launch import KERNELS, TILES
from kernel_muster.plugins.w4a16.layouts import to_transposed
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Case, random_weight
from kernel_muster.registry.contract.signature import WeightParam
from kernel_muster.registry.errors import ContractError

BASE, ONE_ORDER = "w4a16::w4a16_gemm", "w4a16::w4a16_gemm_t"
KEYS = pytest.mark.parametrize("key", sorted(TILES))
ALL_OPTIONS = {kernel.options for kernel in KERNELS.values()}
SHARING = {options: [key for key in TILES if KERNELS[key].options == options] for options in ALL_OPTIONS}


def weight(rows, columns):
    dims = {"N": rows, "K": columns}
    return random_weight(WeightParam("w", "nvfp4", ("N", "K")), dims, np.random.default_rng(2))


def planned(key, m, n, k, **changes):
    """Plan a launch."""
    arguments = W4A16_GEMM.arguments(Case("here", {"M": m, "N": n, "K": k}), np.random.default_rng(3))
    given = arguments["w"] if TILES[key].row_major else to_transposed(arguments["w"])
    (plan,) = KERNELS[key].plan(W4A16_GEMM.signature.bind("test", (), {**arguments, "w": given, **changes}), {})
    return plan


@KEYS
def test_tile_covers_every_output_with_one_block_each(key):
    whole, few = TILES[key].large_m, TILES[key].small_m
    at_the_edge, above, many = planned(key, few.m, 272, 64), planned(key, few.m + 1, 272, 64), planned(key, 513, 16, 64)
    assert (at_the_edge.entry, at_the_edge.grid) == (few.entry, (-(-272 // few.n), 1, 1))
    assert (above.entry, above.grid) == (whole.entry, (-(-(few.m + 1) // whole.m) * -(-272 // whole.n), 1, 1))
    assert (many.entry, many.grid) == (whole.entry, (-(-513 // whole.m), 1, 1))


@KEYS
def test_launch_has_the_shared_memory_that_its_entry_point_declares(key):
    declared = {entry.name: entry.dynamic_shared_bytes for entry in KERNELS[key].entries}
    for m, n, k in ((1, 64, 64), (300, 64, 64), (300, 65, 80)):
        plan = planned(key, m, n, k)
        assert plan.dynamic_shared_bytes == declared[plan.entry]


@KEYS
def test_rows_that_copies_cannot_begin_at_are_gathered(key):
    tile_m, tile_n = map(int, re.search(r"ENTRY\(w4a16_any,false,\d+,(\d+),(\d+),", KERNELS[key].options[1]).groups())
    n, k = (64, 80) if TILES[key].row_major else (65, 64)
    for m in (3, 300):
        plan = planned(key, m, n, k)
        assert (plan.entry, plan.grid) == ("w4a16_any", (-(-m // tile_m) * -(-n // tile_n), 1, 1))


def test_keys_that_are_asked_for_together_are_compiled_once_and_no_tile_of_theirs_twice():
    assert sorted(len(keys) for keys in SHARING.values()) == [1, 1, 2, 4]
    for options in SHARING:
        tiles = re.findall(r"ENTRY\(\w+,(\w+),\d+,([\d,]+)\)", options[1])
        assert len(tiles) == len({*tiles})
        assert all(len(KERNELS[key].entries) == len(tiles) for key in SHARING[options])


@KEYS
def test_weight_with_gaps_is_refused(key):
    made = weight(128, 64)
    made = made if TILES[key].row_major else to_transposed(made)
    rows = made.packed.shape[0]
    wide = np.zeros((rows, made.packed.shape[1] + 16), np.uint8)
    with pytest.raises(ContractError, match="w has gaps between its rows, expected none: copy the slice"):
        planned(key, 3, 128, 64, w=replace(made, packed=wide[:, :-16]))


def test_x_whose_rows_begin_between_vectors_is_refused():
    x = np.zeros((3, 68), ml_dtypes.bfloat16)
    with pytest.raises(ContractError, match="x has rows 68 elements apart, expected a multiple of 8"):
        planned(ONE_ORDER, 3, 64, 64, x=x[:, :64])


def test_every_variant_claims_the_bits_of_one():
    specs = [spec for spec in w4a16.muster_kernels() if spec.archs == ("sm_80+",)]
    assert {spec.key for spec in specs} == set(TILES)
    assert {spec.key: spec.bit_identical_to for spec in specs if spec.key != ONE_ORDER} == {
        key: (ONE_ORDER,) for key in TILES if key != ONE_ORDER
    }
    assert [spec.key for spec in specs if spec.opt_in] == ["w4a16_v2::w4a16_gemm_t_m128_v2"]


@KEYS
def test_block_fits_every_device_that_the_kernel_is_for(key):
    tiles = TILES[key]
    for tile in (tiles.large_m, tiles.small_m):
        assert tile.shared_bytes(tiles.row_major) <= 99 * 1024  # of sm_86, sm_89 and sm_120, the least of all
        assert 32 * (tile.m // tile.warp_m) * (tile.n // tile.warp_n) in (64, 128, 256)


# The transposed copy


def test_transposed_copy_is_the_reference_one_with_its_scale_on_the_host():
    made, expected = to_transposed(weight(33, 48)), nvfp4.transpose(weight(33, 48))
    assert np.array_equal(made.packed, expected.packed)
    assert np.array_equal(made.block_scale, expected.block_scale)
    assert isinstance(made.global_scale_decode, np.ndarray)
    assert made.global_scale_decode == expected.global_scale_decode
    assert (made.layout, made.packed.flags.c_contiguous) == ("nvfp4_transposed", True)


@pytest.mark.parametrize("scale", [0x7F, 0xFF, 0x81, 0xB8])
def test_transposed_copy_of_a_scale_that_is_nan_or_negative_is_refused(scale):
    wrong = weight(33, 48)
    wrong.block_scale[32, 2] = scale
    with pytest.raises(ContractError, match="nvfp4_transposed: a block scale is NaN or negative"):
        to_transposed(wrong)


def test_transposed_copy_keeps_minus_zero():
    given = weight(4, 16)
    given.block_scale[3, 0] = 0x80
    assert to_transposed(given).block_scale[0, 3] == 0x80


def test_transposed_copy_of_what_is_no_row_major_matrix_is_refused():
    with pytest.raises(ContractError, match="weight has layout nvfp4_transposed and shape"):
        to_transposed(to_transposed(weight(16, 16)))
