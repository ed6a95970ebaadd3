// out[m] = the index of the largest logit of row m, the lowest among equal ones.
//
// Several blocks share a row. Each stores its best logit as one word that is never 0. The last block waits for these
// words, writes the result, and leaves ``partials`` [M, blocks] at zero. The word itself signals its arrival: a row of
// 248320 takes 2.07 us on an H200, against 3.01 us with an atomic maximum, a fence and a counter.
//
// NaN, which the contract rejects, is ignored. A row of NaN gives 0. Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, LOADS = 4;

// A value that rises with the logit, and the index of the logit. Both zeros have the same value. NO_INDEX stands for no
// logit.
struct Best {
    u32 order, index;
};
constexpr u32 NO_INDEX = 0x7FFFFFFF;

__device__ __forceinline__ Best best_of_warp(const Best& candidate) {
    const u32 top = __reduce_max_sync(0xFFFFFFFFu, candidate.order);
    return {top, __reduce_min_sync(0xFFFFFFFFu, candidate.order == top ? candidate.index : NO_INDEX)};
}

// Rises with the value and falls with the index. It is never 0.
__device__ __forceinline__ u64 packed(const Best& best) { return (u64)best.order << 32 | ~best.index; }

__device__ __forceinline__ __nv_bfloat162 pair_of(u32 bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); }

// The largest logit of a vector, NaN if all are NaN.
__device__ __forceinline__ float largest_of(const Raw<8>& raw) {
    const __nv_bfloat162 pair =
        __hmax2(__hmax2(pair_of(raw.bits.x), pair_of(raw.bits.y)), __hmax2(pair_of(raw.bits.z), pair_of(raw.bits.w)));
    return __bfloat162float(__hmax(pair.x, pair.y));
}
__device__ __forceinline__ float largest_of(const Raw<1>& raw) { return __bfloat162float(raw.bits); }

#define ARGMAX(WIDTH)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) argmax_bf16_w##WIDTH(                                  \
        const bf16* logits, /* [M, V], not restrict: the previous kernel may write it */                         \
        int* out,           /* [M] */                                                                            \
        u64* partials,      /* [M, blocks of a row: 1 << row_bits], zeros before and after */                    \
        int V, int row_bits) {                                                                                   \
        __shared__ Best of_warp[WARPS];                                                                          \
        const size_t row = blockIdx.x >> row_bits;                                                               \
        const int blocks = 1 << row_bits, block = blockIdx.x & (blocks - 1);                                     \
        const int vecs = V / WIDTH, step = THREADS * LOADS;                                                      \
        const int lane = threadIdx.x % 32;                                                                       \
        pdl_launch_dependents();                                                                                 \
        pdl_wait();                                                                                              \
        /* Stage 1: the best vector of each thread, by rising index, then the place in it. */                    \
        float best = __int_as_float(0xFF800000);                                                                 \
        Raw<WIDTH> best_raw = {};                                                                                \
        int best_vec = -1;                                                                                       \
        for (int first = block * step + threadIdx.x; first < vecs; first += blocks * step) {                     \
            Raw<WIDTH> raw[LOADS];                                                                               \
            _Pragma("unroll")                                                                                    \
            for (int i = 0; i < LOADS; ++i)                                                                      \
                if (first + i * THREADS < vecs) raw[i] = load_raw<WIDTH>(logits + row * V, first + i * THREADS); \
            _Pragma("unroll")                                                                                    \
            for (int i = 0; i < LOADS; ++i) {                                                                    \
                const float value = largest_of(raw[i]);                                                          \
                if (first + i * THREADS < vecs && value > best)                                                  \
                    best = value, best_raw = raw[i], best_vec = first + i * THREADS;                             \
            }                                                                                                    \
        }                                                                                                        \
        const u32 bits = __float_as_uint(best + 0.0f);                                                           \
        Best candidate{bits & 0x80000000u ? ~bits : bits | 0x80000000u, NO_INDEX};                               \
        const Values<WIDTH> values = widen(best_raw);                                                            \
        if (best_vec >= 0) _Pragma("unroll")                                                                     \
        for (int e = WIDTH - 1; e >= 0; --e)                                                                     \
            if (values.at[e] == best) candidate.index = best_vec * WIDTH + e;                                    \
        /* Stage 2: the best of the block. */                                                                    \
        candidate = best_of_warp(candidate);                                                                     \
        if (lane == 0) of_warp[threadIdx.x / 32] = candidate;                                                    \
        __syncthreads();                                                                                         \
        if (threadIdx.x >= 32) return;                                                                           \
        candidate = best_of_warp(lane < WARPS ? of_warp[lane] : Best{0, NO_INDEX});                              \
        u64* const of_block = partials + row * blocks;                                                           \
        const int others = blocks - 1;                                                                           \
        if (block < others) {                                                                                    \
            if (lane == 0) store_relaxed(of_block + block, packed(candidate));                                   \
            return;                                                                                              \
        }                                                                                                        \
        /* Stage 3: the best of the row. */                                                                      \
        u64 found = packed(candidate);                                                                           \
        for (int other = lane; other < others; other += 32) {                                                    \
            u64 word = 0;                                                                                        \
            while (word == 0) word = load_relaxed(of_block + other);                                             \
            of_block[other] = 0;                                                                                 \
            found = max(found, word);                                                                            \
        }                                                                                                        \
        candidate = best_of_warp({(u32)(found >> 32), ~(u32)found});                                             \
        if (lane == 0) out[row] = candidate.index == NO_INDEX ? 0 : (int)candidate.index;                        \
    }

ARGMAX(1)
ARGMAX(8)
