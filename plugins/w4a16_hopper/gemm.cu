// The forms that exist; launch.py holds the same table, and says which serves what.
#include "gemm.cuh"

GEMM(gemm_t32, 32, 2, 1, 20, 1)
GEMM(gemm_t64, 64, 2, 1, 14, 1)
GEMM(gemm_t128, 128, 2, 1, 10, 1)
GEMM(gemm_t192, 192, 2, 1, 7, 1)
GEMM(gemm_t256, 256, 2, 1, 5, 1)
