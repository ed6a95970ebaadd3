// One output of the causal convolution with four taps: the taps of a channel times its last four inputs, oldest first,
// by fused multiply-add in FP32, then silu. All kernels share this function, so that their bits are the same.
#pragma once
#include "silu.cuh"

constexpr int TAPS = 4;

__device__ __forceinline__ float convolved(const float (&taps)[TAPS], const float (&window)[TAPS - 1], float newest) {
    float total = taps[0] * window[0];
    total = fmaf(taps[1], window[1], total);
    total = fmaf(taps[2], window[2], total);
    return silu(fmaf(taps[3], newest, total));
}
