// out[m] = index of the largest logit of row m, of equal ones the lowest.
//
// Several blocks a row: each posts its best, as one word that is never 0, and the last one, which waits for these words,
// writes the result and leaves ``posts`` [M, blocks] at zero. A word that tells of itself needs no fence and no counter: with
// an atomic maximum, a fence and a counter of arrivals a row of 248320 took 3.01 us on an H200, so 2.07.
// NaN, which the contract refuses, is passed over; a row of nothing else gives 0. sm_80 and newer. Launched by launch.py.
#include "bf16.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, PARALLEL = 4;

// A value that rises with the logit, and where it is. Both zeros are one value; of nothing, NOWHERE.
struct Best {
    u32 order, index;
};
constexpr u32 NOWHERE = 0x7FFFFFFF;

__device__ __forceinline__ Best best_of_warp(const Best& own) {
    const u32 top = __reduce_max_sync(0xFFFFFFFFu, own.order);
    return {top, __reduce_min_sync(0xFFFFFFFFu, own.order == top ? own.index : NOWHERE)};
}

// Rises with the value, and falls with the index; never 0.
__device__ __forceinline__ u64 packed(const Best& best) { return (u64)best.order << 32 | ~best.index; }

__device__ __forceinline__ __nv_bfloat162 pair_of(u32 bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); }

// The largest of a piece; NaN if it has no number.
__device__ __forceinline__ float largest_of(const Raw<8>& raw) {
    const __nv_bfloat162 pair = __hmax2(__hmax2(pair_of(raw.bits.x), pair_of(raw.bits.y)),
                                        __hmax2(pair_of(raw.bits.z), pair_of(raw.bits.w)));
    return __bfloat162float(__hmax(pair.x, pair.y));
}
__device__ __forceinline__ float largest_of(const Raw<1>& raw) { return __bfloat162float(raw.bits); }

#define ARGMAX(WIDTH)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) argmax_bf16_w##WIDTH(                                  \
        const bf16* logits, /* [M, V], not restrict: the launch before may write it */                           \
        int* out,           /* [M] */                                                                            \
        u64* posts,         /* [M, blocks of a row: 1 << row_bits], zeros before and after */                    \
        int V, int row_bits) {                                                                                   \
        __shared__ Best of_warp[WARPS];                                                                          \
        const size_t row = blockIdx.x >> row_bits;                                                               \
        const int blocks = 1 << row_bits, block = blockIdx.x & (blocks - 1);                                     \
        const int pieces = V / WIDTH, step = THREADS * PARALLEL;                                                 \
        const int lane = threadIdx.x % 32;                                                                       \
        pdl_launch_dependents();                                                                                     \
        pdl_wait();                                                                              \
        /* Stage 1: the best piece of each thread, in rising order of index, then where in it. */                \
        float best = __int_as_float(0xFF800000);                                                                 \
        Raw<WIDTH> best_raw = {};                                                                                \
        int best_piece = -1;                                                                                     \
        for (int first = block * step + threadIdx.x; first < pieces; first += blocks * step) {                   \
            Raw<WIDTH> raw[PARALLEL];                                                                            \
            _Pragma("unroll") for (int i = 0; i < PARALLEL; ++i)                                                 \
                if (first + i * THREADS < pieces) raw[i] = load_raw<WIDTH>(logits + row * V, first + i * THREADS); \
            _Pragma("unroll") for (int i = 0; i < PARALLEL; ++i) {                                               \
                const float value = largest_of(raw[i]);                                                          \
                if (first + i * THREADS < pieces && value > best)                                                \
                    best = value, best_raw = raw[i], best_piece = first + i * THREADS;                           \
            }                                                                                                    \
        }                                                                                                        \
        const u32 bits = __float_as_uint(best + 0.0f);                                                           \
        Best own{bits & 0x80000000u ? ~bits : bits | 0x80000000u, NOWHERE};                                      \
        const Values<WIDTH> values = widen(best_raw);                                                            \
        if (best_piece >= 0)                                                                                     \
            _Pragma("unroll") for (int e = WIDTH - 1; e >= 0; --e)                                               \
                if (values.at[e] == best) own.index = best_piece * WIDTH + e;                                    \
        /* Stage 2: of the block. */                                                                             \
        own = best_of_warp(own);                                                                                 \
        if (lane == 0) of_warp[threadIdx.x / 32] = own;                                                          \
        __syncthreads();                                                                                         \
        if (threadIdx.x >= 32) return;                                                                           \
        own = best_of_warp(lane < WARPS ? of_warp[lane] : Best{0, NOWHERE});                                     \
        u64* const of_block = posts + row * blocks;                                                              \
        const int others = blocks - 1;                                                                           \
        if (block < others) {                                                                                    \
            if (lane == 0)                                                                                       \
                store_relaxed(of_block + block, packed(own));                                                    \
            return;                                                                                              \
        }                                                                                                        \
        /* Stage 3: of the row. */                                                                               \
        u64 found = packed(own);                                                                                 \
        for (int other = lane; other < others; other += 32) {                                                    \
            u64 word = 0;                                                                                        \
            while (word == 0) word = load_relaxed(of_block + other);                                             \
            of_block[other] = 0;                                                                                 \
            found = max(found, word);                                                                            \
        }                                                                                                        \
        own = best_of_warp({(u32)(found >> 32), ~(u32)found});                                                   \
        if (lane == 0) out[row] = own.index == NOWHERE ? 0 : (int)own.index;                                     \
    }

ARGMAX(1)
ARGMAX(8)
