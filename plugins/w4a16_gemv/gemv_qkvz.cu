// NVFP4 GEMV of a gated delta net's fused input projection. Weight rows stand key head by key head as [q | k | v | z],
// v and z holding the group's value heads; they go to [q | k | v] of all heads, and to z. Grid: ceil(N / 16) tiles, or
// half as many pairs (times the cluster).
#include "splits.cuh"

#define GEMV_QKVZ(NAME, SPLIT, ROWS)                                                                              \
    extern "C" __global__ void SPLIT_BOUNDS(SPLIT, ROWS)  gemv_qkvz_##NAME##_m##ROWS(                             \
        const u8* __restrict__ weight,         /* [ceil(N/16)][ceil(K/256)][2304], N = key_heads * group */       \
        const __nv_bfloat16* __restrict__ x,   /* [M, K], rows x_stride apart */                                  \
        __nv_bfloat16* __restrict__ qkv,       /* [M, key_heads * (2 * key_dim + group_values)] */                \
        __nv_bfloat16* __restrict__ z,         /* [M, key_heads * group_values] */                                \
        float scale, int x_stride, int M, int K, int key_heads, int key_dim, int group_values) {                  \
        const Place<SPLIT> at;                                                                                    \
        const int keys = key_heads * key_dim, values = key_heads * group_values;                                  \
        const int group = 2 * key_dim + 2 * group_values;                                                         \
        gemv_tiles<ROWS / 8, SPLIT>(weight, x, x_stride, scale * EXPONENT_GAP, M, key_heads * group, K,           \
                                   at.group, at.rank, [=](int m, int n, float v) {                                \
                                       const int head = n / group, i = n - head * group;                          \
                                       const int j = i - 2 * key_dim;  /* from here on: v, then z */              \
                                       __nv_bfloat16* row = qkv + (size_t)m * (2 * keys + values);                \
                                       if (i < key_dim) row[head * key_dim + i] = rounded(v);                     \
                                       else if (j < 0) row[keys + head * key_dim + i - key_dim] = rounded(v);     \
                                       else if (j < group_values) row[2 * keys + head * group_values + j] = rounded(v); \
                                       else z[(size_t)m * values + head * group_values + j - group_values] = rounded(v); \
                                   });                                                                            \
    }

FOR_EACH_INPUT_SPLIT(GEMV_QKVZ, 8)
