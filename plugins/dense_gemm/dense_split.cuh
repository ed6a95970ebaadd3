// Dense GEMM of few rows, or of few features, for sm_90a: out[m, n] = BF16(sum_k x[m, k] * weight[n, k]), both BF16.
//
// A tile of 64 rows and FEATURES features is multiplied by the blocks of a cluster, each over its share of K: so many
// blocks that all multiprocessors read. A block is a consumer (dense_wgmma.cuh) and a warp, of which one thread brings
// tiles of x and of the weight into a ring. In the end each block has its sums in shared memory, and stores some of the
// results of all.
//
// Figures (H200, us): 512 x 96 x 5120 of 8, 4 and 2 blocks a tile 7.6, 7.4, 10.5, tiles of 128 features 7.5, 9.5, 14.7,
// of 128 rows 7.9, 9.6, 14.6; 2048 x 256 x 2048 of 4, 2 and 1 blocks 17.8, 9.8, 10.8, and dense_wgmma.cuh 8.9. Where
// there are many features it lost to dense_wgmma.cuh: 64 x 6144 x 5120 at best 21.7.
//
// Numerics: FP32 accumulation, k rising in steps of 16 within a share, shares in rising order, one rounding: the order
// depends on K and on the number of blocks a cluster, never on the other rows or on where in a tile a row lies.
#pragma once
#include "async_copy.cuh"
#include "cluster.cuh"
#include "dense_wgmma.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

template <int FEATURES_, int STAGES_>
struct SplitForm {
    static constexpr int CONSUMERS = 1, FEATURES = FEATURES_, STAGES = STAGES_, ROWS = 64, K_TILE = 64;
    static constexpr int MULTIPLIERS = 128, THREADS = MULTIPLIERS + 32;
    static constexpr int X_BYTES = ROWS * K_TILE * 2, STAGE_BYTES = X_BYTES + FEATURES * K_TILE * 2;
    static constexpr int BARRIERS_AT = STAGES * STAGE_BYTES, SHARED_BYTES = BARRIERS_AT + STAGES * 16 + 1024;
    static constexpr int WIDTH = FEATURES + 8;  // of a row of sums, so that lanes meet no bank twice
    static_assert(ROWS * WIDTH * 4 <= BARRIERS_AT, "sums take the place of the ring");
    static_assert(SHARED_BYTES <= 113 * 1024, "two blocks a multiprocessor");
};
constexpr int MAX_RANKS = 8;  // of a cluster

// Four neighbouring results of a row.
__device__ __forceinline__ void store_four(__nv_bfloat16* out, int row, int column, float4 v, int N) {
    __nv_bfloat16* const to = out + (size_t)row * N + column;
    const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
    if (N % 4 == 0) {
        if (column < N)
            *reinterpret_cast<uint2*>(to) =
                make_uint2(*reinterpret_cast<const u32*>(&low), *reinterpret_cast<const u32*>(&high));
    } else {
        if (column < N) to[0] = low.x;
        if (column + 1 < N) to[1] = low.y;
        if (column + 2 < N) to[2] = high.x;
        if (column + 3 < N) to[3] = high.y;
    }
}

template <class F>
struct SplitBlock {
    u32 base;
    TileSize size;
    int m0, n0, first, steps;  // where the tile begins, and the share of K in steps of K_TILE

