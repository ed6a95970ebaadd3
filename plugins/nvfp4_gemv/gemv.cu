// Entry points of the NVFP4 GEMV for M <= 8 (gemv.cuh). Launched by launch.py. sm_80 and newer.
#include "gemv.cuh"

FOR_EACH_SPLIT(GEMV, 8)
GEMV(k4096_early, K4096EarlyDecode, 8)
