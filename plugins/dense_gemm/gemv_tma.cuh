// GEMV with BF16 weights for large N and 9 to 16 rows on sm_90a: warp-specialised, persistent, TMA. The bits are those
// of the large-N kernel of gemv_kernels.cuh. Launched by launch.py.
//
// 16 rows of x are as many bytes as 16 features of the weight: three tiles use one read of x. One producer thread
// copies blocks of 64 k of weight and x into a ring of shared memory stages by TMA. The 8 consumer warps split K and
// take the blocks in turn. The producer fills stages of the next tiles while the consumers run the epilogue. H200, 16 x
// 6144 x 5120, us: this 19.6, with two tiles 27.5, with one 35.6; loads to registers, one tile a warp 23.3, three 21.6;
// cp.async by the lanes, three tiles, a ring of 192 KB 54.
#pragma once
#include "async_copy.cuh"
#include "gemv_kernels.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

template <int NT_, int TILES_, int STAGES_>
struct GemvTmaConfig {
    static constexpr int NT = NT_, TILES = TILES_, STAGES = STAGES_, ROWS = NT * 8, FEATURES = TILES * TILE_N;
    static constexpr int X_OFFSET = FEATURES * BLOCK_K * 2, STAGE_BYTES = X_OFFSET + ROWS * BLOCK_K * 2;
    static constexpr int PARTIALS_OFFSET = STAGES * STAGE_BYTES, WIDTH = FEATURES + 4;  // padded against bank conflicts
    static constexpr int BARRIERS_OFFSET = PARTIALS_OFFSET + LargeN::WARPS * ROWS * WIDTH * 4,
                         THREADS = LargeN::THREADS + 32;
    static constexpr int SHARED_BYTES =
        BARRIERS_OFFSET + STAGES * 16 + 1024;  // the 128-byte swizzle needs 1024-byte alignment
    static_assert(X_OFFSET % 1024 == 0 && STAGE_BYTES % 1024 == 0 && SHARED_BYTES <= 227 * 1024);
};

// The stage of the count-th block of k that a thread block consumes.
template <class F>
struct PipelineStage {
    u32 base, count;

    __device__ __forceinline__ u32 stage() const { return count % F::STAGES; }
    __device__ __forceinline__ u32 phase() const { return count / F::STAGES & 1; }
    __device__ __forceinline__ u32 at() const { return base + stage() * F::STAGE_BYTES; }
    __device__ __forceinline__ u32 full() const { return base + F::BARRIERS_OFFSET + stage() * 8; }
    __device__ __forceinline__ u32 empty() const { return full() + F::STAGES * 8; }
};

