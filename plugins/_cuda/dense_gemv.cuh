// Device functions of the GEMV with BF16 weights, small M, one read of the weights. Used by dense_gemm/gemv_kernels.cuh
// and nvfp4_gemv/gemv_gdn_in.cu. sm_80 and newer.
//
//   out[m, n] = BF16(sum_k x[m, k] * weight[n, k])
//
// Weights [N, K] row-major are one operand of mma.sync.m16n8k16 without a re-layout: lane (g, t) reads 32 contiguous
// bytes of rows g and g + 8, and the same k of x. Split-K: warps take blocks of 64 k in turn. A warp has four
// accumulators, which are added in a fixed order, as are the partials of the warps. The order does not depend on M:
// rows are independent of each other.
#pragma once
#include "global_memory.cuh"
#include "mma.cuh"
#include "nvfp4_mma.cuh"

constexpr int BLOCK_K = 64;  // 16 k in each lane

// Split-K over WARPS warps of each of RANKS blocks of a cluster, with DEPTH blocks of k in flight in a warp. Partials
// are added within a rank first.
template <int WARPS_, int RANKS_, int DEPTH_>
struct SplitK {
    static constexpr int WARPS = WARPS_, RANKS = RANKS_, DEPTH = DEPTH_, THREADS = WARPS_ * 32;
};
using LargeN = SplitK<8, 1, 2>;
// Fewer tiles than multiprocessors: split-K over a cluster too.
#if __CUDA_ARCH__ >= 900
using SmallN = SplitK<4, 8, 3>;
#else
using SmallN = LargeN;
#endif

struct Rows16 {
    uint4 low[2], high[2];  // 16 k of row g and of row g + 8: the A operand
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
