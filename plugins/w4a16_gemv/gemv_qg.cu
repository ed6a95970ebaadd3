// NVFP4 GEMV of gated attention's query projection (gemv_qg.cuh).
#include "gemv_qg.cuh"

FOR_EACH_INPUT_SPLIT(GEMV_QG, 8)
