// NVFP4 weights x BF16 activations on tensor cores, one block a tile of BM x BN outputs.
//
//   out[m, n] = BF16(global_scale * sum_k x[m, k] * E2M1[n, k] * E4M3[n, k / 16])
//
// The activations are the A operand of mma.sync.m16n8k16, the weights its B operand: a register of B is two adjacent
// k of one feature, which is one byte of the checkpoint. Codes wait in shared memory as they are stored; each warp
// decodes what it multiplies, in registers, beside the products of the step before. Tall tiles of a warp pay: every
// instruction besides the mma costs about a cycle, and a weight is decoded once for all of the warp's rows. In its WN
// features, lane (g, t) = (lane / 4, lane % 4) has the NT adjacent ones NT g .. NT g + NT - 1, one for each of NT mma:
// it reads them as one word, and writes 2 NT adjacent outputs.
//
// Numerics: products exact, every output summed by one FP32 accumulator over k in rising steps of 16, never split. So
// all tiles, K steps, pipelines and layouts of this file give the same bits. Steps beyond K add exact zeros.
//
// sm_80 and newer. Launched by launch.py, which repeats SHARED_BYTES.
#pragma once
#include <cuda_bf16.h>

#include "launch.cuh"

using u8 = unsigned char;

enum class Weights { TRANSPOSED, ROW_MAJOR };  // codes [K/2, N] and scales [K/16, N], or [N, K/2] and [N, K/16]

// BM x BN outputs a block and BK k a stage; a warp has WM x WN. Of STAGES buffers one is multiplied, one is complete,
// and the others are under way. BLOCKS should fit a multiprocessor, which bounds the registers.
template <int BM_, int BN_, int BK_, int WM_, int WN_, int STAGES_, int BLOCKS_, Weights WEIGHTS_ = Weights::TRANSPOSED>
struct Tile {
    static constexpr int BM = BM_, BN = BN_, BK = BK_, WM = WM_, WN = WN_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr Weights WEIGHTS = WEIGHTS_;
    static constexpr int WARPS_N = BN / WN, WARPS = BM / WM * WARPS_N, THREADS = 32 * WARPS;
    static constexpr int MT = WM / 16, NT = WN / 8, GROUPS = BK / 16;
    // 32 bytes of padding put the four rows that a warp reads at once into different banks.
    static constexpr int CODE_STRIDE = WEIGHTS == Weights::TRANSPOSED ? BN + 32 : BK / 2;
    static constexpr int CODE_BYTES = CODE_STRIDE * (WEIGHTS == Weights::TRANSPOSED ? BK / 2 : BN);
    static constexpr int X_BYTES = BM * BK * 2, RAW_BYTES = GROUPS * BN, STAGE_BYTES = X_BYTES + CODE_BYTES + RAW_BYTES;
    static constexpr int PAIR_BYTES = GROUPS * BN * 4;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + 3 * PAIR_BYTES;
    static_assert(BM % WM == 0 && BN % WN == 0 && WM % 16 == 0 && BK % 32 == 0 && STAGES >= 3);
    static_assert(NT == 2 || NT == 4 || NT == 8);
    static_assert(WEIGHTS == Weights::TRANSPOSED || BK == 64);
};

// --- instruction wrappers (PTX ISA 8.0) ---

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else  // adding -0 changes no product
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return d;
}

// Not volatile: the compiler may mix the decoding of the next weights with these.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <u32 SELECTOR>  // unlike __byte_perm, bit 3 of a selector repeats a byte's top bit
__device__ __forceinline__ u32 permute(u32 a, u32 b) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(SELECTOR));
    return d;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address));
}

// BYTES from global to shared memory, zeros instead where there is nothing: then the source is not read.
template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool exists) {
    const int size = exists ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(size));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// --- decoding ---

// Four E4M3 scales -> for each a pair of BF16, scale * 2^118, twice. Their bits at a BF16's place read as scale *
// 2^-120, subnormals included; two exact factors of 2^119 lift them, as one would not fit.
__device__ __forceinline__ uint4 scale_pairs(u32 scales) {
    constexpr u32 LIFT = 0x7B007B00u;
    scales &= 0x7F7F7F7Fu;  // -0 is 0
    const u32 low = multiply(multiply(permute<0x4140>(scales, 0) * 16u, LIFT), LIFT);
    const u32 high = multiply(multiply(permute<0x4342>(scales, 0) * 16u, LIFT), LIFT);
    return make_uint4(permute<0x1010>(low, 0), permute<0x3232>(low, 0), permute<0x1010>(high, 0),
                      permute<0x3232>(high, 0));
}
// E2M1 bits at a BF16's place read as value * 2^-126; with the scale's 2^118 there remains this factor.
constexpr float EXPONENT_GAP = 256.0f;

