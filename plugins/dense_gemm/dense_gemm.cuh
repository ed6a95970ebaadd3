// BF16 weights x BF16 activations for any number of rows: the tiles that every architecture has.
//
//   out[m, n] = BF16(sum_k x[m, k] * weight[n, k])
//
// Tiles of x and of the weight go to shared memory by cp.async, several stages ahead, 16 bytes a copy, swizzled so that
// ldmatrix meets no bank twice; mma.sync.m16n8k16 with x as A and the weight as B. Three shapes of the tile:
//
//   narrow   32 x 64, K split over the 8 warps of a block: few features (routers, gates), or few rows
//   spread   the same, K split over the 4 blocks of a cluster too (from sm_90 on): where that is less than a device
//   wide     128 x 128, each warp 64 x 32 over all of K, two blocks an SM: projections of a prompt. 128 x 256 with one
//            block an SM and four stages of 32 k was slower (H200, 2048 x 6144 x 5120: 414 us against 335)
//
// and a plain kernel of 16 x 16 outputs for rows that do not begin at multiples of 16 bytes. sm_90a has wgmma instead
// of these tiles (dense_wgmma.cuh, dense_split.cuh). Up to 16 rows the GEMV's kernels serve (dense_rows.cuh): a router
// has the same bits for one row as for a verify pass.
//
// Numerics: FP32 accumulation, one rounding. The order of a sum depends on K and the shape of the tile, never on the
// other rows or on where in a tile a row lies. sm_80 and newer (mma.sync: no architecture's own instructions). Launched
// by launch.py.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "cluster.cuh"
#include "dense_rows.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

// --- tiles ---

// The byte of 16-byte piece ``piece`` of row ``row`` in a tile of rows of K_TILE values: 8 rows have a piece in 8
// places.
template <int K_TILE>
__device__ __forceinline__ u32 place(int row, int piece) {
    return row * (K_TILE * 2) + ((piece ^ (row & 7)) << 4);
}

// Copies ROWS rows from ``first`` on of a matrix [rows, K] with rows ``stride`` apart; zeros beyond it. Elements are
// counted in 32 bits (the launcher refuses more): 64 would cost the registers that make two blocks fit on an SM.
template <int ROWS, int K_TILE, int THREADS>
__device__ __forceinline__ void copy_tile(u32 to, const bf16* matrix, u32 stride, int first, int rows, int k, int K) {
    constexpr int PIECES = K_TILE / 8, STEP = THREADS / PIECES;
    static_assert(ROWS % STEP == 0 && STEP % 8 == 0);
    const int row = threadIdx.x / PIECES, column = k + threadIdx.x % PIECES * 8;
    const u32 at = (first + row) * stride + column, into = to + place<K_TILE>(row, threadIdx.x % PIECES);
#pragma unroll
    for (int i = 0; i < ROWS / STEP; ++i) {
        const bool exists = first + row + i * STEP < rows && column < K;  // K is a multiple of 8
        cp_async_16_zfill(into + i * STEP * K_TILE * 2, matrix + (exists ? at + i * STEP * stride : 0), exists);
    }
}

// A block's tile M_TILE x N_TILE, its warps WARPS_M x WARPS_N x WARPS_K: the last share the steps of 16 k.
template <int M_TILE_, int N_TILE_, int K_TILE_, int WARPS_M_, int WARPS_N_, int WARPS_K_, int STAGES_, int RANKS_ = 1>
struct Shape {
    static constexpr int M_TILE = M_TILE_, N_TILE = N_TILE_, K_TILE = K_TILE_, STAGES = STAGES_;
    static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, WARPS_K = WARPS_K_;
    static constexpr int THREADS = WARPS_M * WARPS_N * WARPS_K * 32;
    static constexpr int MT = M_TILE / WARPS_M / 16, NT = N_TILE / WARPS_N / 8;  // mma tiles of a warp
    static constexpr int X_BYTES = M_TILE * K_TILE * 2, STAGE_BYTES = X_BYTES + N_TILE * K_TILE * 2;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
    static_assert(NT % 2 == 0 && K_TILE / 16 % WARPS_K == 0 && K_TILE % 64 == 0);
    // Blocks of a cluster that share K, as do the warps of theirs.
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

// One stage: this warp's share of its steps of 16 k.
template <class S>
__device__ __forceinline__ void multiply_stage(float (&c)[S::MT][S::NT][4], u32 at, int m, int n, int group, int lane) {
    const int row = lane & 15, half = lane >> 4;
    const int column = (lane & 7) + ((lane >> 4) << 3), part = lane >> 3 & 1;
#pragma unroll
    for (int i = 0; i < S::K_TILE / 16 / S::WARPS_K; ++i) {
        const int piece = 2 * (i * S::WARPS_K + group);
        u32 a[S::MT][4], b[S::NT / 2][4];
#pragma unroll
        for (int t = 0; t < S::MT; ++t) ldmatrix_x4(a[t], at + place<S::K_TILE>(m + 16 * t + row, piece + half));
#pragma unroll
        for (int t = 0; t < S::NT / 2; ++t)
            ldmatrix_x4(b[t], at + S::X_BYTES + place<S::K_TILE>(n + 16 * t + column, piece + part));
#pragma unroll
        for (int t = 0; t < S::MT; ++t)
#pragma unroll
            for (int u = 0; u < S::NT; ++u)
                mma_16x8x16(c[t][u], a[t], b[u / 2][2 * (u & 1)], b[u / 2][2 * (u & 1) + 1]);
    }
}

// Two neighbouring results of a row.
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
__device__ __forceinline__ void meet() {
    if constexpr (RANKS > 1) cluster_sync();
    else __syncthreads();
}
__device__ __forceinline__ float2 plus(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float2 pair_of_rank(const float2* p, int rank) {
    return make_float2(dsmem_load(&p->x, rank), dsmem_load(&p->y, rank));
}

// Tiles of 8 neighbours along M take their turn together, so that what they share stays in L2.
__device__ __forceinline__ void tile_of_block(int block, int tiles_m, int tiles_n, int& m, int& n) {
    constexpr int TOGETHER = 8;
    const int group = block / (TOGETHER * tiles_n), rest = block % (TOGETHER * tiles_n);
    const int rows = min(TOGETHER, tiles_m - group * TOGETHER);
    m = group * TOGETHER + rest % rows;
    n = rest / rows;
}

template <class S>
__device__ __forceinline__ void gemm_tile(const bf16* x, const bf16* weight, bf16* out, int x_stride, int M, int N,
                                          int K) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int group = warp / (S::WARPS_M * S::WARPS_N), inside = warp % (S::WARPS_M * S::WARPS_N);
    const int m = inside / S::WARPS_N * (16 * S::MT), n = inside % S::WARPS_N * (8 * S::NT);
    int tile_m, tile_n;
    tile_of_block(
        blockIdx.x / S::RANKS, (M + S::M_TILE - 1) / S::M_TILE, (N + S::N_TILE - 1) / S::N_TILE, tile_m, tile_n);
    const int m0 = tile_m * S::M_TILE, n0 = tile_n * S::N_TILE, all_steps = (K + S::K_TILE - 1) / S::K_TILE;
    const int rank = blockIdx.x % S::RANKS, each = (all_steps + S::RANKS - 1) / S::RANKS,
              first = min(rank * each, all_steps);
    const int steps = min(each, all_steps - first);
    pdl_launch_dependents();
    pdl_wait();

    // Stage 1: the products, stage by stage.
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
        multiply_stage<S>(c, shared + (step % S::STAGES) * S::STAGE_BYTES, m, n, group, lane);
    }

