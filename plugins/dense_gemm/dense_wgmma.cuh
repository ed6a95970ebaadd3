// Dense GEMM of many rows for sm_90a: out[m, n] = BF16(sum_k x[m, k] * weight[n, k]), both BF16.
//
// A block is one producer warpgroup, of which one thread copies tiles of x and of the weight by bulk tensor copies into
// a ring of STAGES, and two consumers of 64 rows each over FEATURES features: wgmma with both operands in shared
// memory. A block takes tile after tile; while its consumers store one, the producer fills the ring for the next.
//
// Tiles are as even as they can be, and boxes no larger: what of a box lies outside a matrix takes longer than what
// lies inside. H200, 65 x 5120 x 5120, us: boxes of 128 rows 32.9, of 65 rows 18.4. The rest of a tile's operands is
// whatever the ring held, and so is what is not stored.
//
// Numerics: FP32 accumulation, k rising in steps of 16, one rounding: the order does not depend on M or N.
#pragma once
#include "async_copy.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

// The rows and features of a tile, of the form's at most; features are a multiple of 8.
struct TileSize {
    int rows, features;

    __device__ __forceinline__ u32 stage_bytes(int depth) const { return (rows + features) * depth * 2; }
    __device__ __forceinline__ int across(int M) const { return (M + rows - 1) / rows; }
    __device__ __forceinline__ int along(int N) const { return (N + features - 1) / features; }
};

template <int FEATURES_, int STAGES_>
struct WgmmaForm {
    static constexpr int FEATURES = FEATURES_, STAGES = STAGES_, ROWS = 128, K_TILE = 64, CONSUMERS = 2;
    static constexpr int THREADS = 128 * (CONSUMERS + 1);
    static constexpr int X_BYTES = ROWS * K_TILE * 2, STAGE_BYTES = X_BYTES + FEATURES * K_TILE * 2;
    // A warp's 16 rows pass through shared memory 64 features at a time on the way out.
    static constexpr int OUT_FEATURES = 64, OUT_BYTES = 16 * OUT_FEATURES * 2;
    static constexpr int OUT_AT = STAGES * STAGE_BYTES, BARRIERS_AT = OUT_AT + 4 * CONSUMERS * OUT_BYTES;
    static constexpr int SHARED_BYTES = BARRIERS_AT + STAGES * 16 + 1024;  // the ring begins at a multiple of 1024
    static_assert(SHARED_BYTES <= 227 * 1024, "over the shared memory of a block");
    // Registers a thread: all get 168 at launch, then the producer gives most of its own to the consumers.
    static constexpr int PRODUCER = 40, CONSUMER = 232;
};

template <class F>
struct WgmmaRing {
    u32 base;
    u32 stage = 0, phase = 0;

    __device__ __forceinline__ u32 x() const { return base + stage * F::STAGE_BYTES; }
    __device__ __forceinline__ u32 weight() const { return x() + F::X_BYTES; }
    __device__ __forceinline__ u32 full() const { return base + F::BARRIERS_AT + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 which) const { return base + F::BARRIERS_AT + (F::STAGES + which) * 8; }
    __device__ __forceinline__ void next() {
        if (++stage == F::STAGES) stage = 0, phase ^= 1;
    }
    __device__ __forceinline__ void init(int i) const {
        mbarrier_init(base + F::BARRIERS_AT + i * 8, 1);
        mbarrier_init(empty(i), F::CONSUMERS * 4);
        mbarrier_fence_init();
    }
};

template <class F>
struct WgmmaConsumer {
    WgmmaRing<F> ring;
    int group, warp, lane;
    float sums[F::FEATURES / 2];

