"""The Hopper GEMM on its device, beyond the contract's cases."""

import numpy as np
import pytest
from kernel_muster.plugins.w4a16_hopper.work import CONFIGS, Work
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.dtypes import numpy_dtype

pytestmark = pytest.mark.gpu

BF16 = numpy_dtype("bf16")
SIZES = (40, 520, 1040)  # M, N, K: several tiles of every config but the widest, an odd number of chunks


@pytest.fixture(scope="module")
def gemm(kernels):
    # On its own architecture, any reason for its absence is a failure.
    if str(kernels.target.arch) != "sm_90a":
        pytest.skip(f"the Hopper GEMM is for sm_90a, here is {kernels.target}")
    return kernels.kernel("w4a16_hopper", "w4a16_hopper_gemm")


def problem(gemm, rows, features, depth):
    """Return ``x``, the prepared weight and the exact result, the first two on the device."""
    import cupy

    rng = np.random.default_rng(5)
    x = rng.standard_normal((rows, depth)).astype(np.float32).astype(BF16)
    weight = nvfp4.quantize(rng.standard_normal((features, depth)).astype(np.float32))
    expected = x.astype(np.float64) @ nvfp4.dequantize(weight).T
    there = nvfp4.Nvfp4Weight(cupy.asarray(weight.packed), cupy.asarray(weight.block_scale), weight.global_scale_decode)
    return cupy.asarray(x), gemm.prepare_weight(there), expected


def fresh(rows, features):
    import cupy

    return cupy.full((rows, features), 0x7FC0, cupy.uint16).view(BF16)  # NaN


def bits(array):
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    return cupy.asnumpy(array.view(cupy.uint16))


def assert_right(out, expected):
    result = (bits(out).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert np.linalg.norm(result - expected) <= 3e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("shares", ["one", "few", "all"])
@pytest.mark.parametrize("entry", CONFIGS)
def test_every_form_is_right_however_its_work_is_shared(gemm, monkeypatch, entry, shares):
    rows, features, depth = SIZES
    config = CONFIGS[entry]
    tiles, units = config.tiles(rows, features), config.tiles(rows, features) * config.steps(depth)
    chosen = {"one": Work(entry, 1, tiles), "few": Work(entry, 3, 0), "all": Work(entry, min(132, units), 0)}[shares]
    monkeypatch.setattr("kernel_muster.plugins.w4a16_hopper.launch.work_of", lambda *sizes: chosen)
    x, weight, expected = problem(gemm, rows, features, depth)
    out, again = fresh(rows, features), fresh(rows, features)
    gemm(x=x, w=weight, out=out)
    gemm(x=x, w=weight, out=again)
    assert_right(out, expected)
    assert np.array_equal(bits(out), bits(again))


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("entry", [entry for entry, config in CONFIGS.items() if config.cost.gather is not None])
@pytest.mark.parametrize("rows", [1, 40, 70])
def test_a_cluster_adds_its_parts_of_a_tile_up(gemm, monkeypatch, entry, blocks, rows):
    _, features, depth = SIZES
    chosen = Work(entry, CONFIGS[entry].tiles(rows, features) * blocks, 0, blocks)
    monkeypatch.setattr("kernel_muster.plugins.w4a16_hopper.launch.work_of", lambda *sizes: chosen)
    x, weight, expected = problem(gemm, rows, features, depth)
    out, again = fresh(rows, features), fresh(rows, features)
    for result in (out, again):
        gemm(x=x, w=weight, out=result)
    assert_right(out, expected)
    assert np.array_equal(bits(out), bits(again))


def test_rows_with_gaps_are_read_where_they_are(gemm):
    import cupy

    x, weight, expected = problem(gemm, *SIZES)
    wide = cupy.full((SIZES[0], SIZES[2] + 24), 0x7FC0, cupy.uint16)  # NaN around the rows
    wide[:, 8 : 8 + SIZES[2]] = x.view(cupy.uint16)
    out = fresh(*SIZES[:2])
    gemm(x=wide.view(BF16)[:, 8 : 8 + SIZES[2]], w=weight, out=out)
    assert_right(out, expected)


def test_prepared_launches_that_overlap_and_share_scratch_leave_their_counters_at_zero(gemm):
    import cupy

    x, weight, expected = problem(gemm, *SIZES)
    outs = [fresh(*SIZES[:2]) for _ in range(3)]
    scratch = cupy.empty(gemm.scratch_bytes(x=x, w=weight, out=outs[0]), cupy.uint8)
    launches = [gemm.prepare(x=x, w=weight, out=out, overlap=True, scratch=scratch) for out in outs]
    for _ in range(20):  # a counter other than zero would let a sum be read too early
        for launch in launches:
            launch()
    for out in outs:
        assert_right(out, expected)
        assert np.array_equal(bits(out), bits(outs[0]))
