"""Beyond the contracts' random cases: hand-made values, limits, and refusals."""

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.plugins import (
    argmax,
    dense_gemm,
    embedding,
    norm,
    nvfp4_gemv,
    quantize_nvfp4,
    residual_add,
    silu,
    w4a16,
)
from kernel_muster.plugins._reference import bf16, check_indices, ordered_sum, project, sigmoid
from kernel_muster.plugins.nvfp4_gemv.rows import qkvz_rows
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.specs import Provider
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.runners import HostRunner
from kernel_muster.registry.selection.handles import Handle

BF16 = ml_dtypes.bfloat16


def kernel(family, key):
    contracts = {contract.name: contract for contract in family.muster_contracts()}
    spec = next(spec for spec in family.muster_kernels() if spec.key == key)
    return Handle(spec.kernel_key, spec, contracts[spec.contract], Provider("test", "test", "1"), HostRunner())


def empty(*shape):
    return np.full(shape, np.nan, BF16)


def random_x(rng, rows, k):
    return rng.standard_normal((rows, k)).astype(BF16)


def random_w(rng, n, k):
    return nvfp4.quantize(rng.standard_normal((n, k)).astype(np.float32))


# The shared arithmetic


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 16, 31, 1000])
def test_ordered_sum_of_integers_is_exact_at_every_length(length):
    terms = np.arange(length, dtype=np.float32)
    assert ordered_sum(terms) == length * (length - 1) // 2


def test_ordered_sum_of_a_row_is_the_same_alone_and_among_others_in_any_layout():
    terms = np.random.default_rng(0).standard_normal((7, 333)).astype(np.float32)
    together = ordered_sum(terms)
    assert np.array_equal(together, ordered_sum(np.asfortranarray(terms)))
    assert np.array_equal(together, [ordered_sum(row.copy()) for row in terms])


def test_ordered_sum_errs_less_than_its_tree_is_deep():
    terms = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    exact = terms.astype(np.float64).sum()
    depth = 2 * np.log2(5000)
    assert abs(ordered_sum(terms) - exact) <= depth * 2.0**-24 * np.abs(terms).sum()


def test_ordered_sum_leaves_its_terms():
    terms = np.ones(5, np.float32)
    ordered_sum(terms)
    assert (terms == 1).all()


def test_sigmoid_at_the_edges_neither_overflows_nor_leaves_its_range():
    values = np.array([-3e38, -100, -1, 0, 1, 100, 3e38], np.float32)
    expected = np.array([0, 3.720076e-44, 0.26894143, 0.5, 0.7310586, 1, 1], np.float32)
    assert np.allclose(sigmoid(values), expected, rtol=1e-6, atol=0)


def test_check_indices_names_the_first_wrong_one():
    with pytest.raises(ContractError, match=r"moe: ids\[1, 0\] is -1, expected 0 <= index < 4"):
        check_indices("moe", "ids", np.array([[0, 3], [-1, 4]]), 4)


def test_project_with_single_ones_reads_out_the_weight():
    rng = np.random.default_rng(2)
    weight = random_w(rng, 9, 32)
    read = project(np.eye(32).astype(BF16), weight).T
    assert np.array_equal(read, nvfp4.dequantize(weight).astype(np.float32))


def test_project_adds_in_the_order_of_ordered_sum_whatever_the_number_of_features():
    # Folding pairs 2^24 with -2^24 first. From left to right the first 1 would be lost.
    row = np.array([2.0**24, 1, -(2.0**24), 1], BF16)
    for features in (1, 3, 64):
        assert (project(np.ones((2, 4), BF16), Bf16Weight(np.tile(row, (features, 1)))) == 2).all()


def test_project_of_one_feature_has_the_bits_it_has_among_others():
    rng = np.random.default_rng(15)
    x, values = random_x(rng, 2, 1000), rng.standard_normal((33, 1000)).astype(BF16)
    together = project(x, Bf16Weight(values))
    assert np.array_equal(together, np.hstack([project(x, Bf16Weight(row[None])) for row in values]))


# w4a16 and the GEMV forms


def test_w4a16_on_the_wrong_copy_of_the_weight_is_refused():
    rng = np.random.default_rng(3)
    weight = random_w(rng, 8, 32)
    transposed = kernel(w4a16, "w4a16::w4a16_gemm_t")
    with pytest.raises(ContractError, match=r"expected nvfp4_transposed; use handle\.prepare_weight"):
        transposed(random_x(rng, 1, 32), weight, empty(1, 8))
    with pytest.raises(ContractError, match="expected nvfp4_row_major"):
        kernel(w4a16, "w4a16::w4a16_gemm")(random_x(rng, 1, 32), nvfp4.transpose(weight), empty(1, 8))