    __device__ __forceinline__ void multiply_stage(u32 accumulate) {
        mbarrier_wait(ring.full(), ring.phase);
        const u64 a = wgmma_descriptor(ring.x() + group * 64 * F::K_TILE * 2), b = wgmma_descriptor(ring.weight());
        wgmma_fence();
        WgmmaShared<F::FEATURES>::run(sums, a, b, accumulate);
        wgmma_commit();
    }
    __device__ __forceinline__ void release(u32 which) const {
        if (lane == 0) mbarrier_arrive(ring.empty(which));
    }
    // One stage is multiplied while the next one is awaited.
    __device__ __forceinline__ void accumulate(int steps) {
        multiply_stage(0);
#pragma unroll 1
        for (int step = 1; step < steps; ++step) {
            const u32 before = ring.stage;
            ring.next();
            multiply_stage(1);
            wgmma_wait<1>();
            release(before);
        }
        wgmma_wait<0>();
        release(ring.stage);
        ring.next();
        wgmma_fence_operand(sums);
    }
    // A row of out takes 128 bytes at a time. Rows and features from the ends on are not stored.
    __device__ __forceinline__ void store(__nv_bfloat16* __restrict__ out, u8* staging, int m0, int n0, int rows_end,
                                          int features_end, int N) {
        u8* mine = staging + (group * 4 + warp) * F::OUT_BYTES;
        const u32 mine_address = shared_address(mine);
        const int m1 = m0 + group * 64 + warp * 16, row = (lane & 7) + (lane >> 3 & 1) * 8;
#pragma unroll
        for (int first = 0; first < F::FEATURES; first += F::OUT_FEATURES) {
            __syncwarp();  // what stood here has been read
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
                const u32 to = mine_address + row * 128 + (((2 * pair + (lane >> 4)) ^ (row & 7)) << 4);
                stmatrix_x4(to, m);
            }
            __syncwarp();
#pragma unroll
            for (int pass = 0; pass < 4; ++pass) {
                const int at = pass * 4 + (lane >> 3), column = lane & 7, n = n0 + first + column * 8;
                const int rest = features_end - n;
                if (m1 + at >= rows_end || rest <= 0) continue;
                const u8* from = mine + at * 128 + ((column ^ (at & 7)) << 4);
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
    const int tiles_m = size.across(M), tiles_n = size.along(N);
    const int tiles = tiles_m * tiles_n, steps = (K + F::K_TILE - 1) / F::K_TILE;
    WgmmaRing<F> ring{base};
    pdl_launch_dependents();
    if (threadIdx.x < F::STAGES) ring.init(threadIdx.x);
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
            for (int step = 0; step < steps; ++step, ring.next()) {
                mbarrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
                mbarrier_arrive_expect_tx(ring.full(), size.stage_bytes(F::K_TILE));
                tma_load_2d(ring.x(), x, step * F::K_TILE, m * size.rows, ring.full());
                tma_load_2d(ring.weight(), weight, step * F::K_TILE, n * size.features, ring.full());
            }
        }
        return;
    }

    warpgroup_reg_alloc<F::CONSUMER>();
    WgmmaConsumer<F> consumer;
    consumer.ring = ring;
    consumer.group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);
    consumer.warp = (threadIdx.x / 32) & 3;
    consumer.lane = threadIdx.x & 31;
    pdl_wait();  // before out is touched
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int m, n;
        tile_of_block(tile, tiles_m, tiles_n, m, n);
        consumer.accumulate(steps);
        const int m0 = m * size.rows, n0 = n * size.features;
        consumer.store(out, shared + F::OUT_AT, m0, n0, min(M, m0 + size.rows), min(N, n0 + size.features), N);
    }
}

#define DENSE_WGMMA(NAME, FEATURES, STAGES)                                                                      \
    extern "C" __global__ void __launch_bounds__(WgmmaForm<FEATURES, STAGES>::THREADS, 1) dense_gemm_##NAME(     \
        const __grid_constant__ TensorMap x,      /* [M, K], boxes of tile_rows x 64 k, swizzled in 128 bytes */ \
        const __grid_constant__ TensorMap weight, /* [N, K], boxes of tile_features x 64 k, the same */          \
        __nv_bfloat16* __restrict__ out,          /* [M, N] */                                                   \
        int M, int N, int K, int tile_rows, int tile_features) {                                                 \
        wgmma_gemm<WgmmaForm<FEATURES, STAGES>>(x, weight, out, M, N, K, {tile_rows, tile_features});            \
    }
