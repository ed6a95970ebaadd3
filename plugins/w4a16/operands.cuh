// From shared memory to the tensor core: operands are loaded and weights decoded in registers ahead of their mma. Used
// by gemm.cuh. sm_80 and newer.
#pragma once
#include "nvfp4_decode.cuh"
#include "copies.cuh"
#include "mma.cuh"
#include "shared_memory.cuh"

// --- instruction wrappers (PTX ISA 8.0) ---

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("{\n.reg .b32 minus_zero;\nmov.b32 minus_zero, 0x80008000;\n" PRODUCT("%0", "%1", "%2") "}"
        : "=r"(d)
        : "r"(a), "r"(b));
    return d;
}

template <u32 SELECTOR>  // unlike __byte_perm, bit 3 of a selector repeats a byte's top bit
__device__ __forceinline__ u32 permute(u32 a, u32 b) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(SELECTOR));
    return d;
}

// --- decoding ---

// Four E4M3 scales -> for each a pair of BF16, scale * 2^118, twice. The bits of a scale in a BF16 are scale * 2^-120,
// subnormals included; two exact multiplications by 2^119 follow, because one factor would overflow.
__device__ __forceinline__ uint4 scale_pairs(u32 scales) {
    constexpr u32 LIFT = 0x7B007B00u;
    scales &= 0x7F7F7F7Fu;  // -0 is 0
    const u32 low = multiply(multiply(permute<0x4140>(scales, 0) * 16u, LIFT), LIFT);
    const u32 high = multiply(multiply(permute<0x4342>(scales, 0) * 16u, LIFT), LIFT);
    return make_uint4(
        permute<0x1010>(low, 0), permute<0x3232>(low, 0), permute<0x1010>(high, 0), permute<0x3232>(high, 0));
}

// One byte of codes, two adjacent k of a feature -> a register of B. ``low`` and ``high`` hold the codes of four bytes.
// One asm statement: C++ has the same machine code and compiles more slowly.
template <int BYTE>
__device__ __forceinline__ u32 decode(u32 low, u32 high, u32 scale) {
    constexpr u32 SPREAD = BYTE | (8 | BYTE) << 4 | (4 | BYTE) << 8 | (12 | BYTE) << 12;  // [low, 0, high, 0]
    u32 d;
    asm("{\n.reg .b32 t, minus_zero;\nmov.b32 minus_zero, 0x80008000;\n"
        "prmt.b32 t, %1, %2, %3;\n"
        "mul.lo.u32 t, t, 0x1040;\nand.b32 t, t, 0x81C081C0;\n"  // the sign to bit 15, the magnitude to bits 8..6
        PRODUCT("%0", "t", "%4") "}"
        : "=r"(d)
        : "r"(low), "r"(high), "n"(SPREAD), "r"(scale));
    return d;
}

// --- device functions ---

// Decodes the scales of a stage, once for the block: [GROUPS][BN] pairs.
template <class T>
__device__ __forceinline__ void decode_scales(u32* pairs, const u8* stage) {
    const u32* raw = reinterpret_cast<const u32*>(stage + T::X_BYTES + T::CODE_BYTES);
    if constexpr (T::WEIGHTS == Weights::TRANSPOSED) {
        constexpr int ALL = T::GROUPS * T::BN / 4;
#pragma unroll
        for (int i = 0; i < ALL; i += T::THREADS)
            if (ALL >= T::THREADS || threadIdx.x < ALL)
                reinterpret_cast<uint4*>(pairs)[i + threadIdx.x] = scale_pairs(raw[i + threadIdx.x]);
    } else {
        static_assert(T::BN == T::THREADS);
        const uint4 four = scale_pairs(raw[threadIdx.x]);
        u32* to = pairs + threadIdx.x;
        to[0] = four.x, to[T::BN] = four.y, to[2 * T::BN] = four.z, to[3 * T::BN] = four.w;
    }
}

// The codes of a lane for 16 k: byte j of word [h][j / 4] holds k = 2 t + 8 h and the next one of feature j. With NT =
// 2 word [0][0] holds both halves.
template <class T>
struct Codes {
    static constexpr int WORDS = T::NT == 8 ? 2 : 1;
    u32 at[2][WORDS];

    __device__ __forceinline__ void load(const u8* stage, int warp_n, int step, int g, int t) {
        const u8* codes = stage + T::X_BYTES;
        if constexpr (T::WEIGHTS == Weights::TRANSPOSED) {
            const u8* from = codes + (8 * step + t) * T::CODE_STRIDE + warp_n * T::WN + T::NT * g;
            if constexpr (T::NT == 2) {
                const u32 first = *reinterpret_cast<const unsigned short*>(from);
                const u32 second = *reinterpret_cast<const unsigned short*>(from + 4 * T::CODE_STRIDE);
                at[0][0] = permute<0x5410>(first, second);
            } else {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if constexpr (T::NT == 8) {
                        const uint2 both = *reinterpret_cast<const uint2*>(from + 4 * h * T::CODE_STRIDE);
                        at[h][0] = both.x, at[h][T::NT / 8] = both.y;
                    } else {
                        at[h][0] = *reinterpret_cast<const u32*>(from + 4 * h * T::CODE_STRIDE);
                    }
            }
        } else {
            u32 pair[T::NT];  // k 2 t in byte 0, k 2 t + 8 in byte 1
#pragma unroll
            for (int j = 0; j < T::NT; ++j) {
                const int row = warp_n * T::WN + 8 * j + g;
                const uint2 eight = *reinterpret_cast<const uint2*>(codes + row * T::CODE_STRIDE + 8 * step);
                pair[j] = __byte_perm(eight.x, eight.y, t | (4 | t) << 4);
            }
            if constexpr (T::NT == 2) {
                at[0][0] = permute<0x5140>(pair[0], pair[1]);
            } else {
#pragma unroll
                for (int j = 0; j < T::NT; j += 4) {
                    const u32 first = permute<0x5140>(pair[j], pair[j + 1]);
                    const u32 second = permute<0x5140>(pair[j + 2], pair[j + 3]);
                    at[0][j / 4] = permute<0x5410>(first, second);
                    at[1][j / 4] = permute<0x7632>(first, second);
                }
            }
        }
    }
};