// One byte of codes, two adjacent k of a feature -> a register of B. ``low`` and ``high`` hold the codes of four bytes.
template <int BYTE>
__device__ __forceinline__ u32 decode(u32 low, u32 high, u32 scale) {
    constexpr u32 SPREAD = BYTE | (8 | BYTE) << 4 | (4 | BYTE) << 8 | (12 | BYTE) << 12;  // [low, 0, high, 0]
    const u32 codes = permute<SPREAD>(low, high);
    return multiply((codes * 0x1040u) & 0x81C081C0u, scale);  // the sign to bit 15, the magnitude to bits 8..6
}

// --- device functions ---

// What a block works on: x [M, K] with rows ``stride`` apart, and its first row and feature.
struct Problem {
    const u8* codes;
    const u8* scales;
    const __nv_bfloat16* x;
    int stride, M, N, K, row, feature;
};

// ROWS rows of PIECES pieces of BYTES each, shared by THREADS threads: a thread takes one place of every STEP-th row.
template <int ROWS, int PIECES, int BYTES, int THREADS>
struct Share {
    static constexpr int ALL = ROWS * PIECES, STEP = THREADS / PIECES, PASSES = (ALL + THREADS - 1) / THREADS;
    static_assert(THREADS % PIECES == 0 && (ALL % THREADS == 0 || ALL < THREADS));

    static __device__ __forceinline__ int row() { return threadIdx.x / PIECES; }
    static __device__ __forceinline__ int at() { return threadIdx.x % PIECES * BYTES; }

    // From the thread's place on; ``left`` is how many rows there are from its first one on, the rest are zeros.
    static __device__ __forceinline__ void copy(u32 to, int to_pitch, const void* from, size_t from_pitch, int left) {
        if (ALL < THREADS && threadIdx.x >= ALL) return;
#pragma unroll
        for (int i = 0; i < PASSES; ++i)
            copy_async<BYTES>(to + i * STEP * to_pitch, static_cast<const u8*>(from) + i * (STEP * from_pitch),
                              i * STEP < left);
    }
};

// Four bytes as a word; zeros from the limit on, which are not read.
__device__ __forceinline__ u32 gather(const u8* from, int limit) {
    u32 word = 0;
    for (int i = 0; i < 4; ++i)
        if (i < limit) word |= (u32)from[i] << (8 * i);
    return word;
}

// Where feature NT g + j of a warp lies in a stage of row-major weights: in row 8 j + g, so that lanes read rows that
// follow each other.
template <class T>
__device__ __forceinline__ int shuffled(int feature) {
    const int inside = feature % T::WN;
    return feature - inside + inside % T::NT * 8 + inside / T::NT;
}

// Codes of BK k from k0 on. WIDE: rows of the layout begin where copies may (transposed: N is a multiple of 16;
// row-major: K is one of 64). Else they are gathered byte by byte.
template <class T, bool WIDE>
__device__ __forceinline__ void load_codes(u8* stage, const Problem& p, int k0) {
    u8* codes = stage + T::X_BYTES;
    const u32 to = shared_address(codes);
    if constexpr (T::WEIGHTS == Weights::TRANSPOSED && WIDE) {
        using S = Share<T::BK / 2, T::BN / 16, 16, T::THREADS>;
        const int k = k0 / 2 + S::row(), n = p.feature + S::at();
        S::copy(to + S::row() * T::CODE_STRIDE + S::at(), T::CODE_STRIDE, p.codes + (size_t)k * p.N + n, p.N,
                n < p.N ? p.K / 2 - k : 0);
    } else if constexpr (T::WEIGHTS == Weights::TRANSPOSED) {
        constexpr int WORDS = T::BN / 4;
#pragma unroll 1
        for (int i = threadIdx.x; i < T::BK / 2 * WORDS; i += T::THREADS) {
            const int row = i / WORDS, column = i % WORDS * 4, k = k0 / 2 + row, n = p.feature + column;
            *reinterpret_cast<u32*>(codes + row * T::CODE_STRIDE + column) =
                gather(p.codes + (size_t)k * p.N + n, k < p.K / 2 ? p.N - n : 0);
        }
    } else if constexpr (WIDE) {
        using S = Share<T::BN, T::BK / 32, 16, T::THREADS>;
        static_assert(S::STEP % T::WN == 0);
        const int n = p.feature + S::row(), k = k0 / 2 + S::at();
        S::copy(to + shuffled<T>(S::row()) * T::CODE_STRIDE + S::at(), T::CODE_STRIDE,
                p.codes + (size_t)n * (p.K / 2) + k, p.K / 2, k < p.K / 2 ? p.N - n : 0);
    } else {
        constexpr int WORDS = T::BK / 8;
#pragma unroll 1
        for (int i = threadIdx.x; i < T::BN * WORDS; i += T::THREADS) {
            const int feature = i / WORDS, at = i % WORDS * 4, n = p.feature + feature, k = k0 / 2 + at;
            *reinterpret_cast<u32*>(codes + shuffled<T>(feature) * T::CODE_STRIDE + at) =
                gather(p.codes + (size_t)n * (p.K / 2) + k, n < p.N ? p.K / 2 - k : 0);
        }
    }
}

