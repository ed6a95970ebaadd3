// Products with BF16 weights for every architecture but sm_90a.
#include "bf16.cuh"
#include "dense_gemm.cuh"

DENSE_GEMM(narrow, Narrow, )
DENSE_GEMM(spread, Spread, SPREAD_CLUSTER)
DENSE_GEMM(wide, Wide, )
