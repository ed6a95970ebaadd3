"""The contract of the Hopper GEMM: that of the w4a16 family, with cases for its tiles and for shared work."""

from kernel_muster.plugins._contracts import dot_tolerance, projection, projection_cases
from kernel_muster.registry.contract.contracts import Case
from kernel_muster.registry.contract.signature import WeightParam

# Token tiles are 32 to 256, row tiles 128 to 512, K steps 64. Few rows of weights and much K: every tile is shared by
# many workers. Many rows and little K: workers have several whole tiles, and share the rest.
_TILES = (
    *(Case(f"tokens_{m}", {"M": m, "N": 130, "K": 272}) for m in (32, 33, 64, 65, 128, 129, 192, 193, 256, 257)),
    Case("a_tile_shared_by_all", {"M": 40, "N": 8, "K": 8192}, tolerance=dot_tolerance(8192)),
    Case("two_tiles_shared_by_all", {"M": 100, "N": 520, "K": 5120}, tolerance=dot_tolerance(5120)),
    Case("shares_across_tiles", {"M": 257, "N": 1032, "K": 208}),
    Case("whole_tiles_and_shares", {"M": 530, "N": 5120, "K": 32}),
    Case("panels_of_tokens", {"M": 2400, "N": 264, "K": 48}),
)

W4A16_HOPPER_GEMM = projection(
    "w4a16_hopper_gemm",
    "out = x w^T for NVFP4 weights and BF16 activations, FP32 accumulation, one rounding to BF16",
    WeightParam("w", "nvfp4", ("N", "K")),
    projection_cases((1, 2, 16, 17)) + _TILES,
)