// The scales of a lane for 16 k, one for each of its features.
template <class T>
__device__ __forceinline__ void load_pairs(u32 (&scale)[T::NT], const u32* pairs, int warp_n, int step, int g) {
    const u32* from = pairs + step * T::BN + warp_n * T::WN + T::NT * g;
    if constexpr (T::NT == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        scale[0] = two.x, scale[1] = two.y;
    } else {
#pragma unroll
        for (int j = 0; j < T::NT; j += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(from + j);
            scale[j] = four.x, scale[j + 1] = four.y, scale[j + 2] = four.z, scale[j + 3] = four.w;
        }
    }
}

// The packed weights of a lane for one step of 16 k.
template <class T>
struct Packed {
    Codes<T> codes;
    u32 scale[T::NT];

    __device__ __forceinline__ void load(const u8* stage, const u32* pairs, int warp_n, int step, int lane) {
        codes.load(stage, warp_n, step, lane >> 2, lane & 3);
        load_pairs<T>(scale, pairs, warp_n, step, lane >> 2);
    }

    // Register ``h`` of feature ``J``: k 2 t + 8 h and the next one.
    template <int J>
    __device__ __forceinline__ u32 decoded(int h) const {
        constexpr u32 NIBBLES = 0x0F0F0F0Fu;
        if constexpr (T::NT == 2) {
            const u32 low = codes.at[0][0] & NIBBLES, high = (codes.at[0][0] >> 4) & NIBBLES;
            return h == 0 ? decode<J>(low, high, scale[J]) : decode<J + 2>(low, high, scale[J]);
        } else {
            const u32 word = codes.at[h][J / 4];
            return decode<J % 4>(word & NIBBLES, (word >> 4) & NIBBLES, scale[J]);
        }
    }
};

// Registers FIRST to LAST - 1 of the 2 NT.
template <class T, int FIRST, int LAST>
__device__ __forceinline__ void decode_some(u32 (&b)[T::NT][2], const Packed<T>& packed) {
    if constexpr (FIRST < LAST) {
        b[FIRST / 2][FIRST % 2] = packed.template decoded<FIRST / 2>(FIRST % 2);
        decode_some<T, FIRST + 1, LAST>(b, packed);
    }
}

// The index of a block of 16 rows x 16 k in a stage, as a type.
template <int I>
struct Block {
    static constexpr int INDEX = I;
};

// The register pipeline of a warp: the next rows of x, decoded weights of this step and of the next, and packed weights
// of the steps after them. Loads and decoding run ahead of the mma, also across stages.
template <class T>
struct RegisterPipeline {
    static constexpr int X_STAGES = T::MT >= 8 ? 3 : 2, BLOCKS = T::GROUPS * T::MT;  // 3 are 1% faster with large WM
    static_assert(BLOCKS >= 4);
    u32 x[X_STAGES + 1][4], b[2][T::NT][2];
    Packed<T> packed[2];
    int x_base, warp_n, lane;

    __device__ __forceinline__ void load_rows(const u8* stage, int i) {
        ldmatrix_x4(
            x[i % (X_STAGES + 1)], shared_address(stage) + (x_base ^ (32 * (i / T::MT))) + i % T::MT * 32 * T::BK);
    }

    __device__ __forceinline__ void start(const u8* stage, const u32* pairs) {
        for (int i = 0; i < X_STAGES; ++i) load_rows(stage, i);
        packed[0].load(stage, pairs, warp_n, 0, lane);
        packed[1].load(stage, pairs, warp_n, 1, lane);
        decode_some<T, 0, 2 * T::NT>(b[0], packed[0]);
    }

    // Multiplies block I of a stage and all later ones. ``between(Block<I>())`` is interleaved with the mma of block I.
    template <int I, class Between>
    __device__ __forceinline__ void multiply(float (&c)[T::MT][T::NT][4], const u8* stage, const u32* pairs,
                                             const u8* next, const u32* next_pairs, Between between) {
        if constexpr (I < BLOCKS) {
            constexpr int STEP = I / T::MT, ROW = I % T::MT, REGISTERS = 2 * T::NT;
            if constexpr (ROW == 0 && STEP + 2 < T::GROUPS) packed[STEP % 2].load(stage, pairs, warp_n, STEP + 2, lane);
            if constexpr (ROW == 0 && STEP + 2 >= T::GROUPS)
                packed[STEP % 2].load(next, next_pairs, warp_n, STEP + 2 - T::GROUPS, lane);
#pragma unroll
            for (int j = 0; j < T::NT; ++j)
                mma_16x8x16_movable(c[ROW][j], x[I % (X_STAGES + 1)], b[STEP % 2][j][0], b[STEP % 2][j][1]);
            if constexpr (I + X_STAGES < BLOCKS) load_rows(stage, I + X_STAGES);
            decode_some<T, ROW * REGISTERS / T::MT, (ROW + 1) * REGISTERS / T::MT>(
                b[(STEP + 1) % 2], packed[(STEP + 1) % 2]);
            between(Block<I>());
            multiply<I + 1>(c, stage, pairs, next, next_pairs, between);
        } else {
            for (int i = 0; i < X_STAGES; ++i) load_rows(next, i);
        }
    }
};
