// The GEMV of BF16 weights (dense_gemv.cuh): kernels for up to 8 rows and up to 16, or for tiles of 8 features and of
// 16, with the same bits for each row. Rows and features that are missing are read as the last ones, and not stored.
//
// ``many``: K is shared by the 8 warps of a block. x is loaded a block of k ahead: of a multiprocessor's few warps all
// would wait for it. H200, us, without / with: 16 x 4096 x 2048 7.8 / 6.9, 1 x 4096 x 2048 6.9 / 6.5. Grid: ceil(N /
// 16). More tiles than a device of sm_90a holds at a time, of 16 rows, are for dense_brought.cuh.
//
// ``few``: too few features for a device. K is shared by the 4 warps of each of the 8 blocks of a cluster (by 8 warps
// below sm_90); each block adds up some of the rows of all, counted by an mbarrier: a barrier of the cluster would
// order all memory of the device, too. Such a kernel takes as long as one of its warps has instructions: nothing is
// cleared that is loaded, and all of K is on its way at once: whole blocks, up to 6144, else ``any``, whose loop makes
// ptxas move what the first rows bring before the last are asked for (16 x 96 x 5120 2.80 us, 2.60 without). x is the A
// operand, so that a tile may be of 8 features: half of what a multiprocessor reads of the weight, and 16 rows take no
// more instructions than one. Which operand is which changes no bit. Grid: ceil(N / features of a tile) clusters,
// groups of 16 rows. Figures (H200, us), 16 x 96 x 5120: the weight as A 2.77, this 2.29. In a run where these are 3.10
// and 2.60: results that each go to a place of their own 0.15 more; x asked for before the weight 0.05 less, but 0.5
// more where launches overlap, as where lanes wait for the launch ahead in two branches; lanes that have two runs of 8
// k 0.03 less, with other bits. No gain: 16 blocks a cluster, 8 warps a block, x or the weight brought into L2 first,
// spinning for the mbarrier, warps that store to a rank without a block's sum.
#pragma once
#include "cluster.cuh"
#include "dense_gemv.cuh"
#include "global_memory.cuh"
#include "mbarrier.cuh"
#include "opaque.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

#if __CUDA_ARCH__ >= 900
#define FEW_CLUSTER __cluster_dims__(Few::RANKS, 1, 1)
#else
#define FEW_CLUSTER
#endif

constexpr int WIDTH = TILE_N + 4;  // of a row of sums of ``many``, so that lanes meet no bank twice

// An address that is added up once.
__device__ __forceinline__ const uint4* opaque(const __nv_bfloat16* p) {
    make_opaque(p);
    return reinterpret_cast<const uint4*>(p);
}

__device__ __forceinline__ Rows16 load_features(const u8* low, const u8* high) {
    Rows16 v;
    v.low[0] = load_codes_now(low), v.low[1] = load_codes_now(low + 16);
    v.high[0] = load_codes_now(high), v.high[1] = load_codes_now(high + 16);
    return v;
}

// A lane's sums go to the places of their rows and of 16 features.
template <int NT, class Place>
__device__ __forceinline__ void put_sums(const float (&c)[4][NT][4], Place place) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            place(n * 8 + 2 * t + (i & 1), g + 8 * (i >> 1)) = (c[0][n][i] + c[1][n][i]) + (c[2][n][i] + c[3][n][i]);
}

