// GEMM with BF16 weights on mma.sync.m16n8k16, any M. Launched by launch.py. sm_80 and newer; sm_90a uses only the
// kernel for any alignment, and otherwise wgmma (gemm_wgmma.cuh, gemm_split_k.cuh).
//
//   out[m, n] = BF16(sum_k x[m, k] * weight[n, k])
//
// A multistage cp.async pipeline copies tiles of x (A) and of the weight (B) to shared memory, with an XOR swizzle
// against bank conflicts of ldmatrix. Three tile configurations (rows x features):
//
//   narrow   32 x 64, split-K over the 8 warps of a block: small N (routers, gates), or small M
//   spread   32 x 64, split-K also over the 4 blocks of a cluster (sm_90 and newer): if narrow tiles are less
//            than a wave
//   wide     128 x 128, a warp computes 64 x 32 over all of K, two blocks an SM: prefill. 128 x 256 with one block an
//            SM and four stages of 32 k was slower (H200, 2048 x 6144 x 5120: 414 us instead of 335)
//
// A simple kernel with tiles of 16 x 16 serves rows that are not aligned to 16 bytes. Up to 16 rows the GEMV serves
// (gemv_kernels.cuh), so that a router has the same bits for one row as for a verify pass.
//
// Numerics: FP32 accumulation, one rounding. The order of a sum depends on K and the tile configuration only, never on
// other rows or the position of a row in its tile.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "cluster.cuh"
#include "gemv_kernels.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

// --- tiles ---

// The byte offset of a 16-byte chunk of a row, in a tile with rows of K_TILE values: chunk XOR (row mod 8).
template <int K_TILE>
__device__ __forceinline__ u32 swizzled_offset(int row, int chunk) {
    return row * (K_TILE * 2) + ((chunk ^ (row & 7)) << 4);
}

// Copies ROWS rows from ``first`` on of a matrix [rows, K] with rows ``stride`` apart; zeros outside of it. Offsets
// have 32 bits (the launcher refuses more): 64 bits would cost registers, and with them the occupancy of two blocks an
// SM.
template <int ROWS, int K_TILE, int THREADS>
__device__ __forceinline__ void copy_tile(u32 to, const bf16* matrix, u32 stride, int first, int rows, int k, int K) {
    constexpr int CHUNKS = K_TILE / 8, STEP = THREADS / CHUNKS;
    static_assert(ROWS % STEP == 0 && STEP % 8 == 0);
    const int row = threadIdx.x / CHUNKS, column = k + threadIdx.x % CHUNKS * 8;
    const u32 at = (first + row) * stride + column, into = to + swizzled_offset<K_TILE>(row, threadIdx.x % CHUNKS);
#pragma unroll
    for (int i = 0; i < ROWS / STEP; ++i) {
        const bool exists = first + row + i * STEP < rows && column < K;  // K is a multiple of 8
        cp_async_16_zfill(into + i * STEP * K_TILE * 2, matrix + (exists ? at + i * STEP * stride : 0), exists);
    }
}

// A tile of M_TILE x N_TILE for a block of WARPS_M x WARPS_N x WARPS_K warps. WARPS_K warps split the steps of 16 k.
template <int M_TILE_, int N_TILE_, int K_TILE_, int WARPS_M_, int WARPS_N_, int WARPS_K_, int STAGES_, int RANKS_ = 1>
struct TileConfig {
    static constexpr int M_TILE = M_TILE_, N_TILE = N_TILE_, K_TILE = K_TILE_, STAGES = STAGES_;
    static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, WARPS_K = WARPS_K_;
    static constexpr int THREADS = WARPS_M * WARPS_N * WARPS_K * 32;
    static constexpr int MT = M_TILE / WARPS_M / 16, NT = N_TILE / WARPS_N / 8;  // mma tiles of a warp
    static constexpr int X_BYTES = M_TILE * K_TILE * 2, STAGE_BYTES = X_BYTES + N_TILE * K_TILE * 2;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
    static_assert(NT % 2 == 0 && K_TILE / 16 % WARPS_K == 0 && K_TILE % 64 == 0);
    // Split-K over the blocks of a cluster, and over their warps.
    static constexpr int RANKS = RANKS_;
    static_assert(WARPS_K == 1 || WARPS_K * M_TILE * N_TILE * 4 <= SHARED_BYTES);
    static_assert(M_TILE * N_TILE / 2 % (RANKS * THREADS) == 0);
};

template <class S>
__device__ __forceinline__ void copy_stage(u32 shared, const bf16* x, const bf16* weight, int x_stride, int m0, int n0,
                                           int first, int step, int M, int N, int K) {
    const u32 at = shared + (step % S::STAGES) * S::STAGE_BYTES;
    const int k = (first + step) * S::K_TILE;
    copy_tile<S::M_TILE, S::K_TILE, S::THREADS>(at, x, x_stride, m0, M, k, K);
    copy_tile<S::N_TILE, S::K_TILE, S::THREADS>(at + S::X_BYTES, weight, K, n0, N, k, K);
}

