// NVFP4 GEMV for M <= 8.
#include "gemv.cuh"

FOR_EACH_SPLIT(GEMV, 8)
GEMV(k4096_early, K4096Early, 8)
