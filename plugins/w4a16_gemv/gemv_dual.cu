// Two NVFP4 GEMVs of one x in one launch (gemv_dual.cuh).
#include "gemv_dual.cuh"

FOR_EACH_INPUT_SPLIT(GEMV_DUAL, 8)
