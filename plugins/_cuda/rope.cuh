// Rotary angles and the turn of one pair, for kernels that are to give the same bits.
#pragma once

constexpr double TURNS_A_RADIAN = 0.15915494309189533577;
constexpr float RADIANS_A_UNIT = 6.28318530717958647692f / 4294967296.0f;  // 2^32 units are a turn

// How YaRN stretches a frequency: by 1 - part + part * stretch, part = clamp((i - low) * slope, 0, 1); and by how much it
// scales what turns. NO_RAMP changes nothing.
struct Ramp {
    double low, slope, stretch, scale;
};
constexpr Ramp NO_RAMP{0.0, 0.0, 1.0, 1.0};

__device__ __forceinline__ double turns_a_position(int i, double log2_step, const Ramp& ramp) {
    const double turns = exp2(-i * log2_step) * TURNS_A_RADIAN;
    if (ramp.slope == 0.0) return turns;
    const double part = fmin(fmax((i - ramp.low) * ramp.slope, 0.0), 1.0);
    return turns * (1.0 - part + part * ramp.stretch);
}

// A step is below a turn: in 2^-64ths of it the product loses the whole turns and nothing else. The quarter turn that it
// is nearest to goes too, and FP32 polynomials of the rest (Cephes, sinf and cosf) err by little more than they round:
// cosine and sine err by 2^-23. Four times as fast as sincospi in double precision, of which some devices have little.
__device__ __forceinline__ void cosine_and_sine(int position, double turns, double scale, float& cosine, float& sine) {
    const unsigned long long step = __double2ull_rz(turns * 0x1p64);
    const unsigned int units = (unsigned int)(((unsigned int)position * step + 0x80000000ull) >> 32);
    const unsigned int quarter = (units + 0x20000000u) >> 30;
    const float x = __fmul_rn((float)(int)(units - (quarter << 30)), RADIANS_A_UNIT), square = __fmul_rn(x, x);
    const float s3 = __fmaf_rn(square, __fmaf_rn(square, -1.9515295891e-4f, 8.3321608736e-3f), -1.6666654611e-1f);
    const float c4 = __fmaf_rn(square, __fmaf_rn(square, 2.443315711809948e-5f, -1.388731625493765e-3f), 4.166664568298827e-2f);
    const float s = __fmaf_rn(__fmul_rn(square, s3), x, x), c = __fmaf_rn(square, __fmaf_rn(square, c4, -0.5f), 1.0f);
    const float by = (float)scale;
    const bool is_odd = quarter & 1;
    cosine = __fmul_rn((quarter + 1) & 2 ? -by : by, is_odd ? s : c);
    sine = __fmul_rn(quarter & 2 ? -by : by, is_odd ? c : s);
}

// A value of a pair, turned, of the other one: which product is fused is part of the bits.
__device__ __forceinline__ float turned(bool is_high, float own, float other, float cosine, float sine) {
    return __fmaf_rn(own, cosine, __fmul_rn(other, is_high ? sine : -sine));
}
__device__ __forceinline__ float turned_low(float low, float high, float cosine, float sine) {
    return turned(false, low, high, cosine, sine);
}
__device__ __forceinline__ float turned_high(float low, float high, float cosine, float sine) {
    return turned(true, high, low, cosine, sine);
}
