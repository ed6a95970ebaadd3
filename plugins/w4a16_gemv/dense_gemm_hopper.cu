// The dense GEMM of sm_90a: wgmma for many rows, else the tiles of all.
#include "dense_gemm.cuh"
#include "dense_wgmma.cuh"

DENSE_WGMMA(n256, 256, 4)
DENSE_WGMMA(n192, 192, 5)
DENSE_WGMMA(n128, 128, 6)
DENSE_WGMMA(n64, 64, 8)
