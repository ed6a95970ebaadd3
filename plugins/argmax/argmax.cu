// out[m] = index of the largest logit of row m, of equal ones the lowest.
//
// Several blocks a row: each sends its best to ``best`` [M] by an atomic maximum of (value, complement of the index), and
// the last of a row's blocks to arrive writes the result and leaves ``best`` and ``arrivals`` [M] at zero. A maximum is the
// same in any order. One row of 248320 takes 2.8 us on an H200; a cluster of 8 blocks that met in shared memory took 4.3.
// NaN, which the contract refuses, is passed over; a row of nothing else gives 0. sm_80 and newer. Launched by launch.py.
#include "logits.cuh"

constexpr int THREADS = 256, PARALLEL = 4;
using u64 = unsigned long long;

// Rises with the value, and falls with the index; never 0.
__device__ __forceinline__ u64 packed(const Best& best) {
    const u32 bits = __float_as_uint(best.value + 0.0f), order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)order << 32 | ~(u32)best.index;
}

#define ARGMAX(WIDTH)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) argmax_bf16_w##WIDTH(                                  \
        const bf16* __restrict__ logits, /* [M, V] */                                                            \
        int* __restrict__ out,           /* [M] */                                                               \
        u64* best, u32* arrivals,        /* [M], zeros before and after */                                       \
        int V, int blocks_a_row) {                                                                               \
        __shared__ Best of_warp[THREADS / 32];                                                                   \
        const size_t row = blockIdx.x / blocks_a_row;                                                            \
        const int block = blockIdx.x % blocks_a_row, pieces = V / WIDTH, step = THREADS * PARALLEL;              \
        allow_next_launch();                                                                                     \
        wait_for_previous_launch();                                                                              \
        /* Stage 1: the best of each thread, in rising order of index. */                                        \
        Best own = no_best();                                                                                    \
        for (int first = block * step + threadIdx.x; first < pieces; first += blocks_a_row * step) {             \
            Raw<WIDTH> raw[PARALLEL];                                                                            \
            _Pragma("unroll") for (int i = 0; i < PARALLEL; ++i)                                                 \
                if (first + i * THREADS < pieces) raw[i] = load_raw<WIDTH>(logits + row * V, first + i * THREADS); \
            _Pragma("unroll") for (int i = 0; i < PARALLEL; ++i) {                                               \
                if (first + i * THREADS >= pieces) continue;                                                     \
                const unsigned short* bits = reinterpret_cast<const unsigned short*>(&raw[i]);                   \
                _Pragma("unroll") for (int e = 0; e < WIDTH; ++e) {                                              \
                    const float value = __uint_as_float((u32)bits[e] << 16);                                     \
                    if (value > own.value) own = {value, (first + i * THREADS) * WIDTH + e};                     \
                }                                                                                                \
            }                                                                                                    \
        }                                                                                                        \
        /* Stage 2: of the block, then of the row. */                                                            \
        own = best_of_warp(own);                                                                                 \
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;                                              \
        __syncthreads();                                                                                         \
        if (threadIdx.x >= 32) return;                                                                           \
        own = best_of_warp(threadIdx.x < THREADS / 32 ? of_warp[threadIdx.x] : no_best());                       \
        if (threadIdx.x != 0) return;                                                                            \
        if (own.index != NOWHERE) atomicMax(best + row, packed(own));                                            \
        __threadfence();                                                                                         \
        if (atomicAdd(arrivals + row, 1u) != (u32)blocks_a_row - 1) return;                                      \
        __threadfence();                                                                                         \
        const u64 found = atomicExch(best + row, 0ull);                                                          \
        arrivals[row] = 0;                                                                                       \
        out[row] = found == 0 ? 0 : (int)~(u32)found;                                                            \
    }

ARGMAX(1)
ARGMAX(8)
