// NVFP4 GEMV for M <= 16: a file of its own, so that both compile at once. Very many features have entry points of their own
// on Hopper.
#include "gemv.cuh"

FOR_EACH_SPLIT(GEMV, 16)
#if __CUDA_ARCH__ == 900
#include "gemv_resident.cuh"
GEMV_RESIDENT(k2048, K2048, 2048)
GEMV_RESIDENT(k5120, K5120, 5120)
#else
GEMV(k5120_many, K5120Many, 16)
#endif
