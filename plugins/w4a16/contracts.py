"""The contract of every w4a16 tile GEMM."""

from kernel_muster.plugins._contracts import projection, projection_cases
from kernel_muster.registry.contracts import Case
from kernel_muster.registry.signature import WeightParam

# M tiles are 64 and 128, N tiles 64 and 128, K steps 32 and 64.
_TILES = (
    Case("one_above_m64", {"M": 65, "N": 65, "K": 96}),
    Case("one_above_m128", {"M": 129, "N": 129, "K": 48}),
    Case("partial_second_m128_tile", {"M": 200, "N": 64, "K": 64}),
)

W4A16_GEMM = projection(
    "w4a16_gemm",
    "out = x w^T for NVFP4 weights and BF16 activations, FP32 accumulation, one rounding to BF16",
    WeightParam("w", "nvfp4", ("N", "K")),
    projection_cases((1, 2, 16, 17)) + _TILES,
)
