// The dense GEMM of every architecture but sm_90a.
#include "dense_gemm.cuh"

DENSE_GEMM(wide, Wide, )