template <class F>
__device__ __forceinline__ void gemv_tma_tiles(const TensorMap& weight, const TensorMap& x, __nv_bfloat16* out, int M,
                                               int N, int K) {
    constexpr int NT = F::NT;
    extern __shared__ u8 raw[];
    const u32 unaligned = shared_address(raw), base = (unaligned + 1023) & ~1023u;
    const int tiles = (N + F::FEATURES - 1) / F::FEATURES, blocks = (K + BLOCK_K - 1) / BLOCK_K;
    pdl_launch_dependents();
    if (threadIdx.x < F::STAGES) {
        const PipelineStage<F> stage{base, threadIdx.x};
        mbarrier_init(stage.full(), 1), mbarrier_init(stage.empty(), 1);
        mbarrier_fence_init();
    }
    if (threadIdx.x == LargeN::THREADS) tma_prefetch_map(weight), tma_prefetch_map(x);
    __syncthreads();

    if (threadIdx.x >= LargeN::THREADS) {
        if (threadIdx.x > LargeN::THREADS) return;
        // The producer. The first weights are loaded before pdl_wait.
        const u32 bytes = (F::FEATURES + M) * BLOCK_K * 2;  // boxes of x have M rows
        auto load_weight = [&](const PipelineStage<F>& stage, int tile, int block) {
            mbarrier_arrive_expect_tx(stage.full(), bytes);
            tma_load_2d(stage.at(), weight, block * BLOCK_K, tile * F::FEATURES, stage.full());
        };
        const int prefetched = min(blocks, F::STAGES);
#pragma unroll 1
        for (int block = 0; block < prefetched; ++block) load_weight({base, (u32)block}, blockIdx.x, block);
        pdl_wait();
        PipelineStage<F> stage{base, 0};
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
#pragma unroll 1
            for (int block = 0; block < blocks; ++block, ++stage.count) {
                if (stage.count >= F::STAGES) mbarrier_wait(stage.empty(), stage.phase() ^ 1);
                if (stage.count >= prefetched) load_weight(stage, tile, block);
                tma_load_2d(stage.at() + F::X_OFFSET, x, block * BLOCK_K, 0, stage.full());
            }
        return;
    }

    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2,
              t = lane & 3;
    const u32 low = g * 128 + ((2 * t ^ g) << 4),
              high = g * 128 + ((2 * t + 1 ^ g) << 4);  // swizzled offsets of 8 k of row g each
    float (*const partials)[F::ROWS][F::WIDTH] =
        reinterpret_cast<float (*)[F::ROWS][F::WIDTH]>(raw + (base - unaligned) + F::PARTIALS_OFFSET);
    auto barrier = [] { named_barrier_sync(1, LargeN::THREADS); };
    pdl_wait();           // before the first store to out
    u32 first_block = 0;  // of this tile, counted over all tiles
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, first_block += blocks) {
        // Main loop: split-K, each warp sums its blocks of k.
        float c[F::TILES][4][NT][4] = {};
#pragma unroll 1
        for (int block = warp; block < blocks; block += LargeN::WARPS) {
            const PipelineStage<F> stage{base, first_block + block};
            mbarrier_wait(stage.full(), stage.phase());
            uint4 xs[NT][2];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                xs[n][0] = load_shared_16(stage.at() + F::X_OFFSET + n * 1024 + low);
                xs[n][1] = load_shared_16(stage.at() + F::X_OFFSET + n * 1024 + high);
            }
#pragma unroll
            for (int j = 0; j < F::TILES; ++j) {
                const u32 at = stage.at() + j * 2048;
                const Rows16 w = {{load_shared_16(at + low), load_shared_16(at + high)},
                                  {load_shared_16(at + 1024 + low), load_shared_16(at + 1024 + high)}};
                multiply<NT>(c[j], w, xs);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(stage.empty());
        }

        // Epilogue: add the partials of the warps, in rising order.
        barrier();  // the previous partials have been read
#pragma unroll
        for (int j = 0; j < F::TILES; ++j)
            store_partials<NT>(
                c[j], [&](int row, int column) -> float& { return partials[warp][row][j * TILE_N + column]; });
        barrier();
#pragma unroll 1
        for (int i = threadIdx.x; i < F::FEATURES * M; i += LargeN::THREADS) {
            const int row = i / F::FEATURES, column = i % F::FEATURES, n = tile * F::FEATURES + column;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < LargeN::WARPS; ++w) sum += partials[w][row][column];
            if (n < N) out[(size_t)row * N + n] = __float2bfloat16_rn(sum);
        }
    }
}

// Grid: one block a multiprocessor, at most one for each 48 features.
extern "C" __global__ void __launch_bounds__(GemvTmaConfig<2, 3, 24>::THREADS, 1) dense_gemv_m16_brought(
    const __grid_constant__ TensorMap weight,  // [N, K], boxes of 48 features x 64 k, swizzled in 128 bytes
    const __grid_constant__ TensorMap x,       // [M, K], boxes of M rows x 64 k, the same
    __nv_bfloat16* out,                        // [M, N]
    int M, int N, int K) {
    gemv_tma_tiles<GemvTmaConfig<2, 3, 24>>(weight, x, out, M, N, K);
}
