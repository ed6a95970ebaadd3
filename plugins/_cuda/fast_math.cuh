// Approximate functions of the hardware.
#pragma once

// 2^x with a relative error of 2^-22. 2^-infinity is 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
