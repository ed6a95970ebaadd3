// Entry points of GEMV and GEMM with BF16 weights, sm_80 and newer except sm_90a. Launched by launch.py.
#include "bf16.cuh"
#include "gemm_mma.cuh"

DENSE_GEMM(narrow, Narrow, )
DENSE_GEMM(spread, Spread, SPREAD_CLUSTER)
DENSE_GEMM(wide, Wide, )
