// Loads and stores of BF16 rows as FP32 values: 8 at a time (16 bytes) or one. Also the logistic function.
//
// Rows of odd length start at any even address. Kernels therefore exist for both widths, and the launcher chooses by
// the length of a row. The arithmetic is the same in both.
#pragma once
#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

template <int WIDTH>
struct Values {
    float at[WIDTH];
};

// Values as they are loaded. They take half the registers of FP32, so that more loads are in flight.
template <int WIDTH>
struct Raw;
template <>
struct Raw<8> {
    uint4 bits;
};
template <>
struct Raw<1> {
    bf16 bits;
};

// The WIDTH values of vector ``vec`` of a row. With a WIDTH of 8, the row starts at a multiple of 16 bytes.
template <int WIDTH>
__device__ __forceinline__ Raw<WIDTH> load_raw(const bf16* row, size_t vec) {
    return reinterpret_cast<const Raw<WIDTH>*>(row)[vec];
}
template <int WIDTH>
__device__ __forceinline__ void store_raw(bf16* row, size_t vec, Raw<WIDTH> raw) {
    reinterpret_cast<Raw<WIDTH>*>(row)[vec] = raw;
}

__device__ __forceinline__ Values<8> widen(Raw<8> raw) {
    const unsigned int words[4] = {raw.bits.x, raw.bits.y, raw.bits.z, raw.bits.w};
    Values<8> v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v.at[2 * i] = __uint_as_float(words[i] << 16);
        v.at[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
    return v;
}
__device__ __forceinline__ Values<1> widen(Raw<1> raw) { return {{__bfloat162float(raw.bits)}}; }

__device__ __forceinline__ bf16 rounded(float value) { return __float2bfloat16_rn(value); }

__device__ __forceinline__ unsigned int bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned int*>(&pair);
}
__device__ __forceinline__ Raw<8> narrow(const Values<8>& v) {
    return {make_uint4(bf16_pair(v.at[0], v.at[1]), bf16_pair(v.at[2], v.at[3]), bf16_pair(v.at[4], v.at[5]),
                       bf16_pair(v.at[6], v.at[7]))};
}
__device__ __forceinline__ Raw<1> narrow(const Values<1>& v) { return {__float2bfloat16_rn(v.at[0])}; }

template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> load(const bf16* row, size_t vec) {
    return widen(load_raw<WIDTH>(row, vec));
}
template <int WIDTH>
__device__ __forceinline__ void store(bf16* row, size_t vec, const Values<WIDTH>& v) {
    store_raw<WIDTH>(row, vec, narrow(v));
}

// The argument of the exponential is negative, so that it never overflows. The quotient has an error of 2 units in the
// last place and the bits of __fdividef. An exact division is a function call, which costs registers. __fdividef would
// also test for a subnormal divisor.
__device__ __forceinline__ float sigmoid(float x) {
    const float small = expf(-fabsf(x));
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + small));
    return __fmul_rn(x >= 0.0f ? 1.0f : small, inverse);
}
