// Rotary angles, and the rotation of one pair. Kernels that share these functions have the same bits.
#pragma once

constexpr double TURNS_PER_RADIAN = 0.15915494309189533577;
constexpr float RADIANS_PER_UNIT = 6.28318530717958647692f / 4294967296.0f;  // a full turn is 2^32 units

// YaRN multiplies a frequency by 1 - part + part * stretch, part = clamp((i - low) * slope, 0, 1), and cosine and sine
// by ``scale``. NO_YARN changes nothing.
struct YarnRamp {
    double low, slope, stretch, scale;
};
constexpr YarnRamp NO_YARN{0.0, 0.0, 1.0, 1.0};

__device__ __forceinline__ double turns_per_token(int i, double log2_step, const YarnRamp& ramp) {
    const double turns = exp2(-i * log2_step) * TURNS_PER_RADIAN;
    if (ramp.slope == 0.0) return turns;
    const double part = fmin(fmax((i - ramp.low) * ramp.slope, 0.0), 1.0);
    return turns * (1.0 - part + part * ramp.stretch);
}

// A step is less than a turn. In units of 2^-64 turns the product loses whole turns only, so that the reduction of the
// angle is exact. The nearest quarter turn is taken off too. FP32 polynomials of the rest (Cephes, sinf and cosf) have
// an error of 2^-23. This is four times as fast as sincospi in double precision, of which some devices have little.
__device__ __forceinline__ void cosine_and_sine(int position, double turns, double scale, float& cosine, float& sine) {
    const unsigned long long step = __double2ull_rz(turns * 0x1p64);
    const unsigned int units = (unsigned int)(((unsigned int)position * step + 0x80000000ull) >> 32);
    const unsigned int quarter = (units + 0x20000000u) >> 30;
    const float x = __fmul_rn((float)(int)(units - (quarter << 30)), RADIANS_PER_UNIT), square = __fmul_rn(x, x);
    const float s3 = __fmaf_rn(square, __fmaf_rn(square, -1.9515295891e-4f, 8.3321608736e-3f), -1.6666654611e-1f);
    const float c4 =
        __fmaf_rn(square, __fmaf_rn(square, 2.443315711809948e-5f, -1.388731625493765e-3f), 4.166664568298827e-2f);
    const float s = __fmaf_rn(__fmul_rn(square, s3), x, x), c = __fmaf_rn(square, __fmaf_rn(square, c4, -0.5f), 1.0f);
    const float by = (float)scale;
    const bool is_odd = quarter & 1;
    cosine = __fmul_rn((quarter + 1) & 2 ? -by : by, is_odd ? s : c);
    sine = __fmul_rn(quarter & 2 ? -by : by, is_odd ? c : s);
}

// One value of a pair after the rotation. The choice of the fused product is part of the bits.
__device__ __forceinline__ float rotated(bool is_high, float value, float other, float cosine, float sine) {
    return __fmaf_rn(value, cosine, __fmul_rn(other, is_high ? sine : -sine));
}
__device__ __forceinline__ float rotated_low(float low, float high, float cosine, float sine) {
    return rotated(false, low, high, cosine, sine);
}
__device__ __forceinline__ float rotated_high(float low, float high, float cosine, float sine) {
    return rotated(true, high, low, cosine, sine);
}
