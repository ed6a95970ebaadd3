"""The contract of every w4a16 tile GEMM."""

from dataclasses import replace

import numpy as np
from kernel_muster.plugins._contracts import Dims, projection, projection_cases
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Arguments, Case
from kernel_muster.registry.contract.signature import WeightParam

# Tiles have 32, 64 or 128 rows, 64 to 256 features, and stages of 32, 64 or 128 k; rows of the transposed copy are
# whole vectors where N is a multiple of 16, those of scales in the row-major weight where K is one of 64.
_SIZES = (
    ("one_above_m64", 65, 65, 96),
    ("one_above_m128", 129, 129, 48),
    ("partial_second_m128_tile", 200, 64, 64),
    ("one_below_m64", 63, 144, 96),
    ("whole_m64_partial_n", 64, 272, 48),
    ("one_above_m32", 33, 80, 320),
    ("whole_m128", 128, 128, 128),
    ("one_above_m128_partial_n", 129, 208, 80),
    ("partial_tiles_deep_k", 65, 144, 1040),
    ("ragged_rows_of_whole_k_steps", 67, 131, 192),
    ("many_row_tiles", 1024, 48, 32),
)


def _uneven_weight(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Return a weight of Gaussian values shrunk by group: scales reach their subnormals, zero and minus zero."""
    rows, groups = dims["N"], dims["K"] // nvfp4.GROUP
    shrunk = np.exp2(-rng.integers(0, 20, (rows, groups)) * rng.integers(0, 2, (rows, groups)))
    values = rng.standard_normal((rows, dims["K"])) * np.repeat(shrunk, nvfp4.GROUP, axis=1)
    weight = nvfp4.quantize(values.astype(np.float32))
    negative = (weight.block_scale == 0) & (rng.integers(0, 2, (rows, groups)) == 1)
    return {"w": replace(weight, block_scale=np.where(negative, 0x80, weight.block_scale).astype(np.uint8))}


_SAME = projection(
    "w4a16_gemm",
    "out = x w^T for NVFP4 weights and BF16 activations, FP32 accumulation, one rounding to BF16",
    WeightParam("w", "nvfp4", ("N", "K")),
    projection_cases((1, 2, 16, 17)) + tuple(Case(name, {"M": m, "N": n, "K": k}) for name, m, n, k in _SIZES),
)
W4A16_GEMM = replace(_SAME, inputs=_uneven_weight)
