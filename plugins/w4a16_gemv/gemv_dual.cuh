// Two NVFP4 GEMVs of one x in one launch: K and V, or gate and up. Grid: the groups of tiles of A, then those of B.
#pragma once
#include "splits.cuh"

#define GEMV_DUAL(NAME, SPLIT, ROWS)                                                                              \
    extern "C" __global__ void SPLIT_BOUNDS(SPLIT, ROWS)  gemv_dual_##NAME##_m##ROWS(                             \
        const u8* __restrict__ weight_a,       /* [ceil(A/16)][ceil(K/256)][2304] */                              \
        const u8* __restrict__ weight_b,       /* [ceil(B/16)][ceil(K/256)][2304] */                              \
        const __nv_bfloat16* __restrict__ x,   /* [M, K], rows x_stride apart */                                  \
        __nv_bfloat16* __restrict__ out_a,     /* [M, A] */                                                       \
        __nv_bfloat16* __restrict__ out_b,     /* [M, B] */                                                       \
        float scale_a, float scale_b, int x_stride, int M, int A, int B, int K) {                                 \
        const Place<SPLIT> at;                                                                                    \
        constexpr int COLUMNS = SPLIT::template ShapeOf<ROWS / 8>::TILES * TILE_N;                                \
        const int groups_a = (A + COLUMNS - 1) / COLUMNS;                                                         \
        const bool first = at.group < groups_a;                                                                   \
        const int N = first ? A : B;                                                                              \
        __nv_bfloat16* out = first ? out_a : out_b;                                                               \
        gemv_tiles<ROWS / 8, SPLIT>(first ? weight_a : weight_b, x, x_stride,                                     \
                                           (first ? scale_a : scale_b) * EXPONENT_GAP, M, N, K,                   \
                                           first ? at.group : at.group - groups_a, at.rank,                       \
                                           [=](int m, int n, float v) { out[(size_t)m * N + n] = rounded(v); });  \
    }
