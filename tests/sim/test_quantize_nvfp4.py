"""The kernels of quantize_nvfp4, as they are compiled, on Numba's simulator against the reference's bits."""

import numpy as np
import pytest
from kernel_muster.plugins.quantize_nvfp4 import contracts
from kernel_muster.plugins.quantize_nvfp4.launch import QUANTIZE, QUANTIZE_T, TRANSPOSE
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.arrays import ArrayView
from kernel_muster.registry.contract.dtypes import numpy_dtype

pytestmark = pytest.mark.sim

BF16 = numpy_dtype("bf16")
ELEMENTS = {"u8": np.uint8, "u32": np.uint32}
TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def kernels():
    from kernel_muster.plugins.quantize_nvfp4 import kernels

    return kernels


@pytest.fixture
def launch(kernels):
    """Return what plans and runs one kernel as a device would, on flat host arrays."""

    def run(backend, contract, **arrays):
        bound = contract.signature.bind("sim", (), arrays)
        declared = {entry.name: entry.parameters for entry in backend.entries}
        for plan in backend.planner(bound, {}):
            arguments = [flat(*pair) for pair in zip(declared[plan.entry], plan.arguments, strict=True)]
            getattr(kernels, plan.entry)[plan.grid, plan.block](*arguments)

    return run


def flat(kind, value):
    if not isinstance(value, ArrayView):
        return np.int64(value)
    return value.owner.reshape(-1).view(ELEMENTS[kind.rstrip("*[:]")])


