// The two gates of one head of the gated delta rule, FP32 from BF16:
//
//   decay = exp(-rate softplus(a + bias)), rate = exp(a_log)          beta = sigmoid(b)
//
// softplus(x) = max(x, 0) + log1p(exp(-|x|)) never overflows.
#pragma once
#include "bf16.cuh"

__device__ __forceinline__ float decay_of(bf16 a, float rate, float bias) {
    const float x = __bfloat162float(a) + bias;
    const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
    return expf(-rate * softplus);
}
__device__ __forceinline__ float beta_of(bf16 b) { return sigmoid(__bfloat162float(b)); }
