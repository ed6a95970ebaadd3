// silu(x) = x * sigmoid(x) and the product of a SwiGLU, in FP32. All kernels share them, so that their bits are the
// same.
#pragma once
#include "bf16.cuh"

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float silu_mul(float gate, float up) { return silu(gate) * up; }

// The epilogue of a SwiGLU: both products are rounded to BF16 first, as separate launches would.
__device__ __forceinline__ bf16 activated(float gate, float up) {
    return rounded(silu_mul(__bfloat162float(rounded(gate)), __bfloat162float(rounded(up))));
}