// Multiplies one stage: this warp's steps of 16 k.
template <class S>
__device__ __forceinline__ void multiply_stage(float (&c)[S::MT][S::NT][4], u32 at, int m, int n, int warp_k,
                                               int lane) {
    const int row = lane & 15, half = lane >> 4;
    const int column = (lane & 7) + ((lane >> 4) << 3), half_k = lane >> 3 & 1;
#pragma unroll
    for (int i = 0; i < S::K_TILE / 16 / S::WARPS_K; ++i) {
        const int chunk = 2 * (i * S::WARPS_K + warp_k);
        u32 a[S::MT][4], b[S::NT / 2][4];
#pragma unroll
        for (int t = 0; t < S::MT; ++t)
            ldmatrix_x4(a[t], at + swizzled_offset<S::K_TILE>(m + 16 * t + row, chunk + half));
#pragma unroll
        for (int t = 0; t < S::NT / 2; ++t)
            ldmatrix_x4(b[t], at + S::X_BYTES + swizzled_offset<S::K_TILE>(n + 16 * t + column, chunk + half_k));
#pragma unroll
        for (int t = 0; t < S::MT; ++t)
#pragma unroll
            for (int u = 0; u < S::NT; ++u)
                mma_16x8x16(c[t][u], a[t], b[u / 2][2 * (u & 1)], b[u / 2][2 * (u & 1) + 1]);
    }
}

// Stores two adjacent outputs of a row.
__device__ __forceinline__ void store_pair(bf16* out, int row, int column, float low, float high, int M, int N) {
    if (row >= M || column >= N) return;
    bf16* at = out + (size_t)row * N + column;
    if (N % 2 == 0) {
        *reinterpret_cast<__nv_bfloat162*>(at) = __floats2bfloat162_rn(low, high);
    } else {
        at[0] = __float2bfloat16_rn(low);
        if (column + 1 < N) at[1] = __float2bfloat16_rn(high);
    }
}

template <int RANKS>
__device__ __forceinline__ void sync_ranks() {
    if constexpr (RANKS > 1) cluster_sync();
    else __syncthreads();
}
__device__ __forceinline__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float2 pair_of_rank(const float2* p, int rank) {
    return make_float2(dsmem_load(&p->x, rank), dsmem_load(&p->y, rank));
}

// Grouped rasterisation: 8 tiles along M, then the next tile along N, so that weights stay in L2.
__device__ __forceinline__ void tile_of_block(int block, int tiles_m, int tiles_n, int& m, int& n) {
    constexpr int GROUP_M = 8;
    const int group = block / (GROUP_M * tiles_n), in_group = block % (GROUP_M * tiles_n);
    const int rows = min(GROUP_M, tiles_m - group * GROUP_M);
    m = group * GROUP_M + in_group % rows;
    n = in_group / rows;
}

template <class S>
__device__ __forceinline__ void gemm_tile(const bf16* x, const bf16* weight, bf16* out, int x_stride, int M, int N,
                                          int K) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp_k = warp / (S::WARPS_M * S::WARPS_N), warp_mn = warp % (S::WARPS_M * S::WARPS_N);
    const int m = warp_mn / S::WARPS_N * (16 * S::MT), n = warp_mn % S::WARPS_N * (8 * S::NT);
    int tile_m, tile_n;
    tile_of_block(
        blockIdx.x / S::RANKS, (M + S::M_TILE - 1) / S::M_TILE, (N + S::N_TILE - 1) / S::N_TILE, tile_m, tile_n);
    const int m0 = tile_m * S::M_TILE, n0 = tile_n * S::N_TILE, all_steps = (K + S::K_TILE - 1) / S::K_TILE;
    const int rank = blockIdx.x % S::RANKS, steps_per_rank = (all_steps + S::RANKS - 1) / S::RANKS,
              first = min(rank * steps_per_rank, all_steps);
    const int steps = min(steps_per_rank, all_steps - first);
    pdl_launch_dependents();
    pdl_wait();

    // Main loop over the stages.
    float c[S::MT][S::NT][4] = {};
