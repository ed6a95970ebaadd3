// NVFP4 GEMV for M <= 16: a file of its own, so that both compile at once.
#include "gemv.cuh"

FOR_EACH_SPLIT(GEMV, 16)
GEMV(k5120_many, K5120Many, 16)