def test_w4a16_with_a_nan_scale_is_refused():
    rng = np.random.default_rng(4)
    weight = random_w(rng, 8, 32)
    weight.block_scale[3, 1] = 0x7F
    with pytest.raises(ContractError, match="a block scale is NaN"):
        kernel(w4a16, "w4a16::w4a16_gemm")(random_x(rng, 1, 32), weight, empty(1, 8))


def test_w4a16_v3_is_provided_by_nobody():
    assert not any(spec.key.startswith("w4a16_v3") for spec in w4a16.muster_kernels())


def test_w4a16_variants_that_only_a_lever_asks_for_say_so():
    opt_in = {spec.key: spec.opt_in for spec in w4a16.muster_kernels() if spec.opt_in}
    assert opt_in == {"w4a16_v2::w4a16_gemm_t_m128_v2": "MUSTER_W4A16_VARIANT"}


def test_gemv_gives_the_bits_of_the_tile_gemm():
    rng = np.random.default_rng(5)
    x, weight = random_x(rng, 5, 272), random_w(rng, 33, 272)
    by_gemv, by_gemm = empty(5, 33), empty(5, 33)
    kernel(nvfp4_gemv, "w4a16_gemv::w4a16_gemv_batch5")(x, weight, by_gemv)
    kernel(w4a16, "w4a16::w4a16_gemm")(x, weight, by_gemm)
    assert np.array_equal(by_gemv, by_gemm)


def test_gemv_qg_splits_what_the_plain_gemv_gives_by_head():
    rng = np.random.default_rng(6)
    x, weight = random_x(rng, 2, 64), random_w(rng, 24, 64)
    plain, q, gate = empty(2, 24), empty(2, 12), empty(2, 12)
    kernel(nvfp4_gemv, "w4a16_gemv::w4a16_gemv_batch2")(x, weight, plain)
    kernel(nvfp4_gemv, "w4a16_gemv::w4a16_gemv_qg_batch2")(x, weight, 4, q, gate)
    assert np.array_equal(q, plain[:, [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]])
    assert np.array_equal(gate, plain[:, [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]])


def test_gemv_qg_whose_heads_do_not_fill_q_is_refused():
    rng = np.random.default_rng(7)
    with pytest.raises(ContractError, match="Q is 12, expected a multiple of head_dim = 5"):
        kernel(nvfp4_gemv, "w4a16_gemv::w4a16_gemv_qg")(
            random_x(rng, 1, 64), random_w(rng, 24, 64), 5, empty(1, 12), empty(1, 12)
        )


def test_gemv_dual_gives_the_bits_of_two_launches():
    rng = np.random.default_rng(8)
    x, k, v = random_x(rng, 3, 64), random_w(rng, 5, 64), random_w(rng, 9, 64)
    both, single = (empty(3, 5), empty(3, 9)), (empty(3, 5), empty(3, 9))
    kernel(nvfp4_gemv, "w4a16_gemv::w4a16_gemv_dual_batch3")(x, k, v, *both)
    for weight, out in zip((k, v), single, strict=True):
        kernel(nvfp4_gemv, "w4a16_gemv::w4a16_gemv_batch3")(x, weight, out)
    assert all(np.array_equal(a, b) for a, b in zip(both, single, strict=True))


def test_qkvz_rows_of_two_key_heads_with_two_value_heads_each():
    # group 0: q 0-1, k 2-3, v 4-5, z 6-7; group 1: q 8-9, k 10-11, v 12-13, z 14-15
    qkv, z = qkvz_rows(key_heads=2, key_dim=2, value_heads=4, value_dim=1)
    assert qkv.tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13]
    assert z.tolist() == [6, 7, 14, 15]


def test_gemv_qkvz_regroups_what_the_plain_gemv_gives():
    rng = np.random.default_rng(9)
    heads = (2, 3, 6, 5)
    x, weight = random_x(rng, 1, 48), random_w(rng, 72, 48)
    plain, qkv, z = empty(1, 72), empty(1, 42), empty(1, 30)
    kernel(nvfp4_gemv, "w4a16_gemv::w4a16_gemv")(x, weight, plain)
    kernel(nvfp4_gemv, "w4a16_gemv::w4a16_gemv_qkvz")(x, weight, *heads, qkv, z)
    rows = qkvz_rows(*heads)
    assert np.array_equal(qkv, plain[:, rows[0]])
    assert np.array_equal(z, plain[:, rows[1]])
    assert sorted([*rows[0], *rows[1]]) == list(range(72))


