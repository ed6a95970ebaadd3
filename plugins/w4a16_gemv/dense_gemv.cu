// The GEMV of BF16 weights (dense_gemv.cuh). Launched by launch.py. sm_80 and newer.
#include "dense_gemv.cuh"

DENSE_GEMVS(dense_gemv)