// Scales of BK k from k0 on, as they are stored: [GROUPS][BN] (transposed) or [BN][GROUPS]. A thread copies those words
// that it decodes later.
template <class T, bool WIDE>
__device__ __forceinline__ void load_scales(u8* stage, const Problem& p, int k0) {
    u32* raw = reinterpret_cast<u32*>(stage + T::X_BYTES + T::CODE_BYTES);
    const u32 to = shared_address(raw + threadIdx.x);
    if constexpr (T::WEIGHTS == Weights::TRANSPOSED && WIDE) {
        using S = Share<T::GROUPS, T::BN / 4, 4, T::THREADS>;
        const int group = k0 / 16 + S::row(), n = p.feature + S::at();
        S::copy(to, T::BN, p.scales + (size_t)group * p.N + n, p.N, n < p.N ? p.K / 16 - group : 0);
    } else if constexpr (T::WEIGHTS == Weights::TRANSPOSED) {
        constexpr int WORDS = T::BN / 4;
#pragma unroll 1
        for (int i = threadIdx.x; i < T::GROUPS * WORDS; i += T::THREADS) {
            const int group = k0 / 16 + i / WORDS, n = p.feature + i % WORDS * 4;
            raw[i] = gather(p.scales + (size_t)group * p.N + n, group < p.K / 16 ? p.N - n : 0);
        }
    } else if constexpr (WIDE) {
        using S = Share<T::BN, 1, 4, T::THREADS>;
        const int n = p.feature + S::row();
        S::copy(to, 4, p.scales + (size_t)n * (p.K / 16) + k0 / 16, p.K / 16, k0 < p.K ? p.N - n : 0);
    } else {
#pragma unroll 1
        for (int feature = threadIdx.x; feature < T::BN; feature += T::THREADS) {
            const int n = p.feature + feature, group = k0 / 16;
            raw[feature] = gather(p.scales + (size_t)n * (p.K / 16) + group, n < p.N ? p.K / 16 - group : 0);
        }
    }
}

// x in a stage is [BM][BK], its 16-byte pieces twisted so that the rows which an ldmatrix reads lie in different banks.
// A step of 16 k away is offset ^ 32, which leaves the twist as it is.
template <class T>
__device__ __forceinline__ int x_offset(int row, int piece) {
    constexpr int PIECES = T::BK / 8;
    const int twist = PIECES >= 8 ? row & 7 : (row >> 1) & 3;
    return (row * PIECES + (piece ^ twist)) * 16;
}

template <class T>
__device__ __forceinline__ void load_x(u8* stage, const Problem& p, int k0) {
    using X = Share<T::BM, T::BK / 8, 16, T::THREADS>;
    static_assert(X::STEP % 8 == 0);  // the twist is the same in every pass
    const int m = p.row + X::row(), k = k0 + X::at() / 2;
    X::copy(shared_address(stage) + x_offset<T>(X::row(), X::at() / 16), T::BK * 2, p.x + (size_t)m * p.stride + k,
            2 * (size_t)p.stride, k < p.K ? p.M - m : 0);
}

// Scales of a stage, decoded once for the block: [GROUPS][BN] pairs.
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

// A lane's codes of 16 k: byte j of word [h][j / 4] has k 2 t + 8 h and the next one of feature j; with two features a
// lane, both halves share word [0][0].
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

// A lane's scales of 16 k, one for each of its features.
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

// A lane's weights of one step of 16 k, as they are stored.
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

// The place of the I-th block of 16 rows x 16 k in a stage.
template <int I>
struct At {
    static constexpr int BLOCK = I;
};

// What a warp holds between two products: the next rows of x, weights of this step and of the next, and those after
// them as they are stored. Reading and decoding run ahead of multiplying, over the end of a stage too.
template <class T>
struct Pipeline {
    static constexpr int AHEAD = 2, BLOCKS = T::GROUPS * T::MT;
    static_assert(BLOCKS >= 4);
    u32 x[AHEAD + 1][4], b[2][T::NT][2];
    Packed<T> packed[2];
    int x_at, warp_n, lane;

