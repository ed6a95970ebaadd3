// BF16 weights x BF16 activations for up to 16 rows, one read of the weights.
//
//   out[m, n] = BF16(sum_k x[m, k] * weight[n, k])
//
// Weights [N, K] row-major are the A operand of mma.sync.m16n8k16 as they are: lane (g, t) reads 32 contiguous bytes of
// rows g and g + 8, and the same k of x. Numerics: FP32 accumulation, K split over 8 warps, partial sums in a fixed
// order, the same for any M: rows do not depend on each other. Grid: ceil(N / 16).
//
// ``few``: where there are too few features for a device, K is split over the 4 warps of each of the 8 blocks of a cluster
// (over 8 warps below sm_90); block 0 sums what all blocks send, counted by an mbarrier: a barrier of the cluster would order
// all memory of the device, too. The GEMM of so few rows is this too, bit by bit.
#pragma once
#include "ahead.cuh"
#include "launch.cuh"
#include "nvfp4_mma.cuh"

constexpr int BLOCK_K = 64;  // 16 k a lane

// Who shares K: warps of a block, and blocks of a cluster; and how many blocks of k a warp has on their way.
template <int WARPS_, int RANKS_, int DEPTH_>
struct Sharing {
    static constexpr int WARPS = WARPS_, RANKS = RANKS_, DEPTH = DEPTH_, THREADS = WARPS_ * 32;
};
using Many = Sharing<8, 1, 2>;
#if __CUDA_ARCH__ >= 900
using Few = Sharing<4, 8, 3>;
#define FEW_CLUSTER __cluster_dims__(8, 1, 1)
#else
using Few = Many;
#define FEW_CLUSTER
#endif

struct Rows16 {
    uint4 low[2], high[2];  // 16 k of row g, of row g + 8
};

__device__ __forceinline__ Rows16 load_weight(const __nv_bfloat16* __restrict__ weight, int n, int N, int K, int k) {
    Rows16 v = {};
    if (k >= K) return v;
    if (n < N) {
        const u8* p = reinterpret_cast<const u8*>(weight + (size_t)n * K + k);
        v.low[0] = load_codes_now(p);
        v.low[1] = load_codes_now(p + 16);
    }
    if (n + 8 < N) {
        const u8* p = reinterpret_cast<const u8*>(weight + (size_t)(n + 8) * K + k);
        v.high[0] = load_codes_now(p);
        v.high[1] = load_codes_now(p + 16);
    }
    return v;
}

// x[row, k .. k + 15] for NT groups of 8 rows; rows from M on, and k from K on, are zeros.
template <int NT>
__device__ __forceinline__ void load_rows(uint4 (&v)[NT][2], const __nv_bfloat16* x, int stride, int M, int K, int g, int k) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        v[n][0] = v[n][1] = make_uint4(0, 0, 0, 0);
        if (n * 8 + g >= M || k >= K) continue;
        const uint4* p = reinterpret_cast<const uint4*>(x + (size_t)(n * 8 + g) * stride + k);
        v[n][0] = load_now(p), v[n][1] = load_now(p + 1);
    }
}

template <int NT>
__device__ __forceinline__ void multiply(float (&c)[4][NT][4], const Rows16& w, const uint4 (&x)[NT][2]) {
    const u32 a[4][4] = {{w.low[0].x, w.high[0].x, w.low[0].y, w.high[0].y},
                         {w.low[0].z, w.high[0].z, w.low[0].w, w.high[0].w},
                         {w.low[1].x, w.high[1].x, w.low[1].y, w.high[1].y},
                         {w.low[1].z, w.high[1].z, w.low[1].w, w.high[1].w}};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        mma_16x8x16(c[0][n], a[0], x[n][0].x, x[n][0].y);
        mma_16x8x16(c[1][n], a[1], x[n][0].z, x[n][0].w);
        mma_16x8x16(c[2][n], a[2], x[n][1].x, x[n][1].y);
        mma_16x8x16(c[3][n], a[3], x[n][1].z, x[n][1].w);
    }
}

#if __CUDA_ARCH__ >= 900
// Where the sums of a cluster's blocks arrive in block 0 (PTX ISA 8.1).
struct Meeting {
    unsigned long long state;

    __device__ __forceinline__ u32 address() { return (u32)__cvta_generic_to_shared(&state); }
    // By one thread, before the cluster's barrier.
    __device__ __forceinline__ void expect(u32 bytes) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    }
    // To the same place of block 0.
    __device__ __forceinline__ void send(float4* to, float4 v) {
        u32 there, counter;
        asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"((u32)__cvta_generic_to_shared(to)));
        asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(counter) : "r"(address()));
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
                     "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(counter) : "memory");
    }
    __device__ __forceinline__ void wait() {
        u32 done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done) : "r"(address()) : "memory");
    }
};
#endif

