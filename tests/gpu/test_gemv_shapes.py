"""GEMVs at sizes whose entry point depends on the number of rows: right results, and equal bits for each row."""

import pytest
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight

pytestmark = pytest.mark.gpu

# Odd numbers of tiles: with two tiles in each warp, the last one has one. 3.4e-3: LARGEST_ERROR of muster bench.
SHAPES = ((9010, 5120), (10570, 5120), (17410, 5120), (100_010, 5120), (10600, 2048), (12700, 2048), (100_010, 2048))


def multiply(cupy, handle, weight, x):
    out = cupy.full((x.shape[0], weight.shape[0]), 0x7FD5, cupy.uint16).view(x.dtype)
    handle(x=x, w=weight, out=out)
    return out.view(cupy.uint16)


@pytest.mark.parametrize(("features", "depth"), SHAPES)
def test_rows_have_the_bits_of_one_row_whatever_serves_them(cupy, kernels, features, depth):
    from kernel_muster.bench.data.nvfp4 import make_dense_data

    data = make_dense_data(features, depth, 16)
    one = kernels.kernel("w4a16_gemv", "w4a16_gemv")
    weight = one.prepare_weight(data.weight)
    alone = cupy.concatenate([multiply(cupy, one, weight, data.x[m : m + 1]) for m in range(16)])
    assert data.error(alone.view(data.x.dtype), 16) <= 3.4e-3
    for rows in (2, 8, 16):
        batch = kernels.kernel("w4a16_gemv", f"w4a16_gemv_batch{rows}")
        assert bool((multiply(cupy, batch, weight, data.x[:rows]) == alone[:rows]).all())
    wide = kernels.kernel("w4a16_gemv", "w4a16_gemv_batch256")
    for rows in (1, 16):
        assert bool((multiply(cupy, wide, weight, data.x[:rows]) == alone[:rows]).all())
    # so few features of the same split are served one tile a warp
    packed, scales = data.weight.packed[:4096], data.weight.block_scale[:4096]
    part = one.prepare_weight(Nvfp4Weight(packed, scales, data.weight.global_scale_decode))
    assert bool((multiply(cupy, one, part, data.x[:1]) == alone[:1, :4096]).all())


@pytest.mark.parametrize(
    ("features", "depth"),
    [
        (9216, 2048),
        (512, 2048),
        (2048, 512),
        (2048, 768),
        (2048, 4096),
        (5120, 6144),
        (1024, 5120),
        (520, 17408),
        (70, 80),
    ],
)
def test_rows_of_the_wide_tier_have_the_bits_of_one_row(cupy, kernels, features, depth):
    from kernel_muster.bench.data.nvfp4 import make_dense_data

    data = make_dense_data(features, depth, 100)
    one, wide = (kernels.kernel("w4a16_gemv", f"w4a16_gemv{tier}") for tier in ("", "_batch256"))
    weight = one.prepare_weight(data.weight)
    alone = cupy.concatenate([multiply(cupy, one, weight, data.x[m : m + 1]) for m in range(100)])
    assert data.error(alone.view(data.x.dtype), 100) <= 3.4e-3
    for rows in (1, 8, 17, 31, 32, 33, 64, 100):
        assert bool((multiply(cupy, wide, weight, data.x[:rows]) == alone[:rows]).all())