#pragma unroll
    for (int step = 0; step < S::STAGES - 1; ++step) {
        if (step < steps) copy_stage<S>(shared, x, weight, x_stride, m0, n0, first, step, M, N, K);
        cp_async_commit();
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<S::STAGES - 2>();
        __syncthreads();
        const int ahead = step + S::STAGES - 1;
        if (ahead < steps) copy_stage<S>(shared, x, weight, x_stride, m0, n0, first, ahead, M, N, K);
        cp_async_commit();
        multiply_stage<S>(c, shared + (step % S::STAGES) * S::STAGE_BYTES, m, n, warp_k, lane);
    }

    // Epilogue. With split-K, the partials of the warps are added in rising order.
    if constexpr (S::WARPS_K == 1) {
#pragma unroll
        for (int i = 0; i < S::MT; ++i)
#pragma unroll
            for (int j = 0; j < S::NT; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    store_pair(out, m0 + m + 16 * i + 8 * h + g, n0 + n + 8 * j + 2 * t, c[i][j][2 * h],
                               c[i][j][2 * h + 1], M, N);
    } else {
        float2* const partials = reinterpret_cast<float2*>(memory);  // [WARPS_K][M_TILE][N_TILE / 2]
        cp_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < S::MT; ++i)
#pragma unroll
            for (int j = 0; j < S::NT; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    partials[(warp_k * S::M_TILE + m + 16 * i + 8 * h + g) * (S::N_TILE / 2) + (n + 8 * j) / 2 + t] =
                        make_float2(c[i][j][2 * h], c[i][j][2 * h + 1]);
        __syncthreads();
        constexpr int PAIRS = S::M_TILE * S::N_TILE / 2;
        for (int i = threadIdx.x; i < PAIRS; i += S::THREADS) {
            float2 sum = partials[i];
#pragma unroll
            for (int w = 1; w < S::WARPS_K; ++w) sum = add(sum, partials[w * PAIRS + i]);
            partials[i] = sum;
        }
        // Each block adds the partials of all ranks for a part of the rows, in rising order, and stores them.
        sync_ranks<S::RANKS>();
        for (int i = rank * (PAIRS / S::RANKS) + threadIdx.x; i < (rank + 1) * (PAIRS / S::RANKS); i += S::THREADS) {
            float2 sum = S::RANKS > 1 ? pair_of_rank(partials + i, 0) : partials[i];
#pragma unroll
            for (int r = 1; r < S::RANKS; ++r) sum = add(sum, pair_of_rank(partials + i, r));
            store_pair(out, m0 + i / (S::N_TILE / 2), n0 + i % (S::N_TILE / 2) * 2, sum.x, sum.y, M, N);
        }
        if (S::RANKS > 1) sync_ranks<S::RANKS>();  // other blocks may still read this block's shared memory
    }
}

#if __CUDA_ARCH__ >= 900
constexpr int SPREAD = 4;
#define SPREAD_CLUSTER __cluster_dims__(SPREAD, 1, 1)
#else
constexpr int SPREAD = 1;
#define SPREAD_CLUSTER
#endif
using Narrow = TileConfig<32, 64, 128, 1, 1, 8, 4>;
using Spread = TileConfig<32, 64, 128, 1, 1, 8, 4, SPREAD>;
using Wide = TileConfig<128, 128, 64, 2, 4, 1, 3>;
// Fits every architecture: sm_86, sm_89 and sm_12x have 99 KB a block. Two blocks an SM on sm_90 and sm_100.
constexpr int SHARED_BYTES = 96 * 1024;
static_assert(Narrow::SHARED_BYTES == SHARED_BYTES && Wide::SHARED_BYTES == SHARED_BYTES);

#define DENSE_GEMM(NAME, CONFIG, CLUSTER)                                                       \
    extern "C" __global__ void CLUSTER __launch_bounds__(CONFIG::THREADS, 2) dense_gemm_##NAME( \
        const bf16* __restrict__ x,      /* [M, K], rows x_stride apart */                      \
        const bf16* __restrict__ weight, /* [N, K] */                                           \
        bf16* __restrict__ out,          /* [M, N] */                                           \
        int x_stride, int M, int N, int K) {                                                    \
        gemm_tile<CONFIG>(x, weight, out, x_stride, M, N, K);                                   \
    }

// Any K and any alignment. Grid: ceil(N / 16) * ceil(M / 16).
constexpr int ANY = 16;

extern "C" __global__ void __launch_bounds__((ANY * ANY)) dense_gemm_any(
    const bf16* __restrict__ x,       // [M, K], rows x_stride apart
    const bf16* __restrict__ weight,  // [N, K]
    bf16* __restrict__ out,           // [M, N]
    int x_stride, int M, int N, int K) {
    __shared__ float xs[ANY][ANY], ws[ANY][ANY + 1];
    const int tiles = (N + ANY - 1) / ANY, m0 = blockIdx.x / tiles * ANY, n0 = blockIdx.x % tiles * ANY;
    const int row = threadIdx.x / ANY, column = threadIdx.x % ANY;
    pdl_launch_dependents();
    pdl_wait();
    float sum = 0.0f;
    for (int k = 0; k < K; k += ANY) {
        const bool is_k = k + column < K;
        xs[row][column] = is_k && m0 + row < M ? __bfloat162float(x[(size_t)(m0 + row) * x_stride + k + column]) : 0.0f;
        ws[row][column] = is_k && n0 + row < N ? __bfloat162float(weight[(size_t)(n0 + row) * K + k + column]) : 0.0f;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ANY; ++i) sum = fmaf(xs[row][i], ws[column][i], sum);
        __syncthreads();
    }
    if (m0 + row < M && n0 + column < N) out[(size_t)(m0 + row) * N + n0 + column] = __float2bfloat16_rn(sum);
}
