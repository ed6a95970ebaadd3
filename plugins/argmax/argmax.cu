// out[m] = index of the largest logit of row m, of equal ones the lowest.
//
// A cluster of 8 blocks a row from sm_90 on (logits.cuh), one block below. NaN, which the contract refuses, is passed
// over; a row of nothing else gives 0. sm_80 and newer. Launched by launch.py.
#include "logits.cuh"

constexpr int THREADS = 1024;  // a row of the models' vocabulary is one round of loads

#define ARGMAX(WIDTH)                                                                                            \
    extern "C" __global__ void TEAM_BOUNDS(THREADS) argmax_bf16_w##WIDTH(                                        \
        const bf16* __restrict__ logits, /* [M, V] */                                                            \
        int* __restrict__ out,           /* [M] */                                                               \
        int V) {                                                                                                 \
        __shared__ Best shared[THREADS / 32 + 1];                                                                \
        allow_next_launch();                                                                                     \
        wait_for_previous_launch();                                                                              \
        const u32 rank = team_rank();                                                                            \
        const size_t row = blockIdx.x / TEAM;                                                                    \
        const Best best = best_of_row<WIDTH, THREADS>(logits + row * V, V, rank, shared);                        \
        if (rank == 0 && threadIdx.x == 0) out[row] = best.index;                                                \
        cluster_barrier(); /* no block ends while another reads its shared memory */                             \
    }

ARGMAX(1)
ARGMAX(8)
