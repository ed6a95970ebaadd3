// The GEMV of BF16 weights (dense_gemv.cuh): kernels for up to 8 rows and up to 16, with the same bits for each row. Rows and
// features that are missing are read as the last ones; their results are not stored.
//
// ``many``: K is shared by the 8 warps of a block. x is loaded a block of k ahead: of a multiprocessor's few warps all would
// wait for it. H200, us, without / with: 16 x 4096 x 2048 7.8 / 6.9, 1 x 4096 x 2048 6.9 / 6.5. Grid: ceil(N / 16). More
// tiles than a device of sm_90a holds at a time, of 16 rows, are for dense_brought.cuh.
//
// ``few``: too few features for a device. K is shared by the 4 warps of each of the 8 blocks of a cluster (by 8 warps below
// sm_90); each block adds up some of the results of all, counted by an mbarrier: a barrier of the cluster would order all
// memory of the device, too. Such a kernel takes as long as one of its warps has instructions: nothing is cleared that is
// loaded, and all of K up to 6144 is on its way at once. Grid: ceil(N / 16) clusters, groups of rows.
// Figures (H200, us, one row and 16): 96 x 5120 2.33, 2.78; 64 x 2048 1.88, 2.16. With K shared by 4 blocks of 8 warps 2.71,
// 3.51; groups of 8 rows 2.33, 2.82; by bulk tensor copies 2.36, 2.80.
// Beside 2.53, 2.98 and, of 16 x 256 x 2048, 2.63 in another run: K shared by 5 warps a block 2.47, 2.88, 2.72; by 8 2.59,
// 3.21, 2.96; by 10 2.42, 2.90, 3.26; lanes that have two runs of 8 k, so that a load takes whole sectors, 2.53, 2.91, 2.63.
#pragma once
#include "cluster.cuh"
#include "dense_gemv.cuh"

#if __CUDA_ARCH__ >= 900
#define FEW_CLUSTER __cluster_dims__(Few::RANKS, 1, 1)
#else
#define FEW_CLUSTER
#endif

constexpr int WIDTH = TILE_N + 4;  // of a row of sums, so that lanes meet no bank twice

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

template <int NT>
__device__ __forceinline__ void few_tile(const __nv_bfloat16* __restrict__ weight, const __nv_bfloat16* x,
                                         __nv_bfloat16* __restrict__ out, int x_stride, int all_rows, int N, int K) {
    constexpr int ROWS = NT * 8, STEP = Few::RANKS * Few::WARPS * BLOCK_K, STEP_BYTES = STEP * 2;
    __shared__ __align__(16) float partial[Few::WARPS][ROWS][WIDTH];
    __shared__ __align__(16) float4 of_rank[Few::RANKS][ROWS * TILE_N / 4 / Few::RANKS];
    __shared__ Arrival arrival;
    allow_next_launch();
#if __CUDA_ARCH__ >= 900
    const int rank = cluster_rank();
#else
    const int rank = 0;
#endif
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);
    const int n0 = blockIdx.x / Few::RANKS * TILE_N, m0 = blockIdx.y * ROWS, M = min(ROWS, all_rows - m0);
    const int first = (rank * Few::WARPS + warp) * BLOCK_K, k = first + t * 16;
    const int rounds = (K - first + STEP - 1) / STEP;  // of this warp

    // Stage 1: each warp sums its share of K.
    auto feature = [&](int n) { return reinterpret_cast<const u8*>(weight + (size_t)min(n0 + n, N - 1) * K + k); };
    const u8 *const low = feature(g), *const high = feature(g + 8);
    Rows16 ring[Few::DEPTH];
#pragma unroll
    for (int d = 0; d < Few::DEPTH; ++d)
        if (k + d * STEP < K) ring[d] = load_features(low + d * STEP_BYTES, high + d * STEP_BYTES);
    // Four results each are a piece; a rank has every RANKS-th.
    const int pieces = M * (TILE_N / 4), own = (pieces - rank + Few::RANKS - 1) / Few::RANKS;
    if (Few::RANKS > 1) {
        if (threadIdx.x == 0) begin_arrival(&arrival);
        __syncwarp();
        cluster_arrive_relaxed();
    }
    const u8* rows[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n)
        rows[n] = reinterpret_cast<const u8*>(x + (size_t)min(m0 + n * 8 + g, all_rows - 1) * x_stride + k);
    wait_for_previous_launch();
    uint4 xs[Few::DEPTH][NT][2];
    auto load_x = [&](int d, int round) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const uint4* p = reinterpret_cast<const uint4*>(rows[n] + round * STEP_BYTES);
            xs[d][n][0] = load_now(p), xs[d][n][1] = load_now(p + 1);
        }
    };
