"""The contract of every w4a16 tile GEMM, and that of the w4a4 ones, whose keys are open to other plugins."""

from dataclasses import replace

import numpy as np
from kernel_muster.plugins._contracts import Dims, exact_weight, f64, projection, projection_cases
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
W4A16_GEMM = replace(_SAME, inputs=_uneven_weight, open_keys=("w4a16_v3::w4a16_gemm_t_m128_v3",))


def _exact_w4a4(arguments: Arguments, dims: Dims) -> Arguments:
    """Return ``out = q(x) w^T`` in float64. Rows are quantised one by one: a row's bits depend on no other row."""
    rows = [nvfp4.dequantize(nvfp4.quantize(row)) for row in np.split(arguments["x"], dims["M"])] if dims["M"] else []
    quantised = np.concatenate(rows) if rows else f64(arguments["x"])
    return {"out": quantised @ exact_weight(arguments["w"]).T}


#: FP4 x FP4. Its bits are not those of w4a16: activations lose all but E2M1's digits.
W4A4_GEMM = replace(
    projection(
        "w4a4_gemm",
        "out = q(x) w^T for NVFP4 weights and BF16 activations, each row of x quantised alone as "
        "quantize_bf16_to_nvfp4 does, FP32 accumulation, one rounding to BF16",
        WeightParam("w", "nvfp4", ("N", "K")),
        projection_cases((1, 2, 16, 17)) + tuple(Case(name, {"M": m, "N": n, "K": k}) for name, m, n, k in _SIZES),
    ),
    reference=_exact_w4a4,
    open_keys=("w4a4::w4a4_gemm", "w4a4::w4a4_gemm_mfast"),
)
