// NVFP4 GEMV of gated attention's query projection: weight rows stand head by head as [query (D) | gate (D)], and go to
// two outputs. Grid: ceil(2Q / 16) tiles, or half as many pairs (times the cluster).
#pragma once
#include "splits.cuh"

#define GEMV_QG(NAME, SPLIT, ROWS)                                                                                \
    extern "C" __global__ void SPLIT_BOUNDS(SPLIT, ROWS)  gemv_qg_##NAME##_m##ROWS(                               \
        const u8* __restrict__ weight,         /* [ceil(2Q/16)][ceil(K/256)][2304] */                             \
        const __nv_bfloat16* __restrict__ x,   /* [M, K], rows x_stride apart */                                  \
        __nv_bfloat16* __restrict__ query,     /* [M, Q] */                                                       \
        __nv_bfloat16* __restrict__ gate,      /* [M, Q] */                                                       \
        float scale, int x_stride, int M, int Q, int K, int head_dim) {                                           \
        const Place<SPLIT> at;                                                                                    \
        gemv_tiles<ROWS / 8, SPLIT>(weight, x, x_stride, scale * EXPONENT_GAP, M, 2 * Q, K, at.group,             \
                                           at.rank, [=](int m, int n, float v) {                                  \
                                               const int head = n / (2 * head_dim), d = n - head * 2 * head_dim;  \
                                               __nv_bfloat16* to = d < head_dim ? query : gate;                   \
                                               to[(size_t)m * Q + head * head_dim + d % head_dim] = rounded(v);   \
                                           });                                                                    \
    }