#pragma unroll
    for (int d = 0; d < Few::DEPTH; ++d)
        if (k + d * STEP < K) load_x(d, d);
    float c[4][NT][4] = {};
    auto multiply_round = [&](int d, int round) {
        if (K % BLOCK_K != 0) {  // of the last block some lanes have no k
            asm volatile("");    // a branch: most K have whole blocks
            if (k + round * STEP >= K) {
                ring[d] = Rows16{};
#pragma unroll
                for (int n = 0; n < NT; ++n) xs[d][n][0] = xs[d][n][1] = make_uint4(0, 0, 0, 0);
            }
            __syncwarp();
        }
        multiply<NT>(c, ring[d], xs[d]);
    };
#pragma unroll
    for (int d = 0; d < Few::DEPTH; ++d)
        if (d < rounds) multiply_round(d, d);
#pragma unroll 1
    for (int round = Few::DEPTH; round < rounds; ++round) {
        if (k + round * STEP < K) {
            ring[0] = load_features(low + round * STEP_BYTES, high + round * STEP_BYTES);
            load_x(0, round);
        }
        multiply_round(0, round);
    }
    put_sums<NT>(c, [&](int row, int column) -> float& { return partial[warp][row][column]; });

    // Stage 2: sums over the warps of a rank, in rising order.
    __syncthreads();
    // Only here, behind the barrier: racecheck takes it for a race with the beginning of the arrival, else.
    if (Few::RANKS > 1 && threadIdx.x == 0) announce_bytes(&arrival, Few::RANKS * own * (u32)sizeof(float4));
    auto sum_of = [&](int piece) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < Few::WARPS; ++w) {
            const float4 one = *reinterpret_cast<const float4*>(&partial[w][piece / 4][piece % 4 * 4]);
            sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        return sum;
    };
    auto store = [&](int piece, int i, float value) {
        const int row = m0 + piece / 4, n = n0 + piece % 4 * 4 + i;
        if (n < N) out[(size_t)row * N + n] = __float2bfloat16_rn(value);
    };
    if (Few::RANKS > 1) cluster_wait();  // all blocks have begun
#pragma unroll 1
    for (int piece = threadIdx.x; piece < pieces; piece += Few::THREADS) {
        const float4 sum = sum_of(piece);
        if (Few::RANKS > 1) {
            store_to_rank(&of_rank[rank][piece / Few::RANKS], sum, &arrival, piece % Few::RANKS);
        } else {
            store(piece, 0, sum.x), store(piece, 1, sum.y), store(piece, 2, sum.z), store(piece, 3, sum.w);
        }
    }

    // Stage 3: sums over ranks, in rising order.
    if (Few::RANKS == 1 || (int)threadIdx.x >= own * 4) return;
    await_bytes(&arrival);
#pragma unroll 1
    for (int i = threadIdx.x; i < own * 4; i += Few::THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < Few::RANKS; ++r) sum += reinterpret_cast<const float*>(of_rank[r])[i];
        store(i / 4 * Few::RANKS + rank, i % 4, sum);
    }
}

template <int NT>
__device__ __forceinline__ void many_tile(const __nv_bfloat16* __restrict__ weight, const __nv_bfloat16* x,
                                          __nv_bfloat16* __restrict__ out, int x_stride, int M, int N, int K) {
    constexpr int DEPTH = Many::DEPTH, STEP = Many::WARPS * BLOCK_K;
    __shared__ float partial[Many::WARPS][NT * 8][WIDTH];
    allow_next_launch();
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
    wait_for_previous_launch();
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

#define DENSE_GEMV(NAME, TILE, BOUNDS)                                               \
    extern "C" __global__ void BOUNDS dense_gemv_##NAME(                             \
        const __nv_bfloat16* __restrict__ weight, /* [N, K] */                       \
        const __nv_bfloat16* x,                   /* [M, K], rows x_stride apart */  \
        __nv_bfloat16* __restrict__ out,          /* [M, N] */                       \
        int x_stride, int M, int N, int K) {                                         \
        TILE(weight, x, out, x_stride, M, N, K);                                     \
    }
#define FEW_BOUNDS FEW_CLUSTER __launch_bounds__(Few::THREADS, 2)
#define MANY_BOUNDS(BLOCKS) __launch_bounds__(Many::THREADS, BLOCKS)

DENSE_GEMV(few_m8, few_tile<1>, FEW_BOUNDS)
DENSE_GEMV(few_m16, few_tile<2>, FEW_BOUNDS)
DENSE_GEMV(m8, many_tile<1>, MANY_BOUNDS(3))
DENSE_GEMV(m16, many_tile<2>, MANY_BOUNDS(2))