    // By one thread. Weights are under way before the launch ahead is waited for.
    __device__ __forceinline__ void bring(const TensorMap& x, const TensorMap& weight) const {
        WgmmaRing<F> ring{base};
        auto bring_weight = [&](int step) {
            mbarrier_arrive_expect_tx(ring.full(), size.stage_bytes(F::K_TILE));
            tma_load_2d(ring.weight(), weight, (first + step) * F::K_TILE, n0, ring.full());
        };
#pragma unroll 1
        for (int step = 0; step < min(steps, F::STAGES); ++step, ring.next()) bring_weight(step);
        pdl_wait();
        ring.stage = ring.phase = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.next()) {
            if (step >= F::STAGES) {
                mbarrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
                bring_weight(step);
            }
            tma_load_2d(ring.x(), x, (first + step) * F::K_TILE, m0, ring.full());
        }
    }

    // By the consumer: its sums, in the place of the ring.
    __device__ __forceinline__ void multiply(float* shared) const {
        WgmmaConsumer<F> consumer;
        consumer.ring = {base};
        consumer.group = 0;
        consumer.warp = threadIdx.x / 32;
        consumer.lane = threadIdx.x & 31;
        if (steps > 0) {
            consumer.accumulate(steps);
        } else {
#pragma unroll
            for (int j = 0; j < F::FEATURES / 2; ++j) consumer.sums[j] = 0.0f;
        }
        named_barrier_sync(1, 128);  // all have read the ring
        const int row = consumer.warp * 16 + consumer.lane / 4;
        float* const to = shared + row * F::WIDTH + consumer.lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < F::FEATURES / 8; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<float2*>(to + h * 8 * F::WIDTH + 8 * j) =
                    make_float2(consumer.sums[4 * j + 2 * h], consumer.sums[4 * j + 2 * h + 1]);
    }

    // By the consumer: this block's share of the results, summed over the cluster.
    __device__ __forceinline__ void store(__nv_bfloat16* out, int M, int N, int rank, int ranks) const {
        constexpr int PIECES = F::FEATURES / 4, TOGETHER = 2;
        const int count = min(size.rows, M - m0) * PIECES, stride = ranks * F::MULTIPLIERS;
#pragma unroll 1
        for (int i = rank * F::MULTIPLIERS + threadIdx.x; i < count; i += TOGETHER * stride) {
            float4 parts[TOGETHER][MAX_RANKS];
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
                const int piece = min(i + j * stride, count - 1);
                const u32 here = base + (piece / PIECES * F::WIDTH + piece % PIECES * 4) * 4;
#pragma unroll
                for (int r = 0; r < MAX_RANKS; ++r)
                    if (r < ranks) parts[j][r] = dsmem_load_16(dsmem_address(here, r));
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
                float4 sum = parts[j][0];
#pragma unroll
                for (int r = 1; r < MAX_RANKS; ++r) {
                    const float4& one = parts[j][r];
                    if (r < ranks) sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
                }
                const int piece = i + j * stride, feature = piece % PIECES * 4;
                if (piece < count && feature < size.features)
                    store_four(out, m0 + piece / PIECES, n0 + feature, sum, N);
            }
        }
    }
};

template <class F>
__device__ __forceinline__ void split_gemm(const TensorMap& x, const TensorMap& weight, __nv_bfloat16* out, int M,
                                           int N, int K, int ranks, const TileSize& size) {
    extern __shared__ u8 raw[];
    const u32 unaligned = shared_address(raw), base = (unaligned + 1023) & ~1023u;
    const int rank = cluster_rank(), all_steps = (K + F::K_TILE - 1) / F::K_TILE,
              each = (all_steps + ranks - 1) / ranks;
    int m, n;
    tile_of_block(blockIdx.x / ranks, size.across(M), size.along(N), m, n);
    const int first = min(rank * each, all_steps);
    const SplitBlock<F> block{base, size, m * size.rows, n * size.features, first, min(each, all_steps - first)};
    pdl_launch_dependents();
    if (threadIdx.x < F::STAGES) WgmmaRing<F>{base}.init(threadIdx.x);
    if (threadIdx.x == F::MULTIPLIERS) tma_prefetch_map(x), tma_prefetch_map(weight);
    __syncthreads();

    if (threadIdx.x >= F::MULTIPLIERS) {
        if (threadIdx.x == F::MULTIPLIERS) block.bring(x, weight);
        __syncwarp();
        cluster_sync();
    } else {
        pdl_wait();  // before out is touched
        block.multiply(reinterpret_cast<float*>(raw + (base - unaligned)));
        cluster_sync();
        block.store(out, M, N, rank, ranks);
    }
    cluster_sync();  // nobody leaves while others read its sums
}

#define DENSE_SPLIT(NAME, FEATURES, STAGES)                                                                      \
    extern "C" __global__ void __launch_bounds__(SplitForm<FEATURES, STAGES>::THREADS, 2) dense_gemm_##NAME(     \
        const __grid_constant__ TensorMap x,      /* [M, K], boxes of tile_rows x 64 k, swizzled in 128 bytes */ \
        const __grid_constant__ TensorMap weight, /* [N, K], boxes of tile_features x 64 k, the same */          \
        __nv_bfloat16* out,                       /* [M, N] */                                                   \
        int M, int N, int K, int tile_rows, int tile_features, int ranks) { /* blocks of a cluster */            \
        split_gemm<SplitForm<FEATURES, STAGES>>(x, weight, out, M, N, K, ranks, {tile_rows, tile_features});     \
    }
