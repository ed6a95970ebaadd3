"""NVFP4 against ml_dtypes, the format's own library, exhaustively where the domain is small."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.errors import ContractError

CODES = np.arange(16, dtype=np.uint8)
SCALES = np.array([s for s in range(0x81) if s != 0x7F], np.uint8)  # all that are not NaN and not below zero


def e2m1(codes):
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def e4m3(scales):
    return scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def weight_of(codes, scales, decode=1.0):
    return nvfp4.Nvfp4Weight(nvfp4.pack(codes), scales, np.asarray(decode, np.float32))


def test_pack_puts_even_k_into_the_low_nibble():
    assert nvfp4.pack(np.array([[1, 2, 0xF, 0]], np.uint8)).tolist() == [[0x21, 0x0F]]


def test_unpack_of_every_byte_packs_back_to_it():
    every = np.arange(256, dtype=np.uint8).reshape(2, 128)
    codes = nvfp4.unpack(every)
    assert codes[0, :4].tolist() == [0, 0, 1, 0]
    assert np.array_equal(nvfp4.pack(codes), every)


def test_pack_of_odd_k_is_refused():
    with pytest.raises(ContractError, match=r"nvfp4.pack: K is 3, expected an even number"):
        nvfp4.pack(np.zeros((1, 3), np.uint8))


def test_pack_of_a_code_above_15_is_refused():
    with pytest.raises(ContractError, match=r"a code is 16, expected 0 to 15"):
        nvfp4.pack(np.array([[0, 16]], np.uint8))


def test_decode_e2m1_of_every_code_is_ml_dtypes_value_and_sign():
    ours = nvfp4.decode_e2m1(CODES)
    assert np.array_equal(ours, e2m1(CODES))
    assert np.array_equal(np.signbit(ours), CODES >= 8)


def test_decode_e4m3_of_every_scale_is_ml_dtypes_value():
    assert np.array_equal(nvfp4.decode_e4m3(SCALES), e4m3(SCALES))


def test_decode_e4m3_below_the_smallest_normal_is_a_multiple_of_its_step():
    assert nvfp4.decode_e4m3(np.arange(9, dtype=np.uint8)).tolist() == [i * 2.0**-9 for i in range(9)]


@pytest.mark.parametrize("scale", [0x7F, 0xFF])
def test_decode_e4m3_of_nan_is_refused(scale):
    with pytest.raises(ContractError, match="a block scale is NaN"):
        nvfp4.decode_e4m3(np.array([0x38, scale], np.uint8))


@pytest.mark.parametrize("scale", range(0x81, 0xFF))
def test_decode_e4m3_of_a_negative_scale_is_refused(scale):
    with pytest.raises(ContractError, match="a block scale is negative"):
        nvfp4.decode_e4m3(np.array([scale], np.uint8))


@pytest.mark.parametrize("decode", [1.0, 0.37, 2.0**-30])
def test_dequantize_of_every_code_and_scale_is_exact(decode):
    codes = np.tile(CODES, (1, len(SCALES)))
    scales = SCALES[None]
    expected = np.outer(e4m3(SCALES), e2m1(CODES)).reshape(1, -1) * np.float64(np.float32(decode))
    weight = weight_of(codes, scales, decode)
    assert np.array_equal(nvfp4.dequantize(weight), expected)
    assert np.array_equal(nvfp4.dequantize(nvfp4.transpose(weight)), expected)


def test_dequantize_of_a_nan_scale_is_refused():
    with pytest.raises(ContractError, match="NaN"):
        nvfp4.dequantize(weight_of(np.zeros((1, 16), np.uint8), np.array([[0x7F]], np.uint8)))


def test_dequantize_with_experts_uses_each_ones_scale():
    codes = np.full((3, 2, 16), 2, np.uint8)  # 1.0
    scales = np.full((3, 2, 1), 0x38, np.uint8)  # 1.0
    weight = weight_of(codes, scales, [1, 2, 4])
    assert weight.shape == (3, 2, 16)
    assert nvfp4.dequantize(weight)[:, 0, 0].tolist() == [1, 2, 4]
    assert np.array_equal(nvfp4.dequantize(weight[1]), nvfp4.dequantize(weight)[1])
    assert np.array_equal(nvfp4.dequantize(nvfp4.transpose(weight)), nvfp4.dequantize(weight))


def test_encode_e2m1_of_every_bf16_number_is_ml_dtypes_rounding():
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    finite = every[np.isfinite(every.astype(np.float32))]
    clipped = np.clip(finite.astype(np.float32), -6, 6)
    expected = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(nvfp4.encode_e2m1(finite), expected & 0xF)


def test_encode_e2m1_of_every_tie_takes_the_even_code_and_its_neighbours_the_nearest():
    values = e2m1(CODES[:8]).astype(np.float32)
    ties = (values[:-1] + values[1:]) / 2
    low = np.arange(7)
    for sign, bit in ((1, 0), (-1, 8)):
        assert np.array_equal(nvfp4.encode_e2m1(sign * ties), (low + low % 2) | bit)
        assert np.array_equal(nvfp4.encode_e2m1(sign * np.nextafter(ties, np.float32(0))), low | bit)
        assert np.array_equal(nvfp4.encode_e2m1(sign * np.nextafter(ties, np.float32(9))), (low + 1) | bit)


def test_encode_e2m1_keeps_the_sign_of_zero_and_saturates():
    values = np.array([0.0, -0.0, 1e-30, -1e-30, 6.5, -1e30, np.inf], np.float32)
    assert nvfp4.encode_e2m1(values).tolist() == [0, 8, 0, 8, 7, 15, 7]


def test_encode_e2m1_of_nan_is_refused():
    with pytest.raises(ContractError, match="NaN in the values"):
        nvfp4.encode_e2m1(np.array([1, np.nan], np.float32))


def test_encode_e2m1_of_float64_is_refused_for_it_would_round_twice():
    with pytest.raises(ContractError, match="values are float64, expected float32 or narrower"):
        nvfp4.encode_e2m1(np.array([0.25 + 2.0**-40]))


def slow_quantize(values):
    """Element by element, with ml_dtypes for the two narrow formats."""
    f32 = np.float32
    amax = max((abs(f32(v)) for row in values for v in row), default=f32(0))
    decode = amax / f32(2688)
    codes = np.zeros(values.shape, np.uint8)
    scales = np.zeros((values.shape[0], values.shape[1] // 16), np.uint8)
    for n, k in np.ndindex(*scales.shape):
        group = [f32(v) for v in values[n, 16 * k : 16 * k + 16]]
        ideal = max(map(abs, group)) / (f32(6) * decode) if decode else f32(0)
        scale = min(ideal, f32(448)).astype(ml_dtypes.float8_e4m3fn)
        scales[n, k] = scale.view(np.uint8)
        step = f32(scale) * decode
        for i, value in enumerate(group):
            ratio = value / step if step else value * f32(0)
            rounded = np.clip(ratio, f32(-6), f32(6)).astype(ml_dtypes.float4_e2m1fn)
            codes[n, 16 * k + i] = rounded.view(np.uint8) & 0xF
    return codes, scales, decode


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), groups=st.integers(1, 4), spread=st.integers(0, 40))
def test_quantize_is_the_documented_arithmetic_element_by_element(seed, rows, groups, spread):
    rng = np.random.default_rng(seed)
    size = 2.0 ** -rng.integers(0, spread + 1, (rows, groups)).repeat(16, axis=1)
    values = (rng.standard_normal((rows, 16 * groups)) * size).astype(ml_dtypes.bfloat16)
    codes, scales, decode = slow_quantize(values)
    weight = nvfp4.quantize(values)
    assert np.array_equal(nvfp4.unpack(weight.packed), codes)
    assert np.array_equal(weight.block_scale, scales)
    assert weight.global_scale_decode == decode


def test_quantize_of_what_dequantize_gave_is_the_same_weight():
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (8, 64), np.uint8)
    codes[:, ::16] = 7  # every group reaches 6, so its scale is recovered
    scales = rng.integers(1, 0x7F, (8, 4), np.uint8)
    scales[0, 0] = 0x7E  # 448, so the tensor's scale is recovered
    weight = weight_of(codes, scales, 2.0**-7)
    again = nvfp4.quantize(nvfp4.dequantize(weight).astype(np.float32))
    assert np.array_equal(again.packed, weight.packed)
    assert np.array_equal(again.block_scale, weight.block_scale)
    assert again.global_scale_decode == weight.global_scale_decode


def test_quantize_of_a_group_far_below_the_largest_is_zeros_with_their_signs():
    values = np.full((1, 32), 1e-9, np.float32)
    values[0, 1::2] *= -1
    values[0, 0] = 1.0
    weight = nvfp4.quantize(values)
    assert weight.block_scale[0, 1] == 0
    assert nvfp4.unpack(weight.packed)[0, 16:].tolist() == [0, 8] * 8


@pytest.mark.parametrize("shape", [(0, 32), (2, 0), (2, 16)])
def test_quantize_of_nothing_or_zeros_has_zero_scales(shape):
    weight = nvfp4.quantize(np.zeros(shape, np.float32))
    assert weight.shape == shape
    assert weight.global_scale_decode == 0
    assert not nvfp4.dequantize(weight).any()


@pytest.mark.parametrize("size", [1e-45, 5.27e-42, 1e-39, 3.3e38])
def test_quantize_at_the_edges_of_fp32_gives_finite_weights(size):
    weight = nvfp4.quantize(np.full((1, 16), size, np.float32))
    assert np.isfinite(nvfp4.dequantize(weight)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantize_of_a_value_that_is_not_finite_is_refused(bad):
    values = np.ones((2, 16), np.float32)
    values[1, 3] = bad
    with pytest.raises(ContractError, match="NaN or infinity in the values"):
        nvfp4.quantize(values)


@pytest.mark.parametrize("shape", [(2, 15), (2, 17), (16,), (1, 2, 16)])
def test_quantize_of_partial_groups_or_other_ranks_is_refused(shape):
    with pytest.raises(ContractError, match=r"expected \(N, K\) with K a multiple of 16"):
        nvfp4.quantize(np.ones(shape, np.float32))


def test_transpose_swaps_bytes_into_buffers_of_its_own():
    rng = np.random.default_rng(2)
    weight = nvfp4.quantize(rng.standard_normal((5, 48)).astype(np.float32))
    other = nvfp4.transpose(weight)
    assert other.layout == nvfp4.TRANSPOSED
    assert other.shape == weight.shape == (5, 48)
    assert np.array_equal(other.packed, weight.packed.T)
    assert np.array_equal(other.block_scale, weight.block_scale.T)
    assert other.packed.flags.c_contiguous
    assert not np.shares_memory(other.packed, weight.packed)
    back = nvfp4.transpose(other)
    assert back.layout == nvfp4.ROW_MAJOR
    assert np.array_equal(back.packed, weight.packed)


@pytest.mark.parametrize(
    ("packed", "scale", "decode", "layout", "message"),
    [
        (
            (4, 8),
            (4, 2),
            (),
            nvfp4.ROW_MAJOR,
            r"block_scale has shape \(4, 2\), expected \(4, 1\) for .*\(4, 16\)",
        ),
        ((8, 4), (4, 1), (), nvfp4.TRANSPOSED, r"block_scale has shape \(4, 1\), expected \(1, 4\)"),
        ((4, 8), (4, 1), (1,), nvfp4.ROW_MAJOR, r"global_scale_decode has shape \(1,\), expected \(\)"),
        ((3, 4, 8), (3, 4, 1), (), nvfp4.ROW_MAJOR, r"global_scale_decode has shape \(\), expected \(3,\)"),
        ((4, 4), (4, 1), (), nvfp4.ROW_MAJOR, "K is 8, expected a multiple of 16"),
        ((8,), (1,), (), nvfp4.ROW_MAJOR, r"packed has shape \(8,\)"),
        ((4, 8), (4, 1), (), "swizzled", "layout is 'swizzled', expected nvfp4_row_major or nvfp4_transposed"),
    ],
)
def test_weight_whose_parts_do_not_belong_together_is_refused(packed, scale, decode, layout, message):
    with pytest.raises(ContractError, match=message):
        nvfp4.Nvfp4Weight(np.zeros(packed, np.uint8), np.zeros(scale, np.uint8), np.ones(decode, np.float32), layout)