def test_gemv_qkvz_whose_value_heads_are_no_multiple_is_refused():
    rng = np.random.default_rng(10)
    with pytest.raises(ContractError, match="value_heads is 3, expected a multiple of key_heads = 2"):
        kernel(nvfp4_gemv, "w4a16_gemv::w4a16_gemv_qkvz")(
            random_x(rng, 1, 16), random_w(rng, 36, 16), 2, 3, 3, 4, empty(1, 24), empty(1, 12)
        )


@pytest.mark.parametrize(
    ("heads", "message"),
    [((2, -2, 2, 5), "key_dim is -2"), ((0, 3, 6, 5), "key_heads is 0"), ((2, 3, 6, -5), "value_dim is -5")],
)
def test_gemv_qkvz_with_sizes_that_are_not_positive_is_refused(heads, message):
    rng = np.random.default_rng(10)
    with pytest.raises(ContractError, match=f"{message}, expected at least 1"):
        kernel(nvfp4_gemv, "w4a16_gemv::w4a16_gemv_qkvz")(
            random_x(rng, 1, 16), random_w(rng, 12, 16), *heads, empty(1, 2), empty(1, 10)
        )


def test_dense_gemv_refuses_an_nvfp4_weight():
    rng = np.random.default_rng(11)
    with pytest.raises(ContractError, match="w is quantised as nvfp4, expected bf16"):
        kernel(dense_gemm, "gemv::dense_gemv_bf16")(random_x(rng, 1, 16), random_w(rng, 4, 16), empty(1, 4))


def test_dense_gemm_of_small_integers_is_exact():
    rng = np.random.default_rng(12)
    x, w = (rng.integers(-3, 4, shape).astype(BF16) for shape in ((20, 7), (5, 7)))
    out = empty(20, 5)
    kernel(dense_gemm, "gemm::dense_gemm_bf16")(x, Bf16Weight(w), out)
    assert np.array_equal(out.astype(int), x.astype(int) @ w.astype(int).T)


# quantize_nvfp4


