// Rotary angles and the turn of one pair, for kernels that are to give the same bits.
#pragma once

constexpr double TURNS_A_RADIAN = 0.15915494309189533577;

// How YaRN stretches a frequency: by 1 - part + part * stretch, part = clamp((i - low) * slope, 0, 1); and by how much it
// scales what turns. NO_RAMP changes nothing.
struct Ramp {
    double low, slope, stretch, scale;
};
constexpr Ramp NO_RAMP{0.0, 0.0, 1.0, 1.0};

__device__ __forceinline__ double turns_a_position(int i, double log2_step, const Ramp& ramp) {
    const double part = fmin(fmax((i - ramp.low) * ramp.slope, 0.0), 1.0);
    return exp2(-i * log2_step) * TURNS_A_RADIAN * (1.0 - part + part * ramp.stretch);
}

// The whole turns go before the fraction is used; what rounding the product lost comes back.
__device__ __forceinline__ void cosine_and_sine(int position, double turns, double scale, float& cosine, float& sine) {
    const double product = position * turns, lost = fma((double)position, turns, -product);
    double s, c;
    sincospi(2.0 * ((product - rint(product)) + lost), &s, &c);
    cosine = (float)(c * scale);
    sine = (float)(s * scale);
}

// A pair (low, high) of values, turned: which products are fused is part of the bits.
__device__ __forceinline__ float turned_low(float low, float high, float cosine, float sine) {
    return __fmaf_rn(low, cosine, -__fmul_rn(high, sine));
}
__device__ __forceinline__ float turned_high(float low, float high, float cosine, float sine) {
    return __fmaf_rn(high, cosine, __fmul_rn(low, sine));
}
