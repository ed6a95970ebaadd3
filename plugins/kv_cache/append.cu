// Copies new rows of keys and values into a paged cache, as BF16.
//
//   k_cache[slots[m]] = k[m], v_cache[slots[m]] = v[m]        the cache as [P * B, Hk * D]: slot = page * B + offset
//
// A row with slot -1 is not kept. The contract rejects other slots outside the cache. They are not kept either. Of two
// rows with one slot, also rejected, the cache may keep some values of each. k and v may be slices of one projection.
// One block a row. Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "pdl.cuh"

constexpr int THREADS = 128;

#define APPEND(WIDTH)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) kv_cache_append_w##WIDTH(               \
        const bf16* __restrict__ k,    /* [M, Hk * D], rows k_stride apart */                     \
        const bf16* __restrict__ v,    /* [M, Hk * D], rows v_stride apart */                     \
        const int* __restrict__ slots, /* [M] */                                                  \
        bf16* __restrict__ k_cache,    /* [P * B, Hk * D] */                                      \
        bf16* __restrict__ v_cache,    /* [P * B, Hk * D] */                                      \
        long long k_stride, long long v_stride, long long places, int columns) {                  \
        pdl_launch_dependents();                                                                  \
        pdl_wait();                                                                               \
        const int slot = slots[blockIdx.x], vecs = columns / WIDTH;                               \
        if (slot < 0 || slot >= places) return;                                                   \
        const size_t row = blockIdx.x, to = (size_t)slot * columns;                               \
        for (int i = threadIdx.x; i < 2 * vecs; i += THREADS) {                                   \
            const bool is_key = i < vecs;                                                         \
            const int vec = is_key ? i : i - vecs;                                                \
            const bf16* from = is_key ? k + row * k_stride : v + row * v_stride;                  \
            store_raw<WIDTH>((is_key ? k_cache : v_cache) + to, vec, load_raw<WIDTH>(from, vec)); \
        }                                                                                         \
    }

APPEND(1)
APPEND(8)
