// silu(x) = x * sigmoid(x) and the product of a SwiGLU, in FP32. All kernels share them, so that their bits are the
// same.
#pragma once
#include "bf16.cuh"

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float silu_mul(float gate, float up) { return silu(gate) * up; }
