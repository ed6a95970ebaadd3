// NVFP4 GEMV: out[M, N], one entry point for each split of K and tile configuration. Launched by launch.py. Grid:
// ceil(N / 16) tiles, or half as many pairs, times the cluster size. Used by gemv.cu and gemv16.cu. sm_80 and newer.
#pragma once
#include "splits.cuh"

#define GEMV(NAME, SPLIT, ROWS)                                                                            \
    extern "C" __global__ void SPLIT_BOUNDS(SPLIT, ROWS) gemv_##NAME##_m##ROWS(                            \
        const u8* __restrict__ weight,       /* [ceil(N/16)][ceil(K/256)][2304] */                         \
        const __nv_bfloat16* __restrict__ x, /* [M, K], rows x_stride apart */                             \
        __nv_bfloat16* __restrict__ out,     /* [M, N] */                                                  \
        float scale, int x_stride, int M, int N, int K) {                                                  \
        const GridPosition<SPLIT> at;                                                                      \
        gemv_tiles<ROWS / 8, SPLIT>(weight, x, x_stride, scale * EXPONENT_GAP, M, N, K, at.group, at.rank, \
                                    [=](int m, int n, float v) { out[(size_t)m * N + n] = rounded(v); });  \
    }
