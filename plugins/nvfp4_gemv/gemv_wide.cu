// NVFP4 GEMV for up to 256 rows and small weights: 32 rows use each decoded weight; more rows are more blocks along y.
// K is a run-time value, so that few entry points serve all splits. Launched by launch.py. sm_80 and newer. Grid: (that
// of gemv.cuh, ceil(M / 32)).
#include "splits.cuh"

constexpr int ROWS = 32;
// Up to one block a multiprocessor, one tile a warp is faster: all registers hold loads in flight. With more blocks,
// two tiles a warp halve the reads of x. H200, us one tile / two: 2048 x 4096 at 32 rows 5.9 / 7.6, 64 rows 8.5 / 8.1;
// 2048 x 512 at 64 rows 3.7 / 4.4, 128 rows 4.8 / 4.6.
template <int DEPTH>
using OneTile = TileConfig<1, 1, 8, DEPTH, 0, true>;
using TwoTiles = TileConfig<2, 1, 8, WHOLE_SUPERTILES, 0, true>;
using AnyDepth = Split<8, 1, OneTile<0>, void>;
using Warps8 = Split<8, 1, OneTile<WHOLE_SUPERTILES>, void>;
using Warps8Pair = Split<8, 1, TwoTiles, void>;
using Warps2 = Split<2, 1, OneTile<WHOLE_SUPERTILES>, void>;  // the split of 8 warps, 6 of which have no K
using Warps2Pair = Split<2, 1, TwoTiles, void>;
using Warps4Pair = Split<4, 1, TileConfig<2, 1, 12, WHOLE_SUPERTILES, 0, true>, void>;
using Warps4Cluster2 = OverTwoBlocks<4, TileConfig<1, 1, 12, WHOLE_SUPERTILES, 0, true>, void>;
using Warps10Cluster2 = OverTwoBlocks<10, OneTile<WHOLE_SUPERTILES>, void>;

#define GEMV_WIDE(NAME, SPLIT)                                                                                   \
    extern "C" __global__ void SPLIT_BOUNDS(SPLIT, ROWS) gemv_wide_##NAME(                                       \
        const u8* __restrict__ weight,       /* [ceil(N/16)][ceil(K/256)][2304] */                               \
        const __nv_bfloat16* __restrict__ x, /* [M, K], rows x_stride apart */                                   \
        __nv_bfloat16* __restrict__ out,     /* [M, N] */                                                        \
        float scale, int x_stride, int M, int N, int K) {                                                        \
        const GridPosition<SPLIT> at;                                                                            \
        const int first = blockIdx.y * ROWS, rows = min(M - first, ROWS);                                        \
        gemv_tiles<ROWS / 8, SPLIT>(                                                                             \
            weight, x + (size_t)first * x_stride, x_stride, scale * EXPONENT_GAP, rows, N, K, at.group, at.rank, \
            [=](int m, int n, float v) { out[(size_t)(first + m) * N + n] = rounded(v); });                      \
    }

GEMV_WIDE(any, AnyDepth)
GEMV_WIDE(8, Warps8)
GEMV_WIDE(8_pair, Warps8Pair)
GEMV_WIDE(2, Warps2)
GEMV_WIDE(2_pair, Warps2Pair)
GEMV_WIDE(4_pair, Warps4Pair)
GEMV_WIDE(4x2, Warps4Cluster2)
GEMV_WIDE(10x2, Warps10Cluster2)
