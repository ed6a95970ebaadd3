// Split-K GEMM with BF16 weights for sm_90a, for less than a wave of tiles (small M or small N):
// out[m, n] = BF16(sum_k x[m, k] * weight[n, k]). Launched by launch.py.
//
// The blocks of a cluster split K of one tile of 64 rows x FEATURES features, so that all multiprocessors load. A block
// has one consumer warpgroup (gemm_wgmma.cuh) and one producer thread, which copies x and weight into the stages by
// TMA. The partials of all blocks stay in shared memory; each block adds and stores some of the outputs over DSMEM.
//
// H200, us, 512 x 96 x 5120 with 8, 4 and 2 blocks a tile: 7.6, 7.4, 10.5; tiles of 128 features 7.5, 9.5, 14.7; of 128
// rows 7.9, 9.6, 14.6. 2048 x 256 x 2048 with 4, 2 and 1 blocks: 17.8, 9.8, 10.8; gemm_wgmma.cuh 8.9. Large N is slower
// than with gemm_wgmma.cuh: 64 x 6144 x 5120 at best 21.7.
//
// Numerics: FP32 accumulation, k rising in steps of 16 within a slice, slices added in rising order, one rounding. The
// order depends on K and the cluster size, never on other rows or the position of a row in its tile.
#pragma once
#include "async_copy.cuh"
#include "cluster.cuh"
#include "gemm_wgmma.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

template <int FEATURES_, int STAGES_>
struct SplitKConfig {
    static constexpr int CONSUMERS = 1, FEATURES = FEATURES_, STAGES = STAGES_, ROWS = 64, K_TILE = 64;
    static constexpr int CONSUMER_THREADS = 128, THREADS = CONSUMER_THREADS + 32;
    static constexpr int X_BYTES = ROWS * K_TILE * 2, STAGE_BYTES = X_BYTES + FEATURES * K_TILE * 2;
    static constexpr int BARRIERS_OFFSET = STAGES * STAGE_BYTES, SHARED_BYTES = BARRIERS_OFFSET + STAGES * 16 + 1024;
    static constexpr int WIDTH = FEATURES + 8;  // of a row of partials, padded against bank conflicts
    static_assert(ROWS * WIDTH * 4 <= BARRIERS_OFFSET, "the partials reuse the stages");
    static_assert(SHARED_BYTES <= 113 * 1024, "occupancy of two blocks a multiprocessor");
};
constexpr int MAX_RANKS = 8;  // of a cluster

// Stores four adjacent outputs of a row.
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
struct SplitKBlock {
    u32 base;
    TileSize size;
    int m0, n0, first, steps;  // origin of the tile, and the split-K slice in steps of K_TILE

