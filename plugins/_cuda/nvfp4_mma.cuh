// NVFP4 weights in layout nvfp4_mma_16x256 (made by nvfp4_layout.py) as the A operand of mma.sync.m16n8k16.
//
// Supertiles of 16 rows x 256 k, 2304 bytes each, in row-major order of tiles along N and supertiles along K. N is
// padded to 16 and K to 256, with zeros.
//   bytes 0..2047     [4 blocks of 64 k][32 lanes][4 words]: a word is the 8 weights of one lane for one mma
//   bytes 2048..2303  [32 lanes][4 blocks][2 row halves]: E5M3 scales, the same values as the checkpoint's E4M3
//
// Lane (g, t) = (lane / 4, lane % 4) holds weight rows g and g + 8 and k = 64 b + 16 t .. + 15. Its part of an
// activation row is therefore 32 contiguous bytes. The order of k inside a block is not that of the mma, but both
// operands use it. The result of the mma has weight rows as M and activation rows as N.
#pragma once
#include "bf16.cuh"
#include "nvfp4_decode.cuh"
#include "mma.cuh"

constexpr int TILE_N = 16;
constexpr int TILE_K = 256;
constexpr int CODE_BYTES = TILE_N * TILE_K / 2;
constexpr int SUPERTILE_BYTES = CODE_BYTES + TILE_N * TILE_K / 16;
// An E5M3 scale at bits 11..4 over this base is the BF16 of scale * 2^118.
constexpr u32 SCALE_BASE = 0x70007000u;

// --- PTX (ISA 8.0): a single statement compiles faster than C++, to the same machine code ---

#define MMA(C, A, B) "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {" C "}, {" A "}, {" B "}, {" C "};\n"

// clang-format off
// 8 codes -> the A operand: {row g, k..}, {row g + 8, k..}, {row g, k + 8..}, {row g + 8, k + 8..}.
#define DECODE(A0, A1, A2, A3, CODES, LOW, HIGH) \
    "and.b32 t, " CODES ", 0x81C081C0;\n" PRODUCT(A0, "t", LOW) \
    "shl.b32 t, " CODES ", 3;\nand.b32 t, t, 0x81C081C0;\n" PRODUCT(A1, "t", HIGH) \
    "shl.b32 t, " CODES ", 6;\nand.b32 t, t, 0x81C081C0;\n" PRODUCT(A2, "t", LOW) \
    "shr.u32 t, " CODES ", 3;\nand.b32 t, t, 0x01800180;\nshr.u32 u, " CODES ", 7;\nand.b32 u, u, 0x00400040;\n" \
    "or.b32 t, t, u;\nshl.b32 u, " CODES ", 1;\nand.b32 u, u, 0x80008000;\nor.b32 t, t, u;\n" PRODUCT(A3, "t", HIGH)
#define TEMPORARIES ".reg .b32 t, u, minus_zero;\nmov.b32 minus_zero, 0x80008000;\n"
// clang-format on

