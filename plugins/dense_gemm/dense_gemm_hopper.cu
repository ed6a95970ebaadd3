// Entry points of GEMV and GEMM with BF16 weights for sm_90a: TMA and wgmma where rows are aligned. Launched by
// launch.py.
#include "gemv_tma.cuh"
#include "gemm_mma.cuh"
#include "gemm_split_k.cuh"

DENSE_WGMMA(n256, 256, 4)
DENSE_WGMMA(n192, 192, 5)
DENSE_WGMMA(n128, 128, 6)
DENSE_WGMMA(n64, 64, 8)
DENSE_SPLIT(split, 64, 6)