    // The producer, one thread. The first weights are loaded before pdl_wait.
    __device__ __forceinline__ void produce(const TensorMap& x, const TensorMap& weight) const {
        TmaPipeline<F> pipeline{base};
        auto load_weight = [&](int step) {
            mbarrier_arrive_expect_tx(pipeline.full(), size.stage_bytes(F::K_TILE));
            tma_load_2d(pipeline.weight(), weight, (first + step) * F::K_TILE, n0, pipeline.full());
        };
#pragma unroll 1
        for (int step = 0; step < min(steps, F::STAGES); ++step, pipeline.next()) load_weight(step);
        pdl_wait();
        pipeline.stage = pipeline.phase = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, pipeline.next()) {
            if (step >= F::STAGES) {
                mbarrier_wait(pipeline.empty(pipeline.stage), pipeline.phase ^ 1);
                load_weight(step);
            }
            tma_load_2d(pipeline.x(), x, (first + step) * F::K_TILE, m0, pipeline.full());
        }
    }

    // The consumer's main loop. The partials go to shared memory, where the stages were.
    __device__ __forceinline__ void multiply(float* shared) const {
        WgmmaConsumer<F> consumer;
        consumer.pipeline = {base};
        consumer.group = 0;
        consumer.warp = threadIdx.x / 32;
        consumer.lane = threadIdx.x & 31;
        if (steps > 0) {
            consumer.accumulate(steps);
        } else {
#pragma unroll
            for (int j = 0; j < F::FEATURES / 2; ++j) consumer.sums[j] = 0.0f;
        }
        named_barrier_sync(1, 128);  // all warps have read the stages
        const int row = consumer.warp * 16 + consumer.lane / 4;
        float* const to = shared + row * F::WIDTH + consumer.lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < F::FEATURES / 8; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<float2*>(to + h * 8 * F::WIDTH + 8 * j) =
                    make_float2(consumer.sums[4 * j + 2 * h], consumer.sums[4 * j + 2 * h + 1]);
    }

    // The consumer's epilogue: adds the partials of all ranks for some of the outputs.
    __device__ __forceinline__ void store(__nv_bfloat16* out, int M, int N, int rank, int ranks) const {
        constexpr int ROW_VECTORS = F::FEATURES / 4, UNROLL = 2;
        const int count = min(size.rows, M - m0) * ROW_VECTORS, stride = ranks * F::CONSUMER_THREADS;
#pragma unroll 1
        for (int i = rank * F::CONSUMER_THREADS + threadIdx.x; i < count; i += UNROLL * stride) {
            float4 partials[UNROLL][MAX_RANKS];
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) {
                const int vector = min(i + j * stride, count - 1);
                const u32 address = base + (vector / ROW_VECTORS * F::WIDTH + vector % ROW_VECTORS * 4) * 4;
#pragma unroll
                for (int r = 0; r < MAX_RANKS; ++r)
                    if (r < ranks) partials[j][r] = dsmem_load_16(dsmem_address(address, r));
            }
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) {
                float4 sum = partials[j][0];
#pragma unroll
                for (int r = 1; r < MAX_RANKS; ++r) {
                    const float4& partial = partials[j][r];
                    if (r < ranks) sum.x += partial.x, sum.y += partial.y, sum.z += partial.z, sum.w += partial.w;
                }
                const int vector = i + j * stride, feature = vector % ROW_VECTORS * 4;
                if (vector < count && feature < size.features)
                    store_four(out, m0 + vector / ROW_VECTORS, n0 + feature, sum, N);
            }
        }
    }
};

template <class F>
__device__ __forceinline__ void split_k_gemm(const TensorMap& x, const TensorMap& weight, __nv_bfloat16* out, int M,
                                             int N, int K, int ranks, const TileSize& size) {
    extern __shared__ u8 raw[];
    const u32 unaligned = shared_address(raw), base = (unaligned + 1023) & ~1023u;
    const int rank = cluster_rank(), all_steps = (K + F::K_TILE - 1) / F::K_TILE,
              steps_per_rank = (all_steps + ranks - 1) / ranks;
    int m, n;
    tile_of_block(blockIdx.x / ranks, size.tiles_m(M), size.tiles_n(N), m, n);
    const int first = min(rank * steps_per_rank, all_steps);
    const SplitKBlock<F> block{
        base, size, m * size.rows, n * size.features, first, min(steps_per_rank, all_steps - first)};
    pdl_launch_dependents();
    if (threadIdx.x < F::STAGES) TmaPipeline<F>{base}.init(threadIdx.x);
    if (threadIdx.x == F::CONSUMER_THREADS) tma_prefetch_map(x), tma_prefetch_map(weight);
    __syncthreads();

    if (threadIdx.x >= F::CONSUMER_THREADS) {
        if (threadIdx.x == F::CONSUMER_THREADS) block.produce(x, weight);
        __syncwarp();
        cluster_sync();
    } else {
        pdl_wait();  // before the first store to out
        block.multiply(reinterpret_cast<float*>(raw + (base - unaligned)));
        cluster_sync();
        block.store(out, M, N, rank, ranks);
    }
    cluster_sync();  // other blocks may still read this block's partials
}

#define DENSE_SPLIT(NAME, FEATURES, STAGES)                                                                       \
    extern "C" __global__ void __launch_bounds__(SplitKConfig<FEATURES, STAGES>::THREADS, 2) dense_gemm_##NAME(   \
        const __grid_constant__ TensorMap x,      /* [M, K], boxes of tile_rows x 64 k, swizzled in 128 bytes */  \
        const __grid_constant__ TensorMap weight, /* [N, K], boxes of tile_features x 64 k, the same */           \
        __nv_bfloat16* out,                       /* [M, N] */                                                    \
        int M, int N, int K, int tile_rows, int tile_features, int ranks) { /* blocks of a cluster */             \
        split_k_gemm<SplitKConfig<FEATURES, STAGES>>(x, weight, out, M, N, K, ranks, {tile_rows, tile_features}); \
    }
