// The forms that exist; work.py holds the same table, and chooses among them.
#include "gemm.cuh"

GEMM(gemm_t32, 32, 2, 2, 6)
GEMM(gemm_t32_r192, 32, 3, 2, 7)
GEMM(gemm_t64, 64, 2, 2, 7)
GEMM(gemm_t64_r192, 64, 3, 2, 6)
GEMM(gemm_t96, 96, 2, 1, 8)
GEMM(gemm_t128, 128, 2, 1, 6)
GEMM(gemm_t192, 192, 2, 1, 7)
GEMM(gemm_t256, 256, 2, 1, 5)
