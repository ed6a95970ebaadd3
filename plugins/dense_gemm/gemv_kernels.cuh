// GEMV with BF16 weights (dense_gemv.cuh): entry points for up to 8 and up to 16 rows, or for tiles of 8 and of 16
// features, with the same bits for each row. Launched by launch.py. sm_80 and newer.
//
// Rows and features beyond the matrices read the last row or feature, and are not stored.
//
// Large N (m8, m16): split-K over the 8 warps of a block. x is loaded one block of k ahead of its use: at this
// occupancy all warps would wait for it. H200, us, without / with: 16 x 4096 x 2048 7.8 / 6.9, 1 x 4096 x 2048 6.9 /
// 6.5. Grid: ceil(N / 16). On sm_90a, 9 to 16 rows with more than a wave of tiles use gemv_tma.cuh.
//
// Small N (few_n8, few_n16, few_any): fewer tiles than multiprocessors. Split-K over the 8 blocks of a cluster and
// their 4 warps (below sm_90 over 8 warps). Each block reduces some of the rows; its mbarrier counts the partials of
// the other blocks. A cluster barrier instead would order all memory of the device.
//   - The run time is the latency of one warp. All loads of K are in flight at once: whole blocks of 64 k up to 6144.
//     Other K use few_any, whose loop makes ptxas consume the first rows before it issues the last loads
//     (16 x 96 x 5120: 2.80 us instead of 2.60).
//   - x is the A operand, so that a tile may have 8 features: half of the weight bytes a multiprocessor, and as many
//     instructions for 16 rows as for one. The choice of the A operand does not change the bits.
// Grid: (ceil(N / features of a tile) clusters, groups of 16 rows). H200, us, 16 x 96 x 5120: the weight as A 2.77, x
// as A 2.29. Slower, in a run with 3.10 and 2.60: a partial to a separate address each, +0.15; x loaded before the
// weight, -0.05 alone and +0.5 with PDL; two branches with a pdl_wait each, +0.5; two runs of 8 k a lane, -0.03 with
// other bits. No gain: clusters of 16, 8 warps a block, prefetch of x or weight into L2, spinning on the mbarrier,
// partials of single warps.
#pragma once
#include "cluster.cuh"
#include "dense_gemv.cuh"
#include "global_memory.cuh"
#include "mbarrier.cuh"
#include "opaque.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

#if __CUDA_ARCH__ >= 900
#define SMALL_N_CLUSTER __cluster_dims__(SmallN::RANKS, 1, 1)
#else
#define SMALL_N_CLUSTER
#endif

constexpr int WIDTH = TILE_N + 4;  // of a row of partials, padded against bank conflicts

// Keeps the compiler from recomputing an address.
__device__ __forceinline__ const uint4* opaque_address(const __nv_bfloat16* p) {
    make_opaque(p);
    return reinterpret_cast<const uint4*>(p);
}

__device__ __forceinline__ Rows16 load_features(const u8* low, const u8* high) {
    Rows16 v;
    v.low[0] = load_codes_now(low), v.low[1] = load_codes_now(low + 16);
    v.high[0] = load_codes_now(high), v.high[1] = load_codes_now(high + 16);
    return v;
}

// Stores the sums of a lane. ``at(row, feature)`` is the element of a row and one of 16 features.
template <int NT, class At>
__device__ __forceinline__ void store_partials(const float (&c)[4][NT][4], At at) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            at(n * 8 + 2 * t + (i & 1), g + 8 * (i >> 1)) = (c[0][n][i] + c[1][n][i]) + (c[2][n][i] + c[3][n][i]);
}