    // Stage 2: results, where warps share K after a sum over them in rising order.
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
        float2* const parts = reinterpret_cast<float2*>(memory);  // [WARPS_K][M_TILE][N_TILE / 2]
        cp_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < S::MT; ++i)
#pragma unroll
            for (int j = 0; j < S::NT; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    parts[(group * S::M_TILE + m + 16 * i + 8 * h + g) * (S::N_TILE / 2) + (n + 8 * j) / 2 + t] =
                        make_float2(c[i][j][2 * h], c[i][j][2 * h + 1]);
        __syncthreads();
        constexpr int PAIRS = S::M_TILE * S::N_TILE / 2;
        for (int i = threadIdx.x; i < PAIRS; i += S::THREADS) {
            float2 sum = parts[i];
#pragma unroll
            for (int w = 1; w < S::WARPS_K; ++w) sum = plus(sum, parts[w * PAIRS + i]);
            parts[i] = sum;
        }
        // Stage 3: each block stores a share of the rows, summed over the cluster in rising order.
        meet<S::RANKS>();
        for (int i = rank * (PAIRS / S::RANKS) + threadIdx.x; i < (rank + 1) * (PAIRS / S::RANKS); i += S::THREADS) {
            float2 sum = S::RANKS > 1 ? pair_of_rank(parts + i, 0) : parts[i];
#pragma unroll
            for (int r = 1; r < S::RANKS; ++r) sum = plus(sum, pair_of_rank(parts + i, r));
            store_pair(out, m0 + i / (S::N_TILE / 2), n0 + i % (S::N_TILE / 2) * 2, sum.x, sum.y, M, N);
        }
        if (S::RANKS > 1) meet<S::RANKS>();  // nobody leaves while others read its shared memory
    }
}

#if __CUDA_ARCH__ >= 900
constexpr int SPREAD = 4;
#define SPREAD_CLUSTER __cluster_dims__(SPREAD, 1, 1)
#else
constexpr int SPREAD = 1;
#define SPREAD_CLUSTER
#endif
using Narrow = Shape<32, 64, 128, 1, 1, 8, 4>;
using Spread = Shape<32, 64, 128, 1, 1, 8, 4, SPREAD>;
using Wide = Shape<128, 128, 64, 2, 4, 1, 3>;
// What every architecture has a block: 99 KB on 8.6, 8.9 and 12.x. Two blocks an SM on 9.0 and 10.0.
constexpr int SHARED_BYTES = 96 * 1024;
static_assert(Narrow::SHARED_BYTES == SHARED_BYTES && Wide::SHARED_BYTES == SHARED_BYTES);

#define DENSE_GEMM(NAME, SHAPE, CLUSTER)                                                       \
    extern "C" __global__ void CLUSTER __launch_bounds__(SHAPE::THREADS, 2) dense_gemm_##NAME( \
        const bf16* __restrict__ x,      /* [M, K], rows x_stride apart */                     \
        const bf16* __restrict__ weight, /* [N, K] */                                          \
        bf16* __restrict__ out,          /* [M, N] */                                          \
        int x_stride, int M, int N, int K) {                                                   \
        gemm_tile<SHAPE>(x, weight, out, x_stride, M, N, K);                                   \
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
