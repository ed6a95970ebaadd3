// Persistent NVFP4 GEMV for up to 16 rows and very large N (LM heads), on sm_90a: it needs 200 KB of shared memory a
// block. Included by gemv16.cu; launched by launch.py.
//
// 16 rows of K = 5120 are 160 KB, more than L1 can keep beside the weights in flight: x would come from L2 for every
// tile. Here x stays in shared memory, in the order of the mma operands. There is one block a multiprocessor; its
// groups of P::WARPS warps take pairs of tiles in turn, and load the weights of the next pair before the epilogue.
// Split-K as in P. H200, 248320 x 5120, 16 rows, us: gemv.cuh 236, this 197. Variants: a loop over K instead of
// unrolled rounds 209, one tile a warp with 20 warps 201, three groups 214, three groups with three tiles 227.
#pragma once
#include "gemv.cuh"
#include "global_memory.cuh"
#include "named_barrier.cuh"
#include "pdl.cuh"

template <class P, int K>
struct PersistentConfig {
    static constexpr int NT = 2, ROWS = NT * 8, TILES = 2, WARP_GROUPS = 4, COLUMNS = TILES * TILE_N;
    static constexpr int COUNT = K / TILE_K, ROUNDS = COUNT / P::WARPS, THREADS = WARP_GROUPS * P::WARPS * 32;
    static constexpr int X_VECTORS = K / 8 * ROWS;  // of 16 bytes: [K / 64][NT][2][32 lanes]
    static constexpr int WIDTH = COLUMNS + 4;       // of a row of partials, padded against bank conflicts
    static_assert(P::CLUSTER == 1 && COUNT % P::WARPS == 0);
    using Partials = float[P::WARPS][ROWS][WIDTH];
    static constexpr int SHARED_BYTES = X_VECTORS * 16 + WARP_GROUPS * sizeof(Partials);
};

template <class P, int K>
__device__ __forceinline__ void gemv_persistent(const u8* __restrict__ weight, const __nv_bfloat16* x, int stride,
                                                __nv_bfloat16* __restrict__ out, float scale, int M, int N) {
    using R = PersistentConfig<P, K>;
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = (threadIdx.x >> 5) % P::WARPS, group = threadIdx.x / (P::WARPS * 32),
              thread = threadIdx.x % (P::WARPS * 32);
    auto& partials = reinterpret_cast<typename R::Partials*>(shared + R::X_VECTORS)[group];
    const int tiles = (N + TILE_N - 1) / TILE_N, pairs = (tiles + 1) / 2;
    auto group_barrier = [&] { named_barrier_sync(group + 1, P::WARPS * 32); };
    // A tile beyond N repeats the last one; its results are not stored.
    auto tile = [&](int pair, int j) {
        const size_t index = min(pair * R::TILES + j, tiles - 1);
        return weight + (index * R::COUNT + warp) * SUPERTILE_BYTES;
    };

    // Prologue: the first weights before pdl_wait, then x.
    int pair = blockIdx.x + gridDim.x * group;
    Supertile weights[R::TILES];
    const u8* address[R::TILES];
#pragma unroll
    for (int j = 0; j < R::TILES; ++j) weights[j].load_before_wait(address[j] = tile(pair, j), lane);
    pdl_wait();
    for (int i = threadIdx.x; i < R::X_VECTORS; i += R::THREADS) {
        const int to = i & 31, half = (i >> 5) & 1, row = (i >> 6) % R::NT * 8 + (to >> 2);
        const int k = (i >> 6) / R::NT * 64 + (to & 3) * 16 + half * 8;
        const uint4* from = reinterpret_cast<const uint4*>(x + (size_t)row * stride + k);
        shared[i] = row < M ? load_now(from) : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();

#pragma unroll 1
    for (; pair < pairs; pair += gridDim.x * R::WARP_GROUPS) {
        // Main loop over the warp's slice of K. Each block is reloaded with the next weights once it is decoded.
        float c[R::TILES][ACCUMULATORS][R::NT][4] = {};
        const int next_pair = pair + gridDim.x * R::WARP_GROUPS;
#pragma unroll
        for (int r = 0; r < R::ROUNDS; ++r) {
            const bool is_last = r + 1 == R::ROUNDS, has_next = !is_last || next_pair < pairs;
            const u8* next[R::TILES];
#pragma unroll
            for (int j = 0; j < R::TILES; ++j)
                next[j] = is_last ? tile(next_pair, j) : address[j] + P::WARPS * SUPERTILE_BYTES;
            const uint4* from = shared + (warp + r * P::WARPS) * (TILE_K / 64 * R::NT * 2 * 32) + lane;
#pragma unroll
            for (int b = 0; b < TILE_K / 64; ++b) {
                uint4 xs[R::NT][2];
#pragma unroll
                for (int n = 0; n < R::NT; ++n)
#pragma unroll
                    for (int half = 0; half < 2; ++half) xs[n][half] = from[((b * R::NT + n) * 2 + half) * 32];
#pragma unroll
                for (int j = 0; j < R::TILES; ++j) {
                    multiply_block(c[j], weights[j].codes[b], scale_low(weights[j], b), scale_high(weights[j], b), xs);
                    if (has_next) weights[j].load_block(next[j], b, lane);
                }
            }
            if (has_next)
#pragma unroll
                for (int j = 0; j < R::TILES; ++j) weights[j].scales = load_scales(next[j] + CODE_BYTES + lane * 8);
#pragma unroll
            for (int j = 0; j < R::TILES; ++j) address[j] = next[j];
        }

        // Epilogue: add the partials of the warps, in rising order.
        group_barrier();  // the previous partials have been read
#pragma unroll
        for (int j = 0; j < R::TILES; ++j)
#pragma unroll
            for (int n = 0; n < R::NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    partials[warp][n * 8 + 2 * t + (i & 1)][j * TILE_N + g + 8 * (i >> 1)] =
                        c[j][0][n][i] + c[j][1][n][i];
        group_barrier();
#pragma unroll 1
        for (int i = thread; i < R::COLUMNS * M; i += P::WARPS * 32) {
            const int row = i / R::COLUMNS, column = i % R::COLUMNS, n = pair * R::COLUMNS + column;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < P::WARPS; ++w) sum += partials[w][row][column];
            if (n < N) out[(size_t)row * N + n] = rounded(sum * scale);
        }
    }
}

// Grid: one block a multiprocessor. K is DEPTH.
#define GEMV_PERSISTENT(NAME, SPLIT, DEPTH)                                                                            \
    extern "C" __global__ void __launch_bounds__(PersistentConfig<SPLIT, DEPTH>::THREADS, 1)                           \
    gemv_##NAME##_resident_m16(const u8* __restrict__ weight, const __nv_bfloat16* x, __nv_bfloat16* __restrict__ out, \
                               float scale, int x_stride, int M, int N, int K) {                                       \
        pdl_launch_dependents();                                                                                       \
        gemv_persistent<SPLIT, DEPTH>(weight, x, x_stride, out, scale * EXPONENT_GAP, M, N);                           \
    }
