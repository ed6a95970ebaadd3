// Entry points of the W4A16 GEMM for sm_90a: TOKENS, WARPGROUPS, SPAN, STAGES, CLUSTER_REDUCES (gemm.cuh). work.py has
// the same configurations; a test compares them. Launched by launch.py.
#include "gemm.cuh"

GEMM(gemm_t32, 32, 2, 2, 6, false)
GEMM(gemm_t64, 64, 2, 2, 7, true)
GEMM(gemm_t96, 96, 2, 1, 8, false)
GEMM(gemm_t128, 128, 2, 1, 6, false)
GEMM(gemm_t128_r192, 128, 3, 1, 7, false)
GEMM(gemm_t192, 192, 2, 1, 7, false)
GEMM(gemm_t256, 256, 2, 1, 5, false)