    __device__ __forceinline__ void load_rows(const u8* stage, int i) {
        load_matrices(x[i % (AHEAD + 1)], shared_address(stage) + (x_at ^ (32 * (i / T::MT))) + i % T::MT * 32 * T::BK);
    }

    __device__ __forceinline__ void start(const u8* stage, const u32* pairs) {
        for (int i = 0; i < AHEAD; ++i) load_rows(stage, i);
        packed[0].load(stage, pairs, warp_n, 0, lane);
        packed[1].load(stage, pairs, warp_n, 1, lane);
        decode_some<T, 0, 2 * T::NT>(b[0], packed[0]);
    }

    // Block I of a stage and all after it. ``between(At<I>())`` is done beside the products of block I.
    template <int I, class Between>
    __device__ __forceinline__ void multiply(float (&c)[T::MT][T::NT][4], const u8* stage, const u32* pairs,
                                             const u8* next, const u32* next_pairs, Between between) {
        if constexpr (I < BLOCKS) {
            constexpr int STEP = I / T::MT, ROW = I % T::MT, REGISTERS = 2 * T::NT;
            if constexpr (ROW == 0 && STEP + 2 < T::GROUPS) packed[STEP % 2].load(stage, pairs, warp_n, STEP + 2, lane);
            if constexpr (ROW == 0 && STEP + 2 >= T::GROUPS)
                packed[STEP % 2].load(next, next_pairs, warp_n, STEP + 2 - T::GROUPS, lane);
#pragma unroll
            for (int j = 0; j < T::NT; ++j) mma(c[ROW][j], x[I % (AHEAD + 1)], b[STEP % 2][j][0], b[STEP % 2][j][1]);
            if constexpr (I + AHEAD < BLOCKS) load_rows(stage, I + AHEAD);
            decode_some<T, ROW * REGISTERS / T::MT, (ROW + 1) * REGISTERS / T::MT>(b[(STEP + 1) % 2],
                                                                                   packed[(STEP + 1) % 2]);
            between(At<I>());
            multiply<I + 1>(c, stage, pairs, next, next_pairs, between);
        } else {
            for (int i = 0; i < AHEAD; ++i) load_rows(next, i);
        }
    }
};

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&pair);
}

// A lane's 2 NT adjacent outputs of each of its rows. ``wide``: every row of ``out`` begins at a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ void store_tile(__nv_bfloat16* __restrict__ out, const float (&c)[T::MT][T::NT][4],
                                           float scale, const Problem& p, int warp_m, int warp_n, int lane, bool wide) {
    const int first = p.feature + warp_n * T::WN + 2 * T::NT * (lane & 3);
#pragma unroll
    for (int i = 0; i < T::MT; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int m = p.row + warp_m * T::WM + i * 16 + half * 8 + (lane >> 2);
            if (m >= p.M) continue;
            __nv_bfloat16* to = out + (size_t)m * p.N + first;
            float value[2 * T::NT];
#pragma unroll
            for (int j = 0; j < T::NT; ++j) {
                value[j] = c[i][j][2 * half] * scale;
                value[T::NT + j] = c[i][j][2 * half + 1] * scale;
            }
            constexpr int VECTOR = T::NT == 2 ? 4 : 8;
#pragma unroll
            for (int j = 0; j < 2 * T::NT; j += VECTOR) {
                if (wide && first + j < p.N) {
                    u32 word[VECTOR / 2];
#pragma unroll
                    for (int e = 0; e < VECTOR / 2; ++e) word[e] = bf16_pair(value[j + 2 * e], value[j + 2 * e + 1]);
                    if constexpr (VECTOR == 4)
                        *reinterpret_cast<uint2*>(to + j) = make_uint2(word[0], word[1]);
                    else
                        *reinterpret_cast<uint4*>(to + j) =
                            make_uint4(word[0], word[1], word[VECTOR / 2 - 2], word[VECTOR / 2 - 1]);
                }
                if (!wide) {
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e)
                        if (first + j + e < p.N) to[j + e] = __float2bfloat16_rn(value[j + e]);
                }
            }
        }
}

// Blocks in bands of BAND row tiles, in a band feature tile by feature tile: what runs together shares both operands.
constexpr int BAND = 8;

