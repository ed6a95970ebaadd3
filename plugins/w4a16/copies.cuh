// Copies from global to shared memory: codes and scales in either layout, and x. Used by gemm.cuh. sm_80 and newer.
//
// cp.async of 16 bytes (scales: 4) where rows are aligned to that; otherwise byte loads. Elements outside a matrix
// become zeros and are not read.
#pragma once
#include "async_copy.cuh"
#include "shared_memory.cuh"
#include "tile.cuh"

// Copies BYTES, or zeros if the source does not exist. Then it is not read.
template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool exists) {
    if constexpr (BYTES == 16) cp_async_16_l2_128(to, from, exists ? BYTES : 0);
    else cp_async_4(to, from, exists ? BYTES : 0);
}

// A tile of ROWS rows of CHUNKS chunks of BYTES bytes: each of THREADS threads copies one chunk of every STEP-th row.
template <int ROWS, int CHUNKS, int BYTES, int THREADS>
struct TileCopy {
    static constexpr int COUNT = ROWS * CHUNKS, STEP = THREADS / CHUNKS, PASSES = (COUNT + THREADS - 1) / THREADS;
    static_assert(THREADS % CHUNKS == 0 && (COUNT % THREADS == 0 || COUNT < THREADS));

    static __device__ __forceinline__ int row() { return threadIdx.x / CHUNKS; }
    static __device__ __forceinline__ int at() { return threadIdx.x % CHUNKS * BYTES; }

    // From the thread's chunk on. There are ``rows_left`` rows from its first one on; the others become zeros.
    static __device__ __forceinline__ void copy(u32 to, int to_pitch, const void* from, size_t from_pitch,
                                                int rows_left) {
        if (COUNT < THREADS && threadIdx.x >= COUNT) return;
#pragma unroll
        for (int i = 0; i < PASSES; ++i)
            copy_async<BYTES>(
                to + i * STEP * to_pitch, static_cast<const u8*>(from) + i * (STEP * from_pitch), i * STEP < rows_left);
    }
};

// Four bytes as a word. Bytes from the limit on are zeros and are not read.
__device__ __forceinline__ u32 gather(const u8* from, int limit) {
    u32 word = 0;
    for (int i = 0; i < 4; ++i)
        if (i < limit) word |= (u32)from[i] << (8 * i);
    return word;
}

// The row of a feature in a stage of row-major weights: feature NT g + j of a warp is row 8 j + g, so that lanes read
// consecutive rows.
template <class T>
__device__ __forceinline__ int interleaved_row(int feature) {
    const int in_warp = feature % T::WN;
    return feature - in_warp + in_warp % T::NT * 8 + in_warp / T::NT;
}

// Copies the codes of BK k from k0 on. WIDE: rows are aligned for cp.async (transposed: N is a multiple of 16;
// row-major: K is a multiple of 64). Otherwise byte by byte.
template <class T, bool WIDE>
__device__ __forceinline__ void load_codes(u8* stage, const Problem& p, int k0) {
    u8* codes = stage + T::X_BYTES;
    const u32 to = shared_address(codes);
    if constexpr (T::WEIGHTS == Weights::TRANSPOSED && WIDE) {
        using S = TileCopy<T::BK / 2, T::BN / 16, 16, T::THREADS>;
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
        using S = TileCopy<T::BN, T::BK / 32, 16, T::THREADS>;
        static_assert(S::STEP % T::WN == 0);
        const int n = p.feature + S::row(), k = k0 / 2 + S::at();
        S::copy(to + interleaved_row<T>(S::row()) * T::CODE_STRIDE + S::at(), T::CODE_STRIDE,
                p.codes + (size_t)n * (p.K / 2) + k, p.K / 2, k < p.K / 2 ? p.N - n : 0);
    } else {
        constexpr int WORDS = T::BK / 8;
#pragma unroll 1
        for (int i = threadIdx.x; i < T::BN * WORDS; i += T::THREADS) {
            const int feature = i / WORDS, at = i % WORDS * 4, n = p.feature + feature, k = k0 / 2 + at;
            *reinterpret_cast<u32*>(codes + interleaved_row<T>(feature) * T::CODE_STRIDE + at) =
                gather(p.codes + (size_t)n * (p.K / 2) + k, n < p.N ? p.K / 2 - k : 0);
        }
    }
}

// Copies the scales of BK k from k0 on, [GROUPS][BN] (transposed) or [BN][GROUPS]. A thread copies the words that it
// decodes later.
template <class T, bool WIDE>
__device__ __forceinline__ void load_scales(u8* stage, const Problem& p, int k0) {
    u32* raw = reinterpret_cast<u32*>(stage + T::X_BYTES + T::CODE_BYTES);
    const u32 to = shared_address(raw + threadIdx.x);
    if constexpr (T::WEIGHTS == Weights::TRANSPOSED && WIDE) {
        using S = TileCopy<T::GROUPS, T::BN / 4, 4, T::THREADS>;
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
        using S = TileCopy<T::BN, 1, 4, T::THREADS>;
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

// The swizzled byte offset of a 16-byte chunk of x in a stage [BM][BK]: chunk XOR row, so that an ldmatrix has no bank
// conflicts. The next step of 16 k is at offset ^ 32.
template <class T>
__device__ __forceinline__ int x_offset(int row, int chunk) {
    constexpr int CHUNKS = T::BK / 8;
    const int swizzle = CHUNKS >= 8 ? row & 7 : (row >> 1) & 3;
    return (row * CHUNKS + (chunk ^ swizzle)) * 16;
}

template <class T>
__device__ __forceinline__ void load_x(u8* stage, const Problem& p, int k0) {
    using X = TileCopy<T::BM, T::BK / 8, 16, T::THREADS>;
    static_assert(X::STEP % 8 == 0);  // the swizzle is the same in every pass
    const int m = p.row + X::row(), k = k0 + X::at() / 2;
    X::copy(shared_address(stage) + x_offset<T>(X::row(), X::at() / 16), T::BK * 2, p.x + (size_t)m * p.stride + k,
            2 * (size_t)p.stride, k < p.K ? p.M - m : 0);
}