template <int NT, class S>
__device__ __forceinline__ void dense_tile(const __nv_bfloat16* __restrict__ weight,
                                           const __nv_bfloat16* __restrict__ x, __nv_bfloat16* __restrict__ out,
                                           int x_stride, int M, int N, int K) {
    __shared__ __align__(16) float partial[S::WARPS][NT * 8][TILE_N];
    allow_next_launch();
    int rank = 0;
#if __CUDA_ARCH__ >= 900
    __shared__ __align__(16) float of_rank[S::RANKS][NT * 8][TILE_N];  // block 0's
    __shared__ Meeting meeting;
    if (S::RANKS > 1) {
        if (threadIdx.x == 0) meeting.expect(S::RANKS * TILE_N * M * (u32)sizeof(float));
        cluster_arrive_relaxed();
        rank = cluster_rank();
    }
#endif
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int n0 = blockIdx.x / S::RANKS * TILE_N, step = S::RANKS * S::WARPS * BLOCK_K;
    const int first = (rank * S::WARPS + warp) * BLOCK_K + t * 16;

    // Stage 1: each warp sums its share of K, DEPTH blocks in flight.
    float c[4][NT][4] = {};
    Rows16 ring[S::DEPTH];
#pragma unroll
    for (int d = 0; d < S::DEPTH; ++d) ring[d] = load_weight(weight, n0 + g, N, K, first + d * step);
    wait_for_previous_launch();
    constexpr int AT_ONCE = S::RANKS > 1 ? S::DEPTH : 1;  // blocks of x on their way together
#pragma unroll 1
    for (int k = first; k < K + t * 16; k += S::DEPTH * step) {  // the same number of rounds for all lanes of a warp
        uint4 xs[AT_ONCE][NT][2];
#pragma unroll
        for (int d = 0; d < AT_ONCE; ++d) load_rows<NT>(xs[d], x, x_stride, M, K, g, k + d * step);
#pragma unroll
        for (int d = 0; d < S::DEPTH; ++d) {
            if (AT_ONCE == 1 && d > 0) load_rows<NT>(xs[0], x, x_stride, M, K, g, k + d * step);
            if (AT_ONCE > 1 && k + d * step >= K + t * 16) continue;
            multiply<NT>(c, ring[d], xs[d % AT_ONCE]);
            ring[d] = load_weight(weight, n0 + g, N, K, k + (S::DEPTH + d) * step);
        }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = n * 8 + 2 * t + (i & 1);
            if (row < M) partial[warp][row][g + 8 * (i >> 1)] = (c[0][n][i] + c[1][n][i]) + (c[2][n][i] + c[3][n][i]);
        }

    // Stage 2: sums over the warps of a block in rising order, of four features at a time where they are sent.
    __syncthreads();
    if (S::RANKS == 1) {
#pragma unroll 1
        for (int i = threadIdx.x; i < TILE_N * M; i += S::THREADS) {
            const int row = i / TILE_N, column = i % TILE_N;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < S::WARPS; ++w) sum += partial[w][row][column];
            if (n0 + column < N) out[(size_t)row * N + n0 + column] = __float2bfloat16_rn(sum);
        }
        return;
    }

    // Stage 3: sums over blocks in rising order.
#if __CUDA_ARCH__ >= 900
    cluster_wait();  // block 0 has begun
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_N / 4 * M; i += S::THREADS) {
        const int row = i / (TILE_N / 4), column = i % (TILE_N / 4) * 4;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < S::WARPS; ++w) {
            const float4 one = *reinterpret_cast<const float4*>(&partial[w][row][column]);
            sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        meeting.send(reinterpret_cast<float4*>(&of_rank[rank][row][column]), sum);
    }
    if (rank != 0) return;
    meeting.wait();
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_N * M; i += S::THREADS) {
        const int row = i / TILE_N, column = i % TILE_N;
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < S::RANKS; ++r) sum += of_rank[r][row][column];
        if (n0 + column < N) out[(size_t)row * N + n0 + column] = __float2bfloat16_rn(sum);
    }
#endif
}

#define DENSE_GEMV(NAME, ROWS, SHARING, CLUSTER)                                                             \
    extern "C" __global__ void CLUSTER __launch_bounds__(SHARING::THREADS, 2) NAME##m##ROWS(                 \
        const __nv_bfloat16* __restrict__ weight, /* [N, K] */                                               \
        const __nv_bfloat16* __restrict__ x,      /* [M, K], rows x_stride apart */                          \
        __nv_bfloat16* __restrict__ out,          /* [M, N] */                                               \
        int x_stride, int M, int N, int K) {                                                                 \
        dense_tile<ROWS / 8, SHARING>(weight, x, out, x_stride, M, N, K);                                    \
    }

#define DENSE_GEMVS(NAME)                      \
    DENSE_GEMV(NAME##_, 8, Many, )             \
    DENSE_GEMV(NAME##_, 16, Many, )            \
    DENSE_GEMV(NAME##_few_, 8, Few, FEW_CLUSTER) \
    DENSE_GEMV(NAME##_few_, 16, Few, FEW_CLUSTER)