@pytest.mark.parametrize("k", [15, 17, 40])
def test_quantize_of_a_partial_group_is_refused(k):
    with pytest.raises(ContractError, match=rf"K is {k}, expected a multiple of 16|but {k} is not a multiple"):
        kernel(quantize_nvfp4, "quantize_nvfp4::quantize_bf16_to_nvfp4")(
            np.ones((2, k), BF16),
            np.zeros((2, k // 2), np.uint8),
            np.zeros((2, k // 16), np.uint8),
            np.zeros(1, np.float32),
        )


def test_quantize_of_nan_is_refused_and_writes_nothing():
    values = np.ones((2, 16), BF16)
    values[1, 7] = np.nan
    outs = np.full((2, 8), 9, np.uint8), np.full((2, 1), 9, np.uint8), np.full(1, 9, np.float32)
    with pytest.raises(ContractError, match="NaN or infinity"):
        kernel(quantize_nvfp4, "quantize_nvfp4::quantize_bf16_to_nvfp4")(values, *outs)
    assert all((out == 9).all() for out in outs)


def test_quantize_and_transpose_give_the_weight_a_transposed_gemm_reads():
    rng = np.random.default_rng(13)
    values, x = rng.standard_normal((6, 32)).astype(BF16), random_x(rng, 3, 32)
    packed, scale, decode = np.zeros((6, 16), np.uint8), np.zeros((6, 2), np.uint8), np.zeros(1, np.float32)
    kernel(quantize_nvfp4, "quantize_nvfp4::quantize_bf16_to_nvfp4")(values, packed, scale, decode)
    packed_t, scale_t = np.zeros((16, 6), np.uint8), np.zeros((2, 6), np.uint8)
    kernel(quantize_nvfp4, "quantize_nvfp4::transpose_nvfp4")(packed, scale, packed_t, scale_t)
    out, expected = empty(3, 6), empty(3, 6)
    transposed = nvfp4.Nvfp4Weight(packed_t, scale_t, decode[0], nvfp4.TRANSPOSED)
    kernel(w4a16, "w4a16::w4a16_gemm_t")(x, transposed, out)
    kernel(w4a16, "w4a16::w4a16_gemm")(x, nvfp4.quantize(values), expected)
    assert np.array_equal(out, expected)


def test_transpose_of_scales_that_do_not_belong_to_the_bytes_is_refused():
    with pytest.raises(ContractError, match=r"packed has shape \(2, 8\), expected \(N, 8\*G\) = \(2, 16\)"):
        kernel(quantize_nvfp4, "quantize_nvfp4::transpose_nvfp4")(
            np.zeros((2, 8), np.uint8),
            np.zeros((2, 2), np.uint8),
            np.zeros((8, 2), np.uint8),
            np.zeros((2, 2), np.uint8),
        )


# norm, silu, residual_add


def test_rms_norm_of_a_constant_row_is_the_weight():
    weight = np.array([1, -2, 0.5, 3], BF16)
    out = empty(2, 4)
    kernel(norm, "norm::rms_norm")(np.full((2, 4), 8, BF16), weight, 0.0, 0.0, out)
    assert np.array_equal(out, [weight, weight])


def test_rms_norm_of_zeros_is_zero_and_a_zero_centred_weight_of_zeros_is_one():
    out = empty(2, 2)
    x = np.array([[0, 0], [3, -3]], BF16)
    kernel(norm, "norm::rms_norm")(x, np.zeros(2, BF16), 1e-12, 1.0, out)
    assert out.tolist() == [[0, 0], [1, -1]]


def test_rms_norm_residual_takes_the_norm_of_the_rounded_sum():
    x, residual = np.array([[1 / 256, 0.5]], BF16), np.array([[1, 0.5]], BF16)
    out, expected = empty(1, 2), empty(1, 2)
    weight = np.ones(2, BF16)
    kernel(norm, "norm::rms_norm_residual")(x, residual, weight, 0.0, 0.0, out)
    assert residual.tolist() == [[1, 1]]  # 1 + 1/256 is a tie and goes to the even 1
    kernel(norm, "norm::rms_norm")(residual, weight, 0.0, 0.0, expected)
    assert np.array_equal(out, expected)


def test_rms_norm_gated_takes_a_weight_of_either_type():
    rng = np.random.default_rng(14)
    x, gate = random_x(rng, 3, 40), random_x(rng, 3, 40)
    weight = rng.standard_normal(40).astype(BF16)
    outs = empty(3, 40), empty(3, 40)
    for out, w in zip(outs, (weight, weight.astype(np.float32)), strict=True):
        kernel(norm, "norm::rms_norm_gated")(x, gate, w, 1e-6, out)
    assert np.array_equal(*outs)
    assert np.isfinite(outs[0].astype(np.float32)).all()


def test_silu_mul_at_known_points():
    gate, up = np.array([[0, 100, -100, 1]], BF16), np.array([[5, 2, 2, 1]], BF16)
    out = empty(1, 4)
    kernel(silu, "silu::silu_mul")(gate, up, out)
    assert np.allclose(out.astype(float), [[0, 200, 0, 0.7310586]], rtol=2.0**-8, atol=1e-30)


def test_residual_add_rounds_ties_to_even():
    residual = np.array([[1, 1 + 2**-7]], BF16)
    kernel(residual_add, "residual_add::bf16_residual_add")(np.full((1, 2), 2**-8, BF16), residual)
    assert residual.tolist() == [[1, 1 + 2**-6]]


def test_sigmoid_gate_mul_halves_where_the_gate_is_zero():
    x, out = np.array([[4, -6]], BF16), empty(1, 2)
    kernel(residual_add, "residual_add::sigmoid_gate_mul")(x, np.zeros((1, 2), BF16), out)
    assert out.tolist() == [[2, -3]]


# embedding, argmax


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
def test_gather_of_an_id_outside_the_table_is_refused_and_writes_nothing(wrong):
    table, out = np.ones((4, 2), BF16), np.full((2, 2), 9, BF16)
    with pytest.raises(ContractError, match=rf"embedding::gather: ids\[1\] is {wrong}, expected 0 <= index < 4"):
        kernel(embedding, "embedding::gather")(table, np.array([0, wrong], np.int32), out)
    assert (out == 9).all()


def test_argmax_of_ties_is_the_lowest_index():
    logits = np.array([[1, 3, 3, 2], [-np.inf] * 4, [0, -0.0, 0, 0], [-1, -2, np.inf, np.inf]], BF16)
    out = np.full(4, -1, np.int32)
    kernel(argmax, "argmax::argmax_bf16")(logits, out)
    assert out.tolist() == [1, 0, 0, 2]


def test_argmax_of_nan_is_refused_and_writes_nothing():
    logits, out = np.zeros((2, 3), BF16), np.full(2, 9, np.int32)
    logits[1, 2] = np.nan
    with pytest.raises(ContractError, match="NaN in row 1 of logits"):
        kernel(argmax, "argmax::argmax_bf16")(logits, out)
    assert (out == 9).all()


def test_argmax_without_logits_is_refused():
    with pytest.raises(ContractError, match="expected at least one logit a row"):
        kernel(argmax, "argmax::argmax_bf16")(np.zeros((1, 0), BF16), np.zeros(1, np.int32))


def test_bf16_rounds_to_nearest_even():
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    assert bf16(values).tolist() == [1, 1 + 2**-6, 1 + 2**-7]
