// Entry points of the NVFP4 GEMV for M <= 16 (gemv.cuh), in a separate file so that both compile in parallel. With
// -DPERSISTENT, for Hopper, large N has a persistent kernel. Launched by launch.py. sm_80 and newer.
#include "gemv.cuh"

FOR_EACH_SPLIT(GEMV, 16)
#ifdef PERSISTENT
#include "gemv_persistent.cuh"
GEMV_PERSISTENT(k2048, K2048, 2048)
GEMV_PERSISTENT(k5120, K5120, 5120)
#else
GEMV(k5120_many, K5120LargeN, 16)
#endif
