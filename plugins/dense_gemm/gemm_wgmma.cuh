// Persistent, warp-specialised GEMM with BF16 weights for large M on sm_90a:
// out[m, n] = BF16(sum_k x[m, k] * weight[n, k]). Launched by launch.py.
//
// A block has one producer warpgroup, one thread of which copies tiles of x and weight into STAGES stages by TMA, and
// two consumer warpgroups with 64 rows x FEATURES features each: wgmma with both operands in shared memory. During the
// epilogue of a tile the producer already fills the stages of the next one.
//
// Tiles are equally large, and TMA boxes no larger than a tile: bytes of a box outside the matrix take longer than
// bytes inside. H200, 65 x 5120 x 5120, us: boxes of 128 rows 32.9, of 65 rows 18.4. The rest of a stage holds old
// data, whose products are not stored.
//
// Numerics: FP32 accumulation, k rising in steps of 16, one rounding: the order does not depend on M or N.
#pragma once
#include "async_copy.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

// Rows and features of a tile, at most those of its configuration; features are a multiple of 8.
struct TileSize {
    int rows, features;

    __device__ __forceinline__ u32 stage_bytes(int depth) const { return (rows + features) * depth * 2; }
    __device__ __forceinline__ int tiles_m(int M) const { return (M + rows - 1) / rows; }
    __device__ __forceinline__ int tiles_n(int N) const { return (N + features - 1) / features; }
};

template <int FEATURES_, int STAGES_>
struct WgmmaConfig {
    static constexpr int FEATURES = FEATURES_, STAGES = STAGES_, ROWS = 128, K_TILE = 64, CONSUMERS = 2;
    static constexpr int THREADS = 128 * (CONSUMERS + 1);
    static constexpr int X_BYTES = ROWS * K_TILE * 2, STAGE_BYTES = X_BYTES + FEATURES * K_TILE * 2;
    // The epilogue stages 16 rows x 64 features of a warp in shared memory at a time.
    static constexpr int OUT_FEATURES = 64, OUT_BYTES = 16 * OUT_FEATURES * 2;
    static constexpr int OUT_OFFSET = STAGES * STAGE_BYTES, BARRIERS_OFFSET = OUT_OFFSET + 4 * CONSUMERS * OUT_BYTES;
    static constexpr int SHARED_BYTES =
        BARRIERS_OFFSET + STAGES * 16 + 1024;  // the 128-byte swizzle needs 1024-byte alignment
    static_assert(SHARED_BYTES <= 227 * 1024, "over the shared memory of a block");
    // Registers a thread. All have 168 at launch; the producer hands most of its registers to the consumers
    // (setmaxnreg).
    static constexpr int PRODUCER = 40, CONSUMER = 232;
};

template <class F>
struct TmaPipeline {
    u32 base;
    u32 stage = 0, phase = 0;

    __device__ __forceinline__ u32 x() const { return base + stage * F::STAGE_BYTES; }
    __device__ __forceinline__ u32 weight() const { return x() + F::X_BYTES; }
    __device__ __forceinline__ u32 full() const { return base + F::BARRIERS_OFFSET + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage_index) const {
        return base + F::BARRIERS_OFFSET + (F::STAGES + stage_index) * 8;
    }
    __device__ __forceinline__ void next() {
        if (++stage == F::STAGES) stage = 0, phase ^= 1;
    }
    __device__ __forceinline__ void init(int i) const {
        mbarrier_init(base + F::BARRIERS_OFFSET + i * 8, 1);
        mbarrier_init(empty(i), F::CONSUMERS * 4);
        mbarrier_fence_init();
    }
};

template <class F>
struct WgmmaConsumer {
    TmaPipeline<F> pipeline;
    int group, warp, lane;
    float sums[F::FEATURES / 2];

