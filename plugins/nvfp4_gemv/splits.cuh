// The splits of K that have entry points, with the tile configuration of each, and the macros of entry points. Used by
// gemv.cuh, gemv_wide.cu, gemv_parts.cu, gemv_dual_silu.cu and gemv_gdn_in.cu. sm_80 and newer.
//
// launch.py chooses by N and K; figures in records/ (H200, cold L2, M = 1, 8 and 16). About 20 warps a multiprocessor
// hide the latency. Two tiles a warp halve the reads of x, and are slower where they fill the last wave less evenly.
#pragma once
#include "cluster.cuh"
#include "nvfp4_gemv.cuh"
#include "pdl.cuh"

#if __CUDA_ARCH__ >= 900
constexpr int PAIR_CLUSTER = 2;
#else  // no clusters: the same number of warps in one block
constexpr int PAIR_CLUSTER = 1;
#endif
template <int WARPS, class CONFIG_8, class CONFIG_16>
using OverTwoBlocks = Split<PAIR_CLUSTER == 2 ? WARPS : 2 * WARPS, PAIR_CLUSTER, CONFIG_8, CONFIG_16>;

// Configurations for PDL, measured on Hopper only. H200, layers of dependent launches, us a layer without / with:
//   2048 x 4096, a supertile decoded before pdl_wait                           25.8 / 24.5
//   5120 x 6144, 20 warps a multiprocessor instead of 24                       71.1 / 70.5
//   17408 x 5120 twice (gemv_dual_silu.cu), half a supertile decoded early     70.6 / 69.4
#if __CUDA_ARCH__ == 900
template <class HOPPER, class OTHER>
using OnHopper = HOPPER;
#else
template <class HOPPER, class OTHER>
using OnHopper = OTHER;
#endif

using AnyK = Split<8, 1, TileConfig<1, 4, 16, 0>, TileConfig<1, 2, 16, 0>>;
using K2048SmallN = Split<8, 1, TileConfig<1, 4, 16, 2048>, TileConfig<1, 1, 16, 2048>>;
using K2048 = Split<4, 1, TileConfig<1, 4, 24, 2048>, TileConfig<1, 2, 20, 2048>>;
using K2048Pair = Split<4, 1, TileConfig<2, 1, 20, 2048>, TileConfig<2, 1, 16, 2048, 0, true>>;
using K4096 = Split<8, 1, TileConfig<1, 4, 16, 4096>, TileConfig<1, 4, 16, 4096, 0, true>>;
using K4096EarlyDecode = Split<8, 1, OnHopper<TileConfig<1, 1, 8, 4096, 4>, TileConfig<1, 4, 16, 4096>>, void>;
using K5120SmallN = OverTwoBlocks<10, TileConfig<1, 4, 20, 5120>, TileConfig<1, 2, 20, 5120>>;
using K5120 = Split<4, 1, TileConfig<1, 4, 20, 5120>, TileConfig<1, 1, 20, 5120>>;
using K5120Pair = Split<4, 1, TileConfig<2, 1, 16, 5120>, TileConfig<2, 2, 16, 5120, 0, true>>;
using K5120LargeN = Split<4, 1, TileConfig<1, 1, 24, 0>, TileConfig<2, 2, 16, 0>>;
using K6144 =
    OverTwoBlocks<4, OnHopper<TileConfig<1, 4, 20, 6144>, TileConfig<1, 4, 24, 6144>>, TileConfig<1, 1, 20, 6144>>;
using K17408 = OverTwoBlocks<4, TileConfig<1, 4, 20, 17408>, TileConfig<1, 1, 20, 17408, 0, true>>;

// Splits for the K of layer inputs; and all splits of the plain GEMV.
// clang-format off
#define FOR_EACH_INPUT_SPLIT(ENTRY, ROWS) \
    ENTRY(any, AnyK, ROWS) ENTRY(k2048_few, K2048SmallN, ROWS) ENTRY(k2048, K2048, ROWS) \
    ENTRY(k5120_few, K5120SmallN, ROWS) ENTRY(k5120, K5120, ROWS) ENTRY(k5120_pair, K5120Pair, ROWS)
#define FOR_EACH_SPLIT(ENTRY, ROWS) \
    FOR_EACH_INPUT_SPLIT(ENTRY, ROWS) ENTRY(k2048_pair, K2048Pair, ROWS) ENTRY(k4096, K4096, ROWS) \
    ENTRY(k6144, K6144, ROWS) ENTRY(k17408, K17408, ROWS)
// clang-format on

#if __CUDA_ARCH__ >= 900
#define SPLIT_BOUNDS(P, ROWS) \
    __cluster_dims__(P::CLUSTER, 1, 1) __launch_bounds__(P::WARPS * 32, (P::template BLOCKS<ROWS / 8>))
#else
#define SPLIT_BOUNDS(P, ROWS) __launch_bounds__(P::WARPS * 32, (P::template BLOCKS<ROWS / 8>))
#endif

// The tile group of a block, and its rank in the cluster.
template <class P>
struct GridPosition {
    int group = blockIdx.x, rank = 0;
    __device__ __forceinline__ GridPosition() {
        pdl_launch_dependents();
#if __CUDA_ARCH__ >= 900
        if constexpr (P::CLUSTER > 1) {
            rank = cluster_rank();
            group = blockIdx.x / P::CLUSTER;
        }
#endif
    }
};