template <int GROUPS, bool IS_ANY>
__device__ __forceinline__ void small_n_tile(const __nv_bfloat16* __restrict__ weight, const __nv_bfloat16* x,
                                             __nv_bfloat16* __restrict__ out, int x_stride, int all_rows, int N,
                                             int K) {
    constexpr int ROWS = 16, FEATURES = GROUPS * 8, RANKS = SmallN::RANKS, DEPTH = SmallN::DEPTH,
                  ROWS_PER_RANK = ROWS / RANKS;
    constexpr int STEP = RANKS * SmallN::WARPS * BLOCK_K, ROUND_VECTORS = STEP / 8;
    constexpr bool HAS_RANKS = RANKS > 1, HAS_MORE = IS_ANY || !HAS_RANKS;      // K than the loads in flight cover
    __shared__ __align__(16) float partial[SmallN::WARPS][ROWS][FEATURES + 4];  // padded against bank conflicts
    __shared__ float rank_partials[RANKS][ROWS_PER_RANK * FEATURES];
    __shared__ Mbarrier mbarrier;
    pdl_launch_dependents();
    const int rank = cluster_rank();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int n0 = blockIdx.x / RANKS * FEATURES, m0 = blockIdx.y * ROWS, rows = min(ROWS, all_rows - m0);
    const int first = (rank * SmallN::WARPS + warp) * BLOCK_K, k = first + t * 16;

    // Stage 1: split-K, each warp sums its blocks of k. Without opaque addresses each load would compute its own.
    const uint4* features[GROUPS];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) features[n] = opaque_address(weight + (size_t)min(n0 + n * 8 + g, N - 1) * K + k);
    auto load_weights = [&](uint4(&to)[GROUPS][2], int round) {
#pragma unroll
        for (int n = 0; n < GROUPS; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) to[n][i] = load_now(features[n] + round * ROUND_VECTORS + i);
    };
    auto load_half = [&](uint4(&to)[2], const uint4* from, int round) {
#pragma unroll
        for (int i = 0; i < 2; ++i) to[i] = load_now(from + round * ROUND_VECTORS + i);
    };
    auto is_whole = [&](int round) { return first + round * STEP + BLOCK_K <= K; };
    uint4 ws[DEPTH][GROUPS][2];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (is_whole(d)) load_weights(ws[d], d);
    if (HAS_RANKS) {
        if (threadIdx.x == 0) mbarrier_init(shared_address(&mbarrier), 1), mbarrier_fence_init();
        __syncwarp();
        cluster_arrive_relaxed();
    }
    pdl_wait();
    auto row = [&](int m) { return opaque_address(x + (size_t)(m0 + min(m, rows - 1)) * x_stride + k); };
    const uint4 *const low = row(g), *const high = row(g + 8);
    Rows16 xs[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (is_whole(d)) load_half(xs[d].low, low, d);
    if (rows > 8) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (is_whole(d)) load_half(xs[d].high, high, d);
    }
    if (HAS_RANKS) cluster_wait();  // all blocks of the cluster have started
    float c[4][GROUPS][4] = {};
    int round = 0;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (is_whole(d)) multiply<GROUPS>(c, xs[d], ws[d]), ++round;
    if constexpr (HAS_MORE) {
#pragma unroll 1
        for (; first + round * STEP < K; ++round) {  // in the last block some lanes may be beyond K
            Rows16 a = {};
            uint4 b[GROUPS][2] = {};
            if (k + round * STEP < K) {
                load_weights(b, round);
                load_half(a.low, low, round);
                if (rows > 8) load_half(a.high, high, round);
            }
            __syncwarp();
            multiply<GROUPS>(c, a, b);
        }
    }
    store_partials<GROUPS>(c, [&](int feature, int m) -> float& { return partial[warp][m][feature]; });

    // Stage 2: add the partials of the warps of a rank, in rising order. A rank reduces ROWS_PER_RANK adjacent rows, so
    // that stores to it coalesce.
    __syncthreads();
    auto store = [&](u32 m, u32 feature, float value) {
        if (n0 + (int)feature < N) out[(size_t)(m0 + m) * N + n0 + feature] = __float2bfloat16_rn(value);
    };
#pragma unroll
    for (u32 j = 0; j < ROWS * FEATURES; j += SmallN::THREADS) {
        const u32 i = j + threadIdx.x, m = i / FEATURES, feature = i % FEATURES;
        if (i >= rows * FEATURES) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < SmallN::WARPS; ++w) sum += partial[w][m][feature];
        if (HAS_RANKS)
            dsmem_store_async(&rank_partials[rank][i % (ROWS_PER_RANK * FEATURES)], sum, &mbarrier, m / ROWS_PER_RANK);
        else store(m, feature, sum);
    }
    const int count = min(rows - rank * ROWS_PER_RANK, ROWS_PER_RANK) * FEATURES;  // none if negative
    if (!HAS_RANKS || (int)threadIdx.x >= count) return;
    // After the barrier: compute-sanitizer's racecheck reports a race with mbarrier_init otherwise.
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared_address(&mbarrier), count * RANKS * (u32)sizeof(float));

    // Stage 3: add the partials of the ranks, in rising order.
    dsmem_wait(&mbarrier);
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) sum += rank_partials[r][threadIdx.x];
    store(rank * ROWS_PER_RANK + threadIdx.x / FEATURES, threadIdx.x % FEATURES, sum);
}