template <int GROUPS, bool IS_ANY>
__device__ __forceinline__ void few_tile(const __nv_bfloat16* __restrict__ weight, const __nv_bfloat16* x,
                                         __nv_bfloat16* __restrict__ out, int x_stride, int all_rows, int N, int K) {
    constexpr int ROWS = 16, FEATURES = GROUPS * 8, RANKS = Few::RANKS, DEPTH = Few::DEPTH, EACH = ROWS / RANKS;
    constexpr int STEP = RANKS * Few::WARPS * BLOCK_K, PIECES = STEP / 8;
    constexpr bool IS_SHARED = RANKS > 1, HAS_MORE = IS_ANY || !IS_SHARED;   // K than what is on its way at once
    __shared__ __align__(16) float partial[Few::WARPS][ROWS][FEATURES + 4];  // so that lanes meet no bank twice
    __shared__ float of_rank[RANKS][EACH * FEATURES];
    __shared__ Mbarrier mbarrier;
    pdl_launch_dependents();
    const int rank = cluster_rank();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int n0 = blockIdx.x / RANKS * FEATURES, m0 = blockIdx.y * ROWS, rows = min(ROWS, all_rows - m0);
    const int first = (rank * Few::WARPS + warp) * BLOCK_K, k = first + t * 16;

    // Stage 1: each warp sums its share of K. Addresses are opaque, else each load would add up its own.
    const uint4* features[GROUPS];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) features[n] = opaque(weight + (size_t)min(n0 + n * 8 + g, N - 1) * K + k);
    auto load_weights = [&](uint4(&to)[GROUPS][2], int round) {
#pragma unroll
        for (int n = 0; n < GROUPS; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) to[n][i] = load_now(features[n] + round * PIECES + i);
    };
    auto load_half = [&](uint4(&to)[2], const uint4* from, int round) {
#pragma unroll
        for (int i = 0; i < 2; ++i) to[i] = load_now(from + round * PIECES + i);
    };
    auto is_whole = [&](int round) { return first + round * STEP + BLOCK_K <= K; };
    uint4 ws[DEPTH][GROUPS][2];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (is_whole(d)) load_weights(ws[d], d);
    if (IS_SHARED) {
        if (threadIdx.x == 0) mbarrier_init(shared_address(&mbarrier), 1), mbarrier_fence_init();
        __syncwarp();
        cluster_arrive_relaxed();
    }
    pdl_wait();
    auto row = [&](int m) { return opaque(x + (size_t)(m0 + min(m, rows - 1)) * x_stride + k); };
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
    if (IS_SHARED) cluster_wait();  // all blocks have begun
    float c[4][GROUPS][4] = {};
    int round = 0;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (is_whole(d)) multiply<GROUPS>(c, xs[d], ws[d]), ++round;
    if constexpr (HAS_MORE) {
#pragma unroll 1
        for (; first + round * STEP < K; ++round) {  // in the last block some lanes may have no k
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
    put_sums<GROUPS>(c, [&](int feature, int m) -> float& { return partial[warp][m][feature]; });

    // Stage 2: sums over the warps of a rank, in rising order. A rank adds up the next EACH rows: stores of neighbours
    // to one rank travel together.
    __syncthreads();
    auto store = [&](u32 m, u32 feature, float value) {
        if (n0 + (int)feature < N) out[(size_t)(m0 + m) * N + n0 + feature] = __float2bfloat16_rn(value);
    };
#pragma unroll
    for (u32 j = 0; j < ROWS * FEATURES; j += Few::THREADS) {
        const u32 i = j + threadIdx.x, m = i / FEATURES, feature = i % FEATURES;
        if (i >= rows * FEATURES) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < Few::WARPS; ++w) sum += partial[w][m][feature];
        if (IS_SHARED) dsmem_store_async(&of_rank[rank][i % (EACH * FEATURES)], sum, &mbarrier, m / EACH);
        else store(m, feature, sum);
    }
    const int own = min(rows - rank * EACH, EACH) * FEATURES;  // none if negative
    if (!IS_SHARED || (int)threadIdx.x >= own) return;
    // Only here, behind the barrier: racecheck takes it for a race with the beginning of the arrival, else.
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared_address(&mbarrier), own * RANKS * (u32)sizeof(float));

    // Stage 3: sums over ranks, in rising order.
    dsmem_wait(&mbarrier);
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) sum += of_rank[r][threadIdx.x];
    store(rank * EACH + threadIdx.x / FEATURES, threadIdx.x % FEATURES, sum);
}

template <int NT>
__device__ __forceinline__ void many_tile(const __nv_bfloat16* __restrict__ weight, const __nv_bfloat16* x,
                                          __nv_bfloat16* __restrict__ out, int x_stride, int M, int N, int K) {
    constexpr int DEPTH = Many::DEPTH, STEP = Many::WARPS * BLOCK_K;
    __shared__ float partial[Many::WARPS][NT * 8][WIDTH];
    pdl_launch_dependents();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int n0 = blockIdx.x * TILE_N, first = warp * BLOCK_K + t * 16;

    // Stage 1: each warp sums its share of K, DEPTH blocks of the weight in flight, and of x one less.
    const u8* at[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) at[h] = reinterpret_cast<const u8*>(weight + (size_t)min(n0 + h * 8 + g, N - 1) * K);
    auto load = [&](int k) { return k < K ? load_features(at[0] + 2 * k, at[1] + 2 * k) : Rows16{}; };
    // H200, us, with the addresses of rows kept and without: 1 x 6144 x 5120 17.8, 18.1; 16 x 4096 x 2048 7.7, 6.9.
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
    Rows16 ring[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) ring[d] = load(first + d * STEP);
    pdl_wait();
    constexpr int AHEAD = DEPTH - 1;
    uint4 xs[DEPTH][NT][2];
#pragma unroll
    for (int d = 0; d < AHEAD; ++d) load_x(xs[d], first + d * STEP);
    float c[4][NT][4] = {};
#pragma unroll 1
    for (int k = first; k < K + t * 16; k += DEPTH * STEP) {  // the same number of rounds for all lanes of a warp
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            load_x(xs[(d + AHEAD) % DEPTH], k + (d + AHEAD) * STEP);
            multiply<NT>(c, ring[d], xs[d]);
            ring[d] = load(k + (DEPTH + d) * STEP);
        }
    }
    put_sums<NT>(c, [&](int row, int column) -> float& { return partial[warp][row][column]; });

    // Stage 2: sums over warps in rising order.
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_N * M; i += Many::THREADS) {
        const int row = i / TILE_N, column = i % TILE_N;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < Many::WARPS; ++w) sum += partial[w][row][column];
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
#define FEW_BOUNDS FEW_CLUSTER __launch_bounds__(Few::THREADS, 2)
#define MANY_BOUNDS(BLOCKS) __launch_bounds__(Many::THREADS, BLOCKS)

DENSE_GEMV(few_n8, (few_tile<1, false>), FEW_BOUNDS)
DENSE_GEMV(few_n16, (few_tile<2, false>), FEW_BOUNDS)
DENSE_GEMV(few_any, (few_tile<1, true>), FEW_BOUNDS)
DENSE_GEMV(m8, many_tile<1>, MANY_BOUNDS(3))
DENSE_GEMV(m16, many_tile<2>, MANY_BOUNDS(2))
