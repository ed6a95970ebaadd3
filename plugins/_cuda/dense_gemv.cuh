// BF16 weights x BF16 activations for a few rows, one read of the weights: what all kernels of it share.
//
//   out[m, n] = BF16(sum_k x[m, k] * weight[n, k])
//
// Weights [N, K] row-major are the A operand of mma.sync.m16n8k16 as they are: lane (g, t) reads 32 contiguous bytes of
// rows g and g + 8, and the same k of x, or the other way round. K is shared in blocks of 64 by warps in turn; a warp
// adds on four sums, these are added in a fixed order, and so are those of the warps, the same for any M: rows do not
// depend on each other.
#pragma once
#include "global_memory.cuh"
#include "mma.cuh"
#include "nvfp4_mma.cuh"

constexpr int BLOCK_K = 64;  // 16 k a lane

// Who shares K: WARPS warps each of RANKS ranks, in turn; and how many blocks of k a warp has on their way. Sums are
// added within ranks first.
template <int WARPS_, int RANKS_, int DEPTH_>
struct Sharing {
    static constexpr int WARPS = WARPS_, RANKS = RANKS_, DEPTH = DEPTH_, THREADS = WARPS_ * 32;
};
using Many = Sharing<8, 1, 2>;
// Where there are too few features for a device, and clusters.
#if __CUDA_ARCH__ >= 900
using Few = Sharing<4, 8, 3>;
#else
using Few = Many;
#endif

struct Rows16 {
    uint4 low[2], high[2];  // 16 k of row g, of row g + 8: A
};

// x[row, k .. k + 15] for NT groups of 8 rows; rows from M on, and k from K on, are zeros.
template <int NT>
__device__ __forceinline__ void load_rows(uint4 (&v)[NT][2], const __nv_bfloat16* x, int stride, int M, int K, int g,
                                          int k) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        v[n][0] = v[n][1] = make_uint4(0, 0, 0, 0);
        if (n * 8 + g >= M || k >= K) continue;
        const uint4* p = reinterpret_cast<const uint4*>(x + (size_t)(n * 8 + g) * stride + k);
        v[n][0] = load_now(p), v[n][1] = load_now(p + 1);
    }
}

template <int NT>
__device__ __forceinline__ void multiply(float (&c)[4][NT][4], const Rows16& rows, const uint4 (&b)[NT][2]) {
    const u32 a[4][4] = {{rows.low[0].x, rows.high[0].x, rows.low[0].y, rows.high[0].y},
                         {rows.low[0].z, rows.high[0].z, rows.low[0].w, rows.high[0].w},
                         {rows.low[1].x, rows.high[1].x, rows.low[1].y, rows.high[1].y},
                         {rows.low[1].z, rows.high[1].z, rows.low[1].w, rows.high[1].w}};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        mma_16x8x16(c[0][n], a[0], b[n][0].x, b[n][0].y);
        mma_16x8x16(c[1][n], a[1], b[n][0].z, b[n][0].w);
        mma_16x8x16(c[2][n], a[2], b[n][1].x, b[n][1].y);
        mma_16x8x16(c[3][n], a[3], b[n][1].z, b[n][1].w);
    }
}
