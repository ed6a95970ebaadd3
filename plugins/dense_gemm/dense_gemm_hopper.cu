// Products with BF16 weights for sm_90a: bulk copies and wgmma, where rows are aligned.
#include "dense_brought.cuh"
#include "dense_gemm.cuh"
#include "dense_split.cuh"

DENSE_WGMMA(n256, 256, 4)
DENSE_WGMMA(n192, 192, 5)
DENSE_WGMMA(n128, 128, 6)
DENSE_WGMMA(n64, 64, 8)
DENSE_SPLIT(split, 64, 6)