template <int NT>
__device__ __forceinline__ void large_n_tile(const __nv_bfloat16* __restrict__ weight, const __nv_bfloat16* x,
                                             __nv_bfloat16* __restrict__ out, int x_stride, int M, int N, int K) {
    constexpr int DEPTH = LargeN::DEPTH, STEP = LargeN::WARPS * BLOCK_K;
    __shared__ float partial[LargeN::WARPS][NT * 8][WIDTH];
    pdl_launch_dependents();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int n0 = blockIdx.x * TILE_N, first = warp * BLOCK_K + t * 16;

    // Stage 1: split-K, each warp sums its blocks of k, with DEPTH blocks of the weight in flight and one fewer of x.
    const u8* at[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) at[h] = reinterpret_cast<const u8*>(weight + (size_t)min(n0 + h * 8 + g, N - 1) * K);
    auto load = [&](int k) { return k < K ? load_features(at[0] + 2 * k, at[1] + 2 * k) : Rows16{}; };
    // Row addresses in registers or recomputed, H200, us: 1 x 6144 x 5120 17.8 / 18.1, 16 x 4096 x 2048 7.7 / 6.9.
    const u8* const row = reinterpret_cast<const u8*>(x + (size_t)min(g, M - 1) * x_stride);
    auto load_x = [&](uint4(&v)[NT][2], int k) {
        if constexpr (NT == 1) {
            const uint4* p = reinterpret_cast<const uint4*>(row + 2 * k);
            v[0][0] = v[0][1] = make_uint4(0, 0, 0, 0);
            if (k < K) v[0][0] = load_now(p), v[0][1] = load_now(p + 1);
        } else {
            load_rows<NT>(v, x, x_stride, M, K, g, k);
        }
    };
    Rows16 weights[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) weights[d] = load(first + d * STEP);
    pdl_wait();
    constexpr int X_IN_FLIGHT = DEPTH - 1;
    uint4 xs[DEPTH][NT][2];
#pragma unroll
    for (int d = 0; d < X_IN_FLIGHT; ++d) load_x(xs[d], first + d * STEP);
    float c[4][NT][4] = {};
#pragma unroll 1
    for (int k = first; k < K + t * 16; k += DEPTH * STEP) {  // warp-uniform trip count
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            load_x(xs[(d + X_IN_FLIGHT) % DEPTH], k + (d + X_IN_FLIGHT) * STEP);
            multiply<NT>(c, weights[d], xs[d]);
            weights[d] = load(k + (DEPTH + d) * STEP);
        }
    }
    store_partials<NT>(c, [&](int row, int column) -> float& { return partial[warp][row][column]; });

    // Stage 2: add the partials of the warps, in rising order.
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_N * M; i += LargeN::THREADS) {
        const int row = i / TILE_N, column = i % TILE_N;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < LargeN::WARPS; ++w) sum += partial[w][row][column];
        if (n0 + column < N) out[(size_t)row * N + n0 + column] = __float2bfloat16_rn(sum);
    }
}

#define DENSE_GEMV(NAME, TILE, BOUNDS)                                              \
    extern "C" __global__ void BOUNDS dense_gemv_##NAME(                            \
        const __nv_bfloat16* __restrict__ weight, /* [N, K] */                      \
        const __nv_bfloat16* x,                   /* [M, K], rows x_stride apart */ \
        __nv_bfloat16* __restrict__ out,          /* [M, N] */                      \
        int x_stride, int M, int N, int K) {                                        \
        TILE(weight, x, out, x_stride, M, N, K);                                    \
    }
#define SMALL_N_BOUNDS SMALL_N_CLUSTER __launch_bounds__(SmallN::THREADS, 2)
#define LARGE_N_BOUNDS(BLOCKS) __launch_bounds__(LargeN::THREADS, BLOCKS)

DENSE_GEMV(few_n8, (small_n_tile<1, false>), SMALL_N_BOUNDS)
DENSE_GEMV(few_n16, (small_n_tile<2, false>), SMALL_N_BOUNDS)
DENSE_GEMV(few_any, (small_n_tile<1, true>), SMALL_N_BOUNDS)
DENSE_GEMV(m8, large_n_tile<1>, LARGE_N_BOUNDS(3))
DENSE_GEMV(m16, large_n_tile<2>, LARGE_N_BOUNDS(2))
