// out[m] = table[ids[m]]: rows of the embedding table, copied as BF16.
//
// An id outside the table, which the contract rejects, gives a row of zeros, without a read outside the table. One
// block a row. Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "pdl.cuh"

constexpr int THREADS = 256;

#define GATHER(WIDTH)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) gather_w##WIDTH(                    \
        const bf16* __restrict__ table, /* [V, H] */                                          \
        const int* __restrict__ ids,    /* [M] */                                             \
        bf16* __restrict__ out,         /* [M, H] */                                          \
        int V, int H) {                                                                       \
        pdl_launch_dependents();                                                              \
        pdl_wait();                                                                           \
        const int id = ids[blockIdx.x];                                                       \
        const bool is_inside = id >= 0 && id < V;                                             \
        const bf16* from = table + (is_inside ? (size_t)id * H : 0);                          \
        bf16* to = out + (size_t)blockIdx.x * H;                                              \
        for (int vec = threadIdx.x; vec < H / WIDTH; vec += THREADS)                          \
            store_raw<WIDTH>(to, vec, is_inside ? load_raw<WIDTH>(from, vec) : Raw<WIDTH>{}); \
    }

GATHER(1)
GATHER(8)