def quantized(launch, values):
    """Return ``(packed, block_scale, global_scale)`` of the plain kernel, once the fused one has given the same."""
    (n, k) = values.shape
    shapes = {"out_packed": (n, k // 2), "out_block_scale": (n, k // 16)}
    copies = {f"{name}_t": shape[::-1] for name, shape in shapes.items()}
    plain, fused = (
        {name: np.full(shape, 0xAA, np.uint8) for name, shape in wanted.items()} for wanted in (shapes, shapes | copies)
    )
    for outs in (plain, fused):
        outs["out_global_scale"] = np.full(1, 77, np.float32)
    launch(QUANTIZE, contracts.QUANTIZE, values=values, **plain)
    launch(QUANTIZE_T, contracts.QUANTIZE_T, values=values, **fused)
    for name in shapes:
        assert np.array_equal(fused[name], plain[name])
        assert np.array_equal(fused[f"{name}_t"], plain[name].T)
    assert np.array_equal(fused["out_global_scale"], plain["out_global_scale"], equal_nan=True)
    return plain["out_packed"], plain["out_block_scale"], plain["out_global_scale"][0]


def assert_exact(launch, values):
    values = np.ascontiguousarray(values, np.float64).astype(BF16)
    weight = nvfp4.quantize(values)
    packed, scale, decode = quantized(launch, values)
    assert decode.tobytes() == weight.global_scale_decode.tobytes()
    assert np.array_equal(scale, weight.block_scale)
    assert np.array_equal(packed, weight.packed)


def magnitudes(lowest, highest):
    """Return every BF16 number from one to the other, ascending."""
    first, last = (int(np.asarray(bound, BF16).view(np.uint16)) for bound in (lowest, highest))
    return np.arange(first, last + 1, dtype=np.uint16).view(BF16).astype(np.float64)


@pytest.mark.parametrize(("n", "k"), [(1, 16), (3, 48), (2, 400), (33, 144)])
def test_random_rows_of_very_different_size_have_the_bits_of_the_reference(launch, n, k):
    rng = np.random.default_rng(n)
    assert_exact(launch, rng.standard_normal((n, k)) * 2.0 ** -rng.integers(0, 24, (n, 1)))


def test_every_magnitude_under_a_global_scale_of_one_has_the_bits_of_the_reference(launch):
    """448 * 6 is the largest: block scales from zero over subnormals to 448, and every place between two codes."""
    values = magnitudes(2.0**-10, 2688)
    values = np.concatenate([np.zeros(-values.size % 16), values])
    assert_exact(launch, (values * np.where(np.arange(values.size) % 3, 1, -1)).reshape(-1, 16))


def test_every_block_scale_is_rounded_to_nearest_even(launch):
    """Groups whose largest value lies at, and one BF16 step beside, the middle between two E4M3 numbers."""
    steps = contracts._E4M3
    middles = 6 * (steps[1:] + steps[:-1]) / 2
    around = np.concatenate([middles * (1 + shift) for shift in (-(2.0**-7), 0, 2.0**-7)])
    values = np.zeros((around.size + 1, 16))
    values[:-1, 5], values[-1, 3] = around, 2688
    assert_exact(launch, values)


@pytest.mark.parametrize("exponent", [-9, -6, 0, 8])
def test_ties_between_codes_go_to_the_even_one(launch, exponent):
    """Block scale 2^exponent: the values are halfway between two magnitudes, exactly, or one BF16 step beside it."""
    row = np.zeros((2, 48))
    near = [step for tie in TIES[:7] for step in (tie, tie * (1 + 2.0**-7), tie * (1 - 2.0**-8))]
    row[0, : len(near)] = near
    row[0, 24 : 24 + TIES.size] = -TIES
    row[0, 15::16] = 6
    values = row * 2.0**exponent
    values[1, 0] = 2688
    assert_exact(launch, values)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_zeros_keep_their_signs_and_give_a_scale_of_zero(launch, sign):
    values = np.full((3, 32), 0.0) * sign
    assert_exact(launch, values)
    packed, scale, decode = quantized(launch, values.astype(BF16))
    assert (packed == (0x88 if sign < 0 else 0)).all()
    assert not scale.any()
    assert decode == 0


@pytest.mark.parametrize("bits", [1, 2, 0x15, 0x80, 0x1FF])
def test_subnormal_weights_have_the_bits_of_the_reference(launch, bits):
    """The global scale is a subnormal FP32 number, or zero although the values are not."""
    values = (np.arange(96, dtype=np.uint16) * 37 % (bits + 1)).astype(np.uint16)
    values[7] = bits
    assert_exact(launch, values.view(BF16).astype(np.float64).reshape(2, 48))


def test_group_far_below_the_largest_is_zero_with_its_signs(launch):
    values = np.full((2, 32), -1e-20)
    values[0, 0] = 3e38
    assert_exact(launch, values)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_value_that_is_not_finite_makes_every_scale_nan(launch, bad):
    values = np.ones((2, 32), BF16)
    values[1, 19] = bad
    _, scale, decode = quantized(launch, values)
    assert np.isnan(decode)
    assert (scale == 0x7F).all()


def test_empty_weight_gives_a_global_scale_of_zero(launch):
    assert quantized(launch, np.zeros((0, 32), BF16))[2] == 0


@pytest.mark.parametrize(("n", "groups"), [(1, 1), (32, 4), (33, 5)])
def test_transposition_moves_every_byte(launch, n, groups):
    rng = np.random.default_rng(n)
    packed, scale = rng.integers(0, 256, (n, 8 * groups), np.uint8), rng.integers(0, 256, (n, groups), np.uint8)
    outs = {"out_packed": np.zeros((8 * groups, n), np.uint8), "out_block_scale": np.zeros((groups, n), np.uint8)}
    launch(TRANSPOSE, contracts.TRANSPOSE, packed=packed, block_scale=scale, **outs)
    assert np.array_equal(outs["out_packed"], packed.T)
    assert np.array_equal(outs["out_block_scale"], scale.T)


def test_sizes_of_the_plans_are_those_of_the_kernels(kernels):
    from kernel_muster.plugins.quantize_nvfp4 import launch

    assert (launch.THREADS, launch.TILE, launch.TILE_GROUPS) == (kernels.THREADS, kernels.TILE, kernels.TILE_GROUPS)
