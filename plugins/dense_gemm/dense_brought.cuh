// The GEMV of BF16 weights of many features for nine to 16 rows on sm_90a, with the bits of ``many`` (dense_rows.cuh).
//
// Of 16 rows x is as much to read as 16 features of the weight: three tiles share it. One thread brings blocks of 64 k
// of the weight and of x into a ring by bulk tensor copies; the 8 warps that share K take block after block out of it,
// and lane (g, t) reads what it would read from memory. A block goes on to its next tiles while the ring is filled for
// them. Figures (H200, 16 x 6144 x 5120, us): loads straight to registers, one tile a warp 23.3, three 21.6; this 19.6,
// two tiles 27.5, one 35.6. Copies of 16 bytes by the lanes themselves (cp.async, three tiles, 192 KB a ring) 54.
#pragma once
#include "async_copy.cuh"
#include "dense_rows.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

template <int NT_, int TILES_, int STAGES_>
struct Brought {
    static constexpr int NT = NT_, TILES = TILES_, STAGES = STAGES_, ROWS = NT * 8, FEATURES = TILES * TILE_N;
    static constexpr int X_AT = FEATURES * BLOCK_K * 2, STAGE_BYTES = X_AT + ROWS * BLOCK_K * 2;
    static constexpr int SUMS_AT = STAGES * STAGE_BYTES, WIDTH = FEATURES + 4;  // so that lanes meet no bank twice
    static constexpr int BARRIERS_AT = SUMS_AT + Many::WARPS * ROWS * WIDTH * 4, THREADS = Many::THREADS + 32;
    static constexpr int SHARED_BYTES = BARRIERS_AT + STAGES * 16 + 1024;  // the ring begins at a multiple of 1024
    static_assert(X_AT % 1024 == 0 && STAGE_BYTES % 1024 == 0 && SHARED_BYTES <= 227 * 1024);
};

// The place of a block of k among all that a thread block takes, one after the other.
template <class F>
struct BroughtStage {
    u32 base, count;

    __device__ __forceinline__ u32 stage() const { return count % F::STAGES; }
    __device__ __forceinline__ u32 phase() const { return count / F::STAGES & 1; }
    __device__ __forceinline__ u32 at() const { return base + stage() * F::STAGE_BYTES; }
    __device__ __forceinline__ u32 full() const { return base + F::BARRIERS_AT + stage() * 8; }
    __device__ __forceinline__ u32 empty() const { return full() + F::STAGES * 8; }
};

template <class F>
__device__ __forceinline__ void brought_tiles(const TensorMap& weight, const TensorMap& x, __nv_bfloat16* out, int M,
                                              int N, int K) {
    constexpr int NT = F::NT;
    extern __shared__ u8 raw[];
    const u32 unaligned = shared_address(raw), base = (unaligned + 1023) & ~1023u;
    const int tiles = (N + F::FEATURES - 1) / F::FEATURES, blocks = (K + BLOCK_K - 1) / BLOCK_K;
    pdl_launch_dependents();
    if (threadIdx.x < F::STAGES) {
        const BroughtStage<F> own{base, threadIdx.x};
        mbarrier_init(own.full(), 1), mbarrier_init(own.empty(), 1);
        mbarrier_fence_init();
    }
    if (threadIdx.x == Many::THREADS) tma_prefetch_map(weight), tma_prefetch_map(x);
    __syncthreads();

    if (threadIdx.x >= Many::THREADS) {
        if (threadIdx.x > Many::THREADS) return;
        // The first weights are under way before the launch ahead is waited for.
        const u32 bytes = (F::FEATURES + M) * BLOCK_K * 2;  // boxes of x have M rows
        auto bring_weight = [&](const BroughtStage<F>& to, int tile, int block) {
            mbarrier_arrive_expect_tx(to.full(), bytes);
            tma_load_2d(to.at(), weight, block * BLOCK_K, tile * F::FEATURES, to.full());
        };
        const int ahead = min(blocks, F::STAGES);
#pragma unroll 1
        for (int block = 0; block < ahead; ++block) bring_weight({base, (u32)block}, blockIdx.x, block);
        pdl_wait();
        BroughtStage<F> to{base, 0};
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
#pragma unroll 1
            for (int block = 0; block < blocks; ++block, ++to.count) {
                if (to.count >= F::STAGES) mbarrier_wait(to.empty(), to.phase() ^ 1);
                if (to.count >= ahead) bring_weight(to, tile, block);
                tma_load_2d(to.at() + F::X_AT, x, block * BLOCK_K, 0, to.full());
            }
        return;
    }

    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2,
              t = lane & 3;
    const u32 low = g * 128 + ((2 * t ^ g) << 4), high = g * 128 + ((2 * t + 1 ^ g) << 4);  // 8 k each of row g
    float (*const sums)[F::ROWS][F::WIDTH] =
        reinterpret_cast<float (*)[F::ROWS][F::WIDTH]>(raw + (base - unaligned) + F::SUMS_AT);
    auto barrier = [] { named_barrier_sync(1, Many::THREADS); };
    pdl_wait();      // before out is touched
    u32 before = 0;  // blocks of k of earlier tiles
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, before += blocks) {
        // Stage 1: each warp sums its share of K.
        float c[F::TILES][4][NT][4] = {};
#pragma unroll 1
        for (int block = warp; block < blocks; block += Many::WARPS) {
            const BroughtStage<F> from{base, before + block};
            mbarrier_wait(from.full(), from.phase());
            uint4 xs[NT][2];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                xs[n][0] = load_shared_16(from.at() + F::X_AT + n * 1024 + low);
                xs[n][1] = load_shared_16(from.at() + F::X_AT + n * 1024 + high);
            }
#pragma unroll
            for (int j = 0; j < F::TILES; ++j) {
                const u32 at = from.at() + j * 2048;
                const Rows16 w = {{load_shared_16(at + low), load_shared_16(at + high)},
                                  {load_shared_16(at + 1024 + low), load_shared_16(at + 1024 + high)}};
                multiply<NT>(c[j], w, xs);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(from.empty());
        }

        // Stage 2: sums over warps in rising order.
        barrier();  // the sums before have been read
#pragma unroll
        for (int j = 0; j < F::TILES; ++j)
            put_sums<NT>(c[j], [&](int row, int column) -> float& { return sums[warp][row][j * TILE_N + column]; });
        barrier();
#pragma unroll 1
        for (int i = threadIdx.x; i < F::FEATURES * M; i += Many::THREADS) {
            const int row = i / F::FEATURES, column = i % F::FEATURES, n = tile * F::FEATURES + column;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < Many::WARPS; ++w) sum += sums[w][row][column];
            if (n < N) out[(size_t)row * N + n] = __float2bfloat16_rn(sum);
        }
    }
}

// Grid: a block a multiprocessor, or one for each 48 features.
extern "C" __global__ void __launch_bounds__(Brought<2, 3, 24>::THREADS, 1) dense_gemv_m16_brought(
    const __grid_constant__ TensorMap weight,  // [N, K], boxes of 48 features x 64 k, swizzled in 128 bytes
    const __grid_constant__ TensorMap x,       // [M, K], boxes of M rows x 64 k, the same
    __nv_bfloat16* out,                        // [M, N]
    int M, int N, int K) {
    brought_tiles<Brought<2, 3, 24>>(weight, x, out, M, N, K);
}