// Weights are read once and bypass L1, which holds x.
__device__ __forceinline__ uint4 load_codes(const u8* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ uint2 load_scales(const u8* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
// The same, not moved by the compiler (global_memory.cuh).
__device__ __forceinline__ uint4 load_codes_now(const u8* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_scales_now(const u8* p) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// --- device functions ---

// One E5M3 byte of a scale word as a pair of BF16: scale * 2^118, twice.
__device__ __forceinline__ u32 scale_pair(u32 scales, int byte) {
    return __byte_perm(scales, 0, 0x4040 | (byte << 8) | byte) * 16u + SCALE_BASE;
}

__device__ __forceinline__ void decode(u32 codes, u32 scale_low, u32 scale_high, u32 (&a)[4]) {
    asm volatile("{\n" TEMPORARIES DECODE("%0", "%1", "%2", "%3", "%4", "%5", "%6") "}"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(codes), "r"(scale_low), "r"(scale_high));
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
    // The same before pdl_wait. An ld.global.nc could be moved behind it (pdl.cuh).
    __device__ __forceinline__ void load_before_wait(const u8* p, int lane) {
#pragma unroll
        for (int block = 0; block < 4; ++block) codes[block] = load_codes_now(p + block * 512 + lane * 16);
        scales = load_scales_now(p + CODE_BYTES + lane * 8);
    }
};

// x[row, k .. k + 15] for NT groups of 8 rows. Rows from M on are zeros, and so is k from K on. WHOLE: K is a multiple
// of a supertile.
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

// Four decoded words: the A operands of a lane for the four mma of 64 k.
using Decoded = u32[4][4];

__device__ __forceinline__ void decode_block(Decoded& a, uint4 q, u32 scale_low, u32 scale_high) {
    decode(q.x, scale_low, scale_high, a[0]);
    decode(q.y, scale_low, scale_high, a[1]);
    decode(q.z, scale_low, scale_high, a[2]);
    decode(q.w, scale_low, scale_high, a[3]);
}

// With A accumulators. The mma of all row groups follow each other, so that none waits for the one before it.
template <int NT, int A>
__device__ __forceinline__ void multiply_decoded(float (&c)[A][NT][4], const Decoded& a, const uint4 (&x)[NT][2]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) mma_16x8x16(c[0][n], a[0], x[n][0].x, x[n][0].y);
#pragma unroll
    for (int n = 0; n < NT; ++n) mma_16x8x16(c[1 % A][n], a[1], x[n][0].z, x[n][0].w);
#pragma unroll
    for (int n = 0; n < NT; ++n) mma_16x8x16(c[2 % A][n], a[2], x[n][1].x, x[n][1].y);
#pragma unroll
    for (int n = 0; n < NT; ++n) mma_16x8x16(c[3 % A][n], a[3], x[n][1].z, x[n][1].w);
}

// clang-format off
// Both steps in one statement with its own registers: decoding into the registers of the last mma would wait for it.
#define DECODE_BLOCK(Q0, Q1, Q2, Q3, LOW, HIGH) \
    "{\n.reg .b32 a<16>;\n" TEMPORARIES \
    DECODE("a0", "a1", "a2", "a3", Q0, LOW, HIGH) DECODE("a4", "a5", "a6", "a7", Q1, LOW, HIGH) \
    DECODE("a8", "a9", "a10", "a11", Q2, LOW, HIGH) DECODE("a12", "a13", "a14", "a15", Q3, LOW, HIGH)
#define C_OPERAND(I) "+f"(c[I][0][0]), "+f"(c[I][0][1]), "+f"(c[I][0][2]), "+f"(c[I][0][3])
#define BLOCK_OPERANDS "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w), "r"(scale_low), "r"(scale_high), "r"(x[0][0].x), \
    "r"(x[0][0].y), "r"(x[0][0].z), "r"(x[0][0].w), "r"(x[0][1].x), "r"(x[0][1].y), "r"(x[0][1].z), "r"(x[0][1].w)
// clang-format on

template <int NT, int A>
__device__ __forceinline__ void multiply_block(float (&c)[A][NT][4], uint4 q, u32 scale_low, u32 scale_high,
                                               const uint4 (&x)[NT][2]) {
    // clang-format off
    if constexpr (NT == 1 && A == 2) {
        asm volatile(DECODE_BLOCK("%8", "%9", "%10", "%11", "%12", "%13")
                     MMA("%0, %1, %2, %3", "a0, a1, a2, a3", "%14, %15")
                     MMA("%4, %5, %6, %7", "a4, a5, a6, a7", "%16, %17")
                     MMA("%0, %1, %2, %3", "a8, a9, a10, a11", "%18, %19")
                     MMA("%4, %5, %6, %7", "a12, a13, a14, a15", "%20, %21") "}"
                     : C_OPERAND(0), C_OPERAND(1) : BLOCK_OPERANDS);
    } else if constexpr (NT == 1 && A == 4) {
        asm volatile(DECODE_BLOCK("%16", "%17", "%18", "%19", "%20", "%21")
                     MMA("%0, %1, %2, %3", "a0, a1, a2, a3", "%22, %23")
                     MMA("%4, %5, %6, %7", "a4, a5, a6, a7", "%24, %25")
                     MMA("%8, %9, %10, %11", "a8, a9, a10, a11", "%26, %27")
                     MMA("%12, %13, %14, %15", "a12, a13, a14, a15", "%28, %29") "}"
                     : C_OPERAND(0), C_OPERAND(1), C_OPERAND(2), C_OPERAND(3) : BLOCK_OPERANDS);
    } else {  // clang-format on
        Decoded a;
        decode_block(a, q, scale_low, scale_high);
        multiply_decoded(c, a, x);
    }
}
