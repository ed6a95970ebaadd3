// NVFP4 GEMV for M <= 16: a file of its own, so that both compile at once. With -DRESIDENT, for Hopper, very many
// features have entry points of their own.
#include "gemv.cuh"

FOR_EACH_SPLIT(GEMV, 16)
#ifdef RESIDENT
#include "gemv_resident.cuh"
GEMV_RESIDENT(k2048, K2048, 2048)
GEMV_RESIDENT(k5120, K5120, 5120)
#else
GEMV(k5120_many, K5120Many, 16)
#endif