    __device__ __forceinline__ void multiply_stage(u32 accumulate) {
        mbarrier_wait(pipeline.full(), pipeline.phase);
        const u64 a = wgmma_descriptor(pipeline.x() + group * 64 * F::K_TILE * 2),
                  b = wgmma_descriptor(pipeline.weight());
        wgmma_fence();
        WgmmaShared<F::FEATURES>::run(sums, a, b, accumulate);
        wgmma_commit();
    }
    __device__ __forceinline__ void release(u32 stage_index) const {
        if (lane == 0) mbarrier_arrive(pipeline.empty(stage_index));
    }
    // The main loop: one wgmma group in flight while the next stage is awaited.
    __device__ __forceinline__ void accumulate(int steps) {
        multiply_stage(0);
#pragma unroll 1
        for (int step = 1; step < steps; ++step) {
            const u32 previous = pipeline.stage;
            pipeline.next();
            multiply_stage(1);
            wgmma_wait<1>();
            release(previous);
        }
        wgmma_wait<0>();
        release(pipeline.stage);
        pipeline.next();
        wgmma_fence_operand(sums);
    }
    // The epilogue: 128 bytes of a row at a time. Rows and features from rows_end and features_end on are not stored.
    __device__ __forceinline__ void store(__nv_bfloat16* __restrict__ out, u8* staging, int m0, int n0, int rows_end,
                                          int features_end, int N) {
        u8* warp_staging = staging + (group * 4 + warp) * F::OUT_BYTES;
        const u32 staging_address = shared_address(warp_staging);
        const int m1 = m0 + group * 64 + warp * 16, row = (lane & 7) + (lane >> 3 & 1) * 8;
#pragma unroll
        for (int first = 0; first < F::FEATURES; first += F::OUT_FEATURES) {
            __syncwarp();  // the previous values have been read
#pragma unroll
            for (int pair = 0; pair < F::OUT_FEATURES / 16; ++pair) {
                // Four 8 x 8 matrices: rows 0..7 and 8..15 of 8 features, then of the next 8.
                const float* s = sums + first / 2 + pair * 8;
                u32 m[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const __nv_bfloat162 two = __floats2bfloat162_rn(s[2 * q], s[2 * q + 1]);
                    m[q] = *reinterpret_cast<const u32*>(&two);
                }
                const u32 to = staging_address + row * 128 + (((2 * pair + (lane >> 4)) ^ (row & 7)) << 4);
                stmatrix_x4(to, m);
            }
            __syncwarp();
#pragma unroll
            for (int pass = 0; pass < 4; ++pass) {
                const int at = pass * 4 + (lane >> 3), column = lane & 7, n = n0 + first + column * 8;
                const int rest = features_end - n;
                if (m1 + at >= rows_end || rest <= 0) continue;
                const u8* from = warp_staging + at * 128 + ((column ^ (at & 7)) << 4);
                __nv_bfloat16* to = out + (size_t)(m1 + at) * N + n;
                if (N % 8 == 0) {
                    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
                } else {
#pragma unroll 1
                    for (int e = 0; e < min(8, rest); ++e) to[e] = reinterpret_cast<const __nv_bfloat16*>(from)[e];
                }
            }
        }
    }
};

template <class F>
__device__ __forceinline__ void wgmma_gemm(const TensorMap& x, const TensorMap& weight, __nv_bfloat16* __restrict__ out,
                                           int M, int N, int K, const TileSize& size) {
    extern __shared__ u8 raw[];
    const u32 unaligned = shared_address(raw), base = (unaligned + 1023) & ~1023u;
    u8* const shared = raw + (base - unaligned);
    const int tiles_m = size.tiles_m(M), tiles_n = size.tiles_n(N);
    const int tiles = tiles_m * tiles_n, steps = (K + F::K_TILE - 1) / F::K_TILE;
    TmaPipeline<F> pipeline{base};
    pdl_launch_dependents();
    if (threadIdx.x < F::STAGES) pipeline.init(threadIdx.x);
    if (threadIdx.x == 128) tma_prefetch_map(x), tma_prefetch_map(weight);
    __syncthreads();

    if (threadIdx.x < 128) {  // the producer
        warpgroup_reg_dealloc<F::PRODUCER>();
        if (threadIdx.x) return;
        pdl_wait();
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            int m, n;
            tile_of_block(tile, tiles_m, tiles_n, m, n);
#pragma unroll 1
            for (int step = 0; step < steps; ++step, pipeline.next()) {
                mbarrier_wait(pipeline.empty(pipeline.stage), pipeline.phase ^ 1);
                mbarrier_arrive_expect_tx(pipeline.full(), size.stage_bytes(F::K_TILE));
                tma_load_2d(pipeline.x(), x, step * F::K_TILE, m * size.rows, pipeline.full());
                tma_load_2d(pipeline.weight(), weight, step * F::K_TILE, n * size.features, pipeline.full());
            }
        }
        return;
    }

    warpgroup_reg_alloc<F::CONSUMER>();
    WgmmaConsumer<F> consumer;
    consumer.pipeline = pipeline;
    consumer.group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);
    consumer.warp = (threadIdx.x / 32) & 3;
    consumer.lane = threadIdx.x & 31;
    pdl_wait();  // before the first store to out
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int m, n;
        tile_of_block(tile, tiles_m, tiles_n, m, n);
        consumer.accumulate(steps);
        const int m0 = m * size.rows, n0 = n * size.features;
        consumer.store(out, shared + F::OUT_OFFSET, m0, n0, min(M, m0 + size.rows), min(N, n0 + size.features), N);
    }
}

#define DENSE_WGMMA(NAME, FEATURES, STAGES)                                                                      \
    extern "C" __global__ void __launch_bounds__(WgmmaConfig<FEATURES, STAGES>::THREADS, 1) dense_gemm_##NAME(   \
        const __grid_constant__ TensorMap x,      /* [M, K], boxes of tile_rows x 64 k, swizzled in 128 bytes */ \
        const __grid_constant__ TensorMap weight, /* [N, K], boxes of tile_features x 64 k, the same */          \
        __nv_bfloat16* __restrict__ out,          /* [M, N] */                                                   \
        int M, int N, int K, int tile_rows, int tile_features) {                                                 \
        wgmma_gemm<WgmmaConfig<FEATURES, STAGES>>(x, weight, out, M, N, K, {tile_rows, tile_features});          \
    }
