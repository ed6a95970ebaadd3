// The splits of K that entry points are made for, and the macro that makes one entry point a split.
//
// Measured on an H200 (records/): cold L2, M = 1 and 16, best of 20 to 60 configurations a shape. About 20 warps on a
// multiprocessor hide the latency; fewer leave more registers, which 16 rows need. Few tiles want more warps on one.
// Lost: two warps a tile at K = 2048 from 768 tiles on, which made 16 rows of the LM head 10% faster and one row 3 to 6%
// slower.
#pragma once
#include "nvfp4_gemv.cuh"

#if __CUDA_ARCH__ >= 900
using K5120Few = Split<10, 2, 5120, Tuning<1, 1>, Tuning<1, 1>>;
using K6144 = Split<3, 2, 6144, Tuning<1, 5>, Tuning<1, 5>>;
using K17408 = Split<4, 2, 17408, Tuning<1, 5>, Tuning<1, 5>>;
#else
using K5120Few = Split<20, 1, 5120, Tuning<1, 1>, Tuning<1, 1>>;
using K6144 = Split<8, 1, 6144, Tuning<1, 2>, Tuning<1, 2>>;
using K17408 = Split<17, 1, 17408, Tuning<1, 1>, Tuning<1, 1>>;
#endif
using K2048Few = Split<8, 1, 2048, Tuning<1, 2>, Tuning<1, 2>>;
using K2048 = Split<4, 1, 2048, Tuning<1, 6>, Tuning<2, 5>>;
using K4096 = Split<8, 1, 4096, Tuning<1, 2>, Tuning<1, 2>>;
using K5120 = Split<4, 1, 5120, Tuning<1, 5>, Tuning<1, 4>>;
using AnyK = Split<8, 1, 0, Tuning<1, 2>, Tuning<1, 2>>;

#define FOR_EACH_SPLIT(ENTRY, ROWS)                                                                            \
    ENTRY(any, AnyK, ROWS) ENTRY(k2048_few, K2048Few, ROWS) ENTRY(k2048, K2048, ROWS) ENTRY(k4096, K4096, ROWS) \
    ENTRY(k5120_few, K5120Few, ROWS) ENTRY(k5120, K5120, ROWS) ENTRY(k6144, K6144, ROWS) ENTRY(k17408, K17408, ROWS)

#if __CUDA_ARCH__ >= 900
#define SPLIT_BOUNDS(S, ROWS) __cluster_dims__(S::CLUSTER, 1, 1) __launch_bounds__(S::WARPS * 32, (S::template BLOCKS<ROWS / 8>))
#else
#define SPLIT_BOUNDS(S, ROWS) __launch_bounds__(S::WARPS * 32, (S::template BLOCKS<ROWS / 8>))
#endif

// Which tile a block works on, as rank of its cluster.
template <class S>
struct Place {
    int tile = blockIdx.x, rank = 0;
    __device__ __forceinline__ Place() {
        allow_next_launch();
#if __CUDA_ARCH__ >= 900
        if constexpr (S::CLUSTER > 1) {
            cluster_arrive_relaxed();  // rank 0 runs; gemv_tile waits before it writes there
            rank = cluster_rank();
            tile = blockIdx.x / S::CLUSTER;
        }
#endif
    }
};

__device__ __forceinline__ __nv_bfloat16 rounded(float value) { return __float2bfloat16_rn(value); }