template <class T>
__device__ __forceinline__ void place(Problem& p) {
    const int rows = (p.M + T::BM - 1) / T::BM, features = (p.N + T::BN - 1) / T::BN;
    const int band = blockIdx.x / (BAND * features), inside = blockIdx.x - band * BAND * features;
    const int height = min(BAND, rows - band * BAND);
    p.row = (band * BAND + inside % height) * T::BM;
    p.feature = inside / height * T::BN;
}

// The kernel: fill the pipeline; per stage wait, then refill beside multiplying; store.
template <class T, bool WIDE>
__device__ __forceinline__ void gemm_tile(Problem p, __nv_bfloat16* __restrict__ out, float global_scale) {
    extern __shared__ __align__(128) u8 shared[];
    allow_next_launch();
    place<T>(p);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warp_n = warp % T::WARPS_N, warp_m = warp / T::WARPS_N;
    const int stages = (p.K + T::BK - 1) / T::BK;
    auto slot = [&](int s) { return shared + s * T::STAGE_BYTES; };
    auto pairs = [&](int s) { return reinterpret_cast<u32*>(shared + T::STAGES * T::STAGE_BYTES + s * T::PAIR_BYTES); };
    float c[T::MT][T::NT][4] = {};

    // Stage 1: the first loads. Weights never depend on the launch before, x may. Scales are a stage ahead of the rest.
    load_scales<T, WIDE>(slot(0), p, 0);
#pragma unroll
    for (int s = 0; s < T::STAGES - 1; ++s) {
        if (s < stages) load_codes<T, WIDE>(slot(s), p, s * T::BK);
        if (s + 1 < stages) load_scales<T, WIDE>(slot(s + 1), p, (s + 1) * T::BK);
    }
    wait_for_previous_launch();
#pragma unroll
    for (int s = 0; s < T::STAGES - 1; ++s) {
        if (s < stages) load_x<T>(slot(s), p, s * T::BK);
        commit_copies();
    }
    wait_for_copies<T::STAGES - 2>();
    decode_scales<T>(pairs(0), slot(0));
    decode_scales<T>(pairs(1), slot(1));
    __syncthreads();
    Pipeline<T> pipeline;
    pipeline.x_at = x_offset<T>(warp_m * T::WM + (lane & 15), lane >> 4);
    pipeline.warp_n = warp_n, pipeline.lane = lane;
    pipeline.start(slot(0), pairs(0));

    // Stage 2: all of K.
    int now = 0, turn = 0;  // of the buffers and of the decoded scales
    auto after = [](int i, int count) { return i + 1 == count ? 0 : i + 1; };
#pragma unroll 1
    for (int s = 0; s < stages; ++s) {
        const int next = after(now, T::STAGES), next_turn = after(turn, 3), last_turn = after(next_turn, 3);
        wait_for_copies<T::STAGES - 3>();
        __syncthreads();  // the next stage and its scales are there; the buffer of the last one is free
        // Beyond the last stage zeros are copied to buffers that nobody reads: a branch would cost more.
        const int later = s + T::STAGES - 1, free = now == 0 ? T::STAGES - 1 : now - 1;
        auto between = [&](auto at) {
            if constexpr (at.BLOCK == 0) load_codes<T, WIDE>(slot(free), p, later * T::BK);
            if constexpr (at.BLOCK == 1) load_scales<T, WIDE>(slot(now), p, (later + 1) * T::BK);
            if constexpr (at.BLOCK == 2) load_x<T>(slot(free), p, later * T::BK), commit_copies();
            if constexpr (at.BLOCK == Pipeline<T>::BLOCKS / 2)
                decode_scales<T>(pairs(last_turn), slot(after(next, T::STAGES)));
        };
        pipeline.template multiply<0>(c, slot(now), pairs(turn), slot(next), pairs(next_turn), between);
        now = next, turn = next_turn;
    }

    wait_for_copies<0>();

    // Stage 3: one rounding each.
    store_tile<T>(out, c, global_scale * EXPONENT_GAP, p, warp_m, warp_n, lane, p.N % 8 == 0);
}

#define W4A16_ENTRY(NAME, TILE, WIDE)                                                                               \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, TILE::BLOCKS)                                        \
        NAME(const u8* __restrict__ codes,                /* [K/2, N] or [N, K/2] */                                 \
             const u8* __restrict__ scales,               /* [K/16, N] or [N, K/16] E4M3 */                          \
             const __nv_bfloat16* __restrict__ x,         /* [M, K], rows ``stride`` elements apart */               \
             __nv_bfloat16* __restrict__ out,             /* [M, N] */                                               \
             float global_scale, int stride, int M, int N, int K) {                                                  \
        gemm_tile<TILE, WIDE>({codes, scales, x, stride, M, N, K, 0, 0}, out, global_scale);                         \
    }
