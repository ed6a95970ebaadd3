// The splits of K that entry points are made for, best first measured on an H200 (records/), and the macro that makes
// one entry point a split. WARPS, CLUSTER, DEPTH, STATIC_K.
#pragma once
#include "nvfp4_gemv.cuh"

#if __CUDA_ARCH__ >= 900
using K5120Few = Split<10, 2, 1, 5120>;   // few tiles: two blocks share one
using K6144 = Split<3, 2, 1, 6144>;
using K17408 = Split<4, 2, 1, 17408>;
#else
using K5120Few = Split<20, 1, 1, 5120>;
using K6144 = Split<8, 1, 1, 6144>;
using K17408 = Split<17, 1, 1, 17408>;
#endif
using K2048 = Split<4, 1, 1, 2048>;
using K2048Few = Split<8, 1, 1, 2048>;
using K4096 = Split<8, 1, 1, 4096>;
using K5120 = Split<4, 1, 1, 5120>;
using AnyK = Split<8, 1, 1, 0>;

// Blocks that should fit a multiprocessor at once: 20 warps hide the latency and leave 96 registers a thread; with 16
// rows a thread needs 128, so that there are 16.
template <class S, int ROWS>
constexpr int MIN_BLOCKS = S::WARPS > 10 ? 1 : (ROWS > 8 ? 16 : 20) / S::WARPS;

#define FOR_EACH_SPLIT(ENTRY, ROWS)                                                                            \
    ENTRY(any, AnyK, ROWS) ENTRY(k2048, K2048, ROWS) ENTRY(k2048_few, K2048Few, ROWS) ENTRY(k4096, K4096, ROWS) \
    ENTRY(k5120, K5120, ROWS) ENTRY(k5120_few, K5120Few, ROWS) ENTRY(k6144, K6144, ROWS) ENTRY(k17408, K17408, ROWS)

#if __CUDA_ARCH__ >= 900
#define SPLIT_BOUNDS(S, ROWS) __cluster_dims__(S::CLUSTER, 1, 1) __launch_bounds__(S::WARPS * 32, (MIN_BLOCKS<S, ROWS>))
#else
#define SPLIT_BOUNDS(S, ROWS) __launch_bounds__(S::WARPS * 32, (MIN_BLOCKS<S, ROWS>))
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
