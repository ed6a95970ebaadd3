// NVFP4 weights x BF16 activations for up to 16 rows, one read of the weights.
//
//   out[m, n] = BF16(global_scale * sum_k x[m, k] * E2M1[n, k] * E4M3[n, k / 16])
//
// The weights are the A operand of a tensor-core mma, the rows of x its N side: 8 rows cost what one costs.
//
// Numerics: products exact, accumulated in FP32 by the tensor core, over K split by warp and by cluster rank; partial
// sums are added in a fixed order. The split depends on N, K and the architecture only, so M rows give the bits that M
// launches of one row give.
//
// sm_80 and newer; clusters from sm_90 on. Launched by launch.py.
#pragma once
#include "launch.cuh"
#include "nvfp4_mma.cuh"

// How many supertiles a warp has in flight, and how many blocks should fit a multiprocessor, which bounds the registers.
// Neither changes a bit of the result, so that they may differ with the number of rows.
template <int DEPTH_, int BLOCKS_>
struct Tuning {
    static constexpr int DEPTH = DEPTH_, BLOCKS = BLOCKS_;
};

// How K is split: WARPS warps of CLUSTER blocks take supertiles in turn. A STATIC_K that is known when compiled unrolls
// the loop and drops its bounds; 0 stands for any K. TUNING_8 and TUNING_16 are for up to so many rows.
template <int WARPS_, int CLUSTER_, int STATIC_K_, class TUNING_8, class TUNING_16>
struct Split {
    static constexpr int WARPS = WARPS_, CLUSTER = CLUSTER_, STATIC_K = STATIC_K_;
    static constexpr int STEP = WARPS * CLUSTER, COUNT = STATIC_K / TILE_K, ROUNDS = (COUNT + STEP - 1) / STEP;
    static constexpr bool EVEN = STATIC_K > 0 && COUNT % STEP == 0;
    static_assert(STATIC_K % TILE_K == 0);
    template <int NT>
    static constexpr int DEPTH = NT == 1 ? TUNING_8::DEPTH : TUNING_16::DEPTH;
    template <int NT>
    static constexpr int BLOCKS = NT == 1 ? TUNING_8::BLOCKS : TUNING_16::BLOCKS;
};

// Sums of one warp over its share of K; S::DEPTH supertiles are in flight.
template <int NT, class S>
__device__ __forceinline__ void accumulate(float (&c)[4][NT][4], const u8* __restrict__ tile,
                                           const __nv_bfloat16* __restrict__ x, int stride, int M, int K, int first,
                                           int lane) {
    const int g = lane >> 2, t = lane & 3;
    const int count = S::STATIC_K > 0 ? S::COUNT : (K + TILE_K - 1) / TILE_K;
    const u8* mine = tile + (size_t)first * SUPERTILE_BYTES;
    constexpr int DEPTH = S::template DEPTH<NT>;
    Supertile ring[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (S::EVEN ? d < S::ROUNDS : first + d * S::STEP < count) ring[d].load(mine + (size_t)d * S::STEP * SUPERTILE_BYTES, lane);
    wait_for_previous_launch();
    auto round = [&](int i, int d) {  // the i-th supertile of this warp, which lies in slot d
        const bool has_next = S::EVEN ? i + DEPTH < S::ROUNDS : first + (i + DEPTH) * S::STEP < count;
        const u8* next = mine + (size_t)(i + DEPTH) * S::STEP * SUPERTILE_BYTES;
        const int k = (first + i * S::STEP) * TILE_K + t * 16;
        uint4 xs[4][NT][2];
#pragma unroll
        for (int b = 0; b < 4; ++b) load_x<NT, (S::STATIC_K > 0)>(xs[b], x, stride, M, K, g, k + b * 64);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const u32 scales = b < 2 ? ring[d].scales.x : ring[d].scales.y;
            multiply_block<NT>(c, ring[d].codes[b], scale_pair(scales, 2 * (b & 1)), scale_pair(scales, 2 * (b & 1) + 1),
                               xs[b]);
            if (has_next) ring[d].load_block(next, b, lane);
        }
        if (has_next) ring[d].scales = load_scales(next + CODE_BYTES + lane * 8);
    };
    if constexpr (S::STATIC_K > 0) {
#pragma unroll
        for (int i = 0; i < S::ROUNDS; ++i)
            if (S::EVEN || first + i * S::STEP < count) round(i, i % DEPTH);
    } else {
#pragma unroll 1
        for (int i = 0; first + i * S::STEP < count; i += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                if (first + (i + d) * S::STEP < count) round(i + d, d);
        }
    }
}

// One tile of 16 outputs for all rows: load and multiply, reduce over warps, reduce over the cluster, store.
// ``store(row, column, value)`` puts one output where it belongs. Launch: S::WARPS * 32 threads, S::CLUSTER blocks a tile.
template <int NT, class S, class Store>
__device__ __forceinline__ void gemv_tile(const u8* __restrict__ weight, const __nv_bfloat16* __restrict__ x,
                                          int stride, float scale, int M, int K, int tile, int rank, Store store) {
    __shared__ float partial[S::WARPS][NT * 8][TILE_N];
    __shared__ float gathered[S::CLUSTER][NT * 8][TILE_N];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int supertiles = S::STATIC_K > 0 ? S::COUNT : (K + TILE_K - 1) / TILE_K;

    // Stage 1: each warp sums its share of K.
    float c[4][NT][4] = {};
    accumulate<NT, S>(c, weight + (size_t)tile * supertiles * SUPERTILE_BYTES, x, stride, M, K, rank * S::WARPS + warp,
                      lane);
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = n * 8 + 2 * t + (i & 1);
            if (row < M) partial[warp][row][g + 8 * (i >> 1)] = (c[0][n][i] + c[1][n][i]) + (c[2][n][i] + c[3][n][i]);
        }

    // Stage 2: sums over warps, then over ranks, each in rising order.
#if __CUDA_ARCH__ >= 900
    if constexpr (S::CLUSTER > 1) cluster_wait();  // rank 0 has started: its shared memory may be written
#endif
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_N * M; i += S::WARPS * 32) {
        const int row = i / TILE_N, column = i % TILE_N;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < S::WARPS; ++w) sum += partial[w][row][column];
        if constexpr (S::CLUSTER == 1) store(row, tile * TILE_N + column, sum * scale);
#if __CUDA_ARCH__ >= 900
        else store_to_rank_0(&gathered[rank][row][column], sum);
#endif
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (S::CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
        if (rank != 0) return;
        for (int i = threadIdx.x; i < TILE_N * M; i += S::WARPS * 32) {
            const int row = i / TILE_N, column = i % TILE_N;
            float sum = 0.0f;
#pragma unroll
            for (int r = 0; r < S::CLUSTER; ++r) sum += gathered[r][row][column];
            store(row, tile * TILE_N + column, sum * scale);
        }
    }
#endif
}
