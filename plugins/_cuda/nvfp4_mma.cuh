// NVFP4 weights in layout nvfp4_mma_16x256 (nvfp4_layout.py makes it) as the A operand of mma.sync.m16n8k16.
//
// Supertiles of 16 rows x 256 k, 2304 bytes each, tile by tile along N, supertile by supertile along K; N padded to 16,
// K to 256, with zeros.
//   bytes 0..2047     [4 blocks of 64 k][32 lanes][4 words]: a word is the 8 weights one lane feeds to one mma
//   bytes 2048..2303  [32 lanes][4 blocks][2 row halves]: E5M3 scales, the same values as the checkpoint's E4M3
//
// Lane (g, t) = (lane / 4, lane % 4) holds weight rows g and g + 8 and k = 64 b + 16 t .. + 15, so that its part of an
// activation row is 32 contiguous bytes. The k order inside a block differs from the mma's own; both operands use the
// same one. The result of the mma has weight rows as M, activation rows as N.
//
// Exact: E2M1 bits read as BF16 of value x 2^-126, times scale x 2^118. What is left, 2^8, goes into the global scale.
#pragma once
#include <cuda_bf16.h>

using u8 = unsigned char;
using u32 = unsigned int;

constexpr int TILE_N = 16;
constexpr int TILE_K = 256;
constexpr int CODE_BYTES = TILE_N * TILE_K / 2;
constexpr int SUPERTILE_BYTES = CODE_BYTES + TILE_N * TILE_K / 16;
// A scale as E5M3 at bits 11..4 over this base reads as BF16 of scale * 2^118.
constexpr u32 SCALE_BASE = 0x70007000u;
constexpr float EXPONENT_GAP = 256.0f;

// --- instruction wrappers (PTX ISA 8.0) ---

__device__ __forceinline__ u32 multiply_bf16x2(u32 a, u32 b) {
    u32 d;
#if __CUDA_ARCH__ >= 900
    asm volatile("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else  // adding -0 changes no product
    asm volatile("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return d;
}

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Weights are read once: keep them out of L1, where x lives.
__device__ __forceinline__ uint4 load_codes(const u8* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint2 load_scales(const u8* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// --- device functions ---

// One E5M3 byte of a scale word as a pair of BF16: scale * 2^118, twice.
__device__ __forceinline__ u32 scale_pair(u32 scales, int byte) {
    return __byte_perm(scales, 0, 0x4040 | (byte << 8) | byte) * 16u + SCALE_BASE;
}

// 8 codes -> the A operand: {row g, k..}, {row g + 8, k..}, {row g, k + 8..}, {row g + 8, k + 8..}.
__device__ __forceinline__ void decode(u32 codes, u32 scale_low, u32 scale_high, u32 (&a)[4]) {
    constexpr u32 MASK = 0x81C081C0u;
    a[0] = multiply_bf16x2(codes & MASK, scale_low);
    a[1] = multiply_bf16x2((codes << 3) & MASK, scale_high);
    a[2] = multiply_bf16x2((codes << 6) & MASK, scale_low);
    const u32 scattered =
        ((codes >> 3) & 0x01800180u) | ((codes >> 7) & 0x00400040u) | ((codes << 1) & 0x80008000u);
    a[3] = multiply_bf16x2(scattered, scale_high);
}

struct Supertile {
    uint4 codes[4];
    uint2 scales;

    __device__ __forceinline__ void load_block(const u8* p, int block, int lane) {
        codes[block] = load_codes(p + block * 512 + lane * 16);
    }
    __device__ __forceinline__ void load(const u8* p, int lane) {
#pragma unroll
        for (int block = 0; block < 4; ++block) load_block(p, block, lane);
        scales = load_scales(p + CODE_BYTES + lane * 8);
    }
};

// x[row, k .. k + 15] for NT groups of 8 rows; rows from M on, and k from K on (unless K is WHOLE supertiles), are zeros.
template <int NT, bool WHOLE>
__device__ __forceinline__ void load_x(uint4 (&v)[NT][2], const __nv_bfloat16* __restrict__ x, int stride, int M, int K,
                                       int g, int k) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        v[n][0] = v[n][1] = make_uint4(0, 0, 0, 0);
        if (n * 8 + g < M && (WHOLE || k < K)) {
            const uint4* p = reinterpret_cast<const uint4*>(x + (size_t)(n * 8 + g) * stride + k);
            v[n][0] = p[0];
            v[n][1] = p[1];
        }
    }
}

// 64 k of one supertile: four words decoded into registers of their own before their mma, on A accumulators. A decode that
// reuses the registers of the last mma would wait for it.
template <int NT, int A>
__device__ __forceinline__ void multiply_block(float (&c)[A][NT][4], uint4 q, u32 scale_low, u32 scale_high,
                                               const uint4 (&x)[NT][2]) {
    u32 a[4][4];
    decode(q.x, scale_low, scale_high, a[0]);
    decode(q.y, scale_low, scale_high, a[1]);
    decode(q.z, scale_low, scale_high, a[2]);
    decode(q.w, scale_low, scale_high, a[3]);
#pragma unroll
    for (int n = 0; n < NT; ++n) mma_16x8x16(c[0][n], a[0], x[n][0].x, x[n][0].y);
#pragma unroll
    for (int n = 0; n < NT; ++n) mma_16x8x16(c[1 % A][n], a[1], x[n][0].z, x[n][0].w);
#pragma unroll
    for (int n = 0; n < NT; ++n) mma_16x8x16(c[2 % A][n], a[2], x[n][1].x, x[n][1].y);
#pragma unroll
    for (int n = 0; n < NT; ++n) mma_16x8x16(c[3 % A][n], a[3], x[n][1].z, x[n][1].w);
}
