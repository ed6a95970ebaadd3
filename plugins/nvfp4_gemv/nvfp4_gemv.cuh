// GEMV with NVFP4 weights for up to 16 rows, one read of the weights. Used by gemv.cuh, gemv_wide.cu, gemv_parts.cu,
// gemv_dual_silu.cu and gemv_gdn_in.cu; launched by launch.py. sm_80 and newer; clusters from sm_90 on.
//
//   out[m, n] = BF16(global_scale * sum_k x[m, k] * E2M1[n, k] * E4M3[n, k / 16])
//
// Weights are the A operand of mma.sync, rows of x its N side: 8 rows cost as much as one.
//
// Numerics: exact products, FP32 accumulation in the tensor core, split-K over warps and cluster ranks; partials are
// added in a fixed order. The split depends on N, K and the architecture only: M rows have the bits of M launches of
// one row.
#pragma once
#include "cluster.cuh"
#include "global_memory.cuh"
#include "mbarrier.cuh"
#include "nvfp4_mma.cuh"
#include "opaque.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

constexpr int WHOLE_SUPERTILES = -TILE_K;

// Tile configuration of a warp. It does not change the bits of the result.
//   TILES         tiles of 16 features that use one load of x
//   X_STAGES      blocks of 64 k of x that are loaded ahead of their use
//   WARPS_PER_SM  occupancy that the launch bounds ask for, which limits the registers
//   STATIC_K      K at compile time, for an unrolled main loop; 0: any K; WHOLE_SUPERTILES: any multiple of a supertile
//   EARLY_BLOCKS  blocks of 64 k that are decoded before pdl_wait: at most one supertile, and only with STATIC_K
//   CLAMP_ROWS    rows from M on read the last row, and are not stored: no predicated load, no register set to zero.
//                 H200, 16 rows, us without / with: 14336 x 5120 16.5 / 16.2, 5120 x 17408 21.7 / 20.9; but with one
//                 tile a warp 17408 x 5120 20.0 / 20.9, 9216 x 2048 6.4 / 6.8
template <int TILES_, int X_STAGES_, int WARPS_PER_SM_, int STATIC_K_, int EARLY_BLOCKS_ = 0, bool CLAMP_ROWS_ = false>
struct TileConfig {
    static constexpr int TILES = TILES_, X_STAGES = X_STAGES_, WARPS_PER_SM = WARPS_PER_SM_, STATIC_K = STATIC_K_;
    static constexpr int EARLY_BLOCKS = EARLY_BLOCKS_;
    static constexpr bool CLAMP_ROWS = CLAMP_ROWS_;
    static_assert(STATIC_K % TILE_K == 0 && (EARLY_BLOCKS == 0 || STATIC_K > 0));
};

// Split-K, the same for any number of rows: WARPS warps of each of CLUSTER blocks take supertiles in turn. The tile
// configurations are for up to 8 and for up to 16 rows.
template <int WARPS_, int CLUSTER_, class CONFIG_8, class CONFIG_16>
struct Split {
    static constexpr int WARPS = WARPS_, CLUSTER = CLUSTER_, STEP = WARPS * CLUSTER;
    template <int NT>
    struct Rows {
        using S = CONFIG_8;
    };
    template <>
    struct Rows<2> {
        using S = CONFIG_16;
    };
    template <int NT>
    using ConfigOf = typename Rows<NT>::S;
    template <int NT>  // blocks per multiprocessor for the launch bounds
    static constexpr int BLOCKS = ConfigOf<NT>::WARPS_PER_SM < WARPS ? 1 : ConfigOf<NT>::WARPS_PER_SM / WARPS;
};

constexpr int ACCUMULATORS = 2;  // of a warp for one output; four need more registers, one is slower at M = 1

// The scales of block ``block`` of a supertile, of both row halves.
__device__ __forceinline__ u32 scale_low(const Supertile& tile, int block) {
    return scale_pair(block < 2 ? tile.scales.x : tile.scales.y, 2 * (block & 1));
}
__device__ __forceinline__ u32 scale_high(const Supertile& tile, int block) {
    return scale_pair(block < 2 ? tile.scales.x : tile.scales.y, 2 * (block & 1) + 1);
}

// The rows of x of a lane's mma operand: row g of each group of eight, from the lane's first k on. Opaque addresses
// stay in registers; the compiler would otherwise recompute them for every load to save registers.
template <int NT, bool CLAMP_ROWS = false>
struct LaneRows {
    const __nv_bfloat16* at[NT];
    bool is_valid[NT];

    __device__ __forceinline__ LaneRows(const __nv_bfloat16* __restrict__ x, int stride, int M, int g, int k) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            is_valid[n] = CLAMP_ROWS || n * 8 + g < M;
            at[n] = x + (size_t)(CLAMP_ROWS ? min(n * 8 + g, M - 1) : n * 8 + g) * stride + k;
            make_opaque(at[n]);
        }
    }
    // x[row, k .. k + 15], with k relative to the lane's first. k from ``end`` on is zeros; rows from M on are zeros
    // or, with CLAMP_ROWS, the last row.
    __device__ __forceinline__ void load(uint4 (&v)[NT][2], int k, int end) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            v[n][0] = v[n][1] = make_uint4(0, 0, 0, 0);
            if (is_valid[n] && k < end) {
                const uint4* p = reinterpret_cast<const uint4*>(at[n] + k);
                v[n][0] = load_now(p), v[n][1] = load_now(p + 1);
            }
        }
    }
};

// Extra work of a thread in the main loop: before pdl_wait, after it, and after the first round, when the loads issued
// after the wait have arrived. The last hook runs only in warps with a slice of K, which the first warp always has.
struct NoHooks {
    __device__ __forceinline__ void before_wait() {}
    __device__ __forceinline__ void after_wait() {}
    __device__ __forceinline__ void after_first_round() {}
};

// The main loop of a warp: partial sums over its slice of K, for S::TILES tiles (one may be there twice).
template <int NT, class P, class S, class Hooks>
__device__ __forceinline__ void accumulate(float (&c)[S::TILES][ACCUMULATORS][NT][4], const u8* (&tile)[S::TILES],
                                           const __nv_bfloat16* __restrict__ x, int stride, int M, int K, int first,
                                           int lane, Hooks& hooks) {
    constexpr int STATIC_COUNT = S::STATIC_K / TILE_K, ROUNDS = (STATIC_COUNT + P::STEP - 1) / P::STEP;
    constexpr bool EVEN = S::STATIC_K > 0 && STATIC_COUNT % P::STEP == 0;  // the same trip count for every warp
    const int count = S::STATIC_K > 0 ? STATIC_COUNT : (K + TILE_K - 1) / TILE_K;
    const int first_k = first * TILE_K + (lane & 3) * 16;
    const LaneRows<NT, S::CLAMP_ROWS> rows(x, stride, M, lane >> 2, first_k);
    Supertile weights[S::TILES];
#pragma unroll
    for (int j = 0; j < S::TILES; ++j) {
        tile[j] += (size_t)first * SUPERTILE_BYTES;
        if (EVEN || first < count) weights[j].load_before_wait(tile[j], lane);
    }
    hooks.before_wait();
    pdl_wait();
    hooks.after_wait();
    // Round r multiplies a supertile of each tile, and reloads each block with the next supertile once it is decoded.
    auto round = [&](int r, bool has_next) {
        const int k = r * P::STEP * TILE_K, end = S::STATIC_K != 0 ? 1 << 30 : K - first_k;
        const int next = (r + 1) * P::STEP * SUPERTILE_BYTES;
        uint4 xs[4][NT][2];
#pragma unroll
        for (int b = 0; b < S::X_STAGES; ++b) rows.load(xs[b], k + b * 64, end);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int stage = b + S::X_STAGES - 1;
            if (b > 0 && stage < 4) rows.load(xs[stage], k + stage * 64, end);
#pragma unroll
            for (int j = 0; j < S::TILES; ++j) {
                multiply_block(c[j], weights[j].codes[b], scale_low(weights[j], b), scale_high(weights[j], b), xs[b]);
                if (has_next) weights[j].load_block(tile[j] + next, b, lane);
            }
        }
        if (has_next)
#pragma unroll
            for (int j = 0; j < S::TILES; ++j) weights[j].scales = load_scales(tile[j] + next + CODE_BYTES + lane * 8);
        if (r == 0) hooks.after_first_round();
    };
    // More than 8 rounds are unrolled by two (H200, us, fully / by two: 5120 x 17408 17.0 / 16.1, 16 rows 21.6 / 21.2),
    // fewer are fully unrolled (14336 x 5120 13.5 / 13.8).
    if constexpr (ROUNDS > 8) {
        constexpr int COMMON = STATIC_COUNT / P::STEP;  // rounds of every warp
#pragma unroll 2
        for (int r = 0; r < COMMON - 1; ++r) round(r, true);
        const bool has_more = !EVEN && first + COMMON * P::STEP < count;
        round(COMMON - 1, has_more);
        if (has_more) round(COMMON, false);
    } else if constexpr (S::STATIC_K > 0) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int i = first + r * P::STEP;
            if (EVEN || i < count) round(r, EVEN ? r + 1 < ROUNDS : i + P::STEP < count);
        }
    } else {
#pragma unroll 1
        for (int r = 0; first + r * P::STEP < count; ++r) round(r, first + (r + 1) * P::STEP < count);
    }
}

// accumulate with S::EARLY_BLOCKS blocks of weights decoded before pdl_wait: only their mma remain once x is available.
// Blocks after the first wave do not wait, and decode while x is loading. x is loaded X_STAGES blocks ahead of its use,
// across rounds.
template <int NT, class P, class S, class Hooks>
__device__ __forceinline__ void accumulate_early(float (&c)[S::TILES][ACCUMULATORS][NT][4], const u8* (&tile)[S::TILES],
                                                 const __nv_bfloat16* __restrict__ x, int stride, int M, int first,
                                                 int lane, Hooks& hooks) {
    constexpr int COUNT = S::STATIC_K / TILE_K, ROUNDS = (COUNT + P::STEP - 1) / P::STEP;
    static_assert(COUNT >= P::STEP && S::EARLY_BLOCKS <= 4);  // every warp has a supertile
    const int rounds_of_warp = COUNT % P::STEP == 0 ? ROUNDS : (COUNT - first + P::STEP - 1) / P::STEP;
    const LaneRows<NT> rows(x, stride, M, lane >> 2, first * TILE_K + (lane & 3) * 16);
    Supertile weights[S::TILES];
#pragma unroll
    for (int j = 0; j < S::TILES; ++j) {
        tile[j] += (size_t)first * SUPERTILE_BYTES;
        weights[j].load_before_wait(tile[j], lane);
    }
    hooks.before_wait();
    // Decodes block ``block``, counted over all rounds, and loads the same block of the next supertile in its place.
    auto decode_next = [&](Decoded& a, int j, int block, bool is_pinned) {
        const int r = block / 4 + 1, b = block % 4;
        decode_block(a, weights[j].codes[b], scale_low(weights[j], b), scale_high(weights[j], b));
        if (r >= ROUNDS || r >= rounds_of_warp) return;
        const u8* next = tile[j] + r * P::STEP * SUPERTILE_BYTES;
        const u8 *codes = next + b * 512 + lane * 16, *scales = next + CODE_BYTES + lane * 8;
        weights[j].codes[b] = is_pinned ? load_codes_now(codes) : load_codes(codes);
        if (b == 3) weights[j].scales = is_pinned ? load_scales_now(scales) : load_scales(scales);
    };
    Decoded early[S::EARLY_BLOCKS][S::TILES];
    auto decode_early = [&] {
#pragma unroll
        for (int block = 0; block < S::EARLY_BLOCKS; ++block)
#pragma unroll
            for (int j = 0; j < S::TILES; ++j) decode_next(early[block][j], j, block, true);
    };
    const bool waits = is_in_first_wave(P::template BLOCKS<NT>);
    if (waits) decode_early();
    pdl_wait();
    hooks.after_wait();
    uint4 xs[S::X_STAGES][NT][2];
    auto load_x = [&](int block) {
        const int r = block / 4;
        if (r < ROUNDS && r < rounds_of_warp)
            rows.load(xs[block % S::X_STAGES], r * P::STEP * TILE_K + block % 4 * 64, 1 << 30);
    };
#pragma unroll
    for (int block = 0; block < S::X_STAGES; ++block) load_x(block);
    if (!waits) decode_early();
#pragma unroll
    for (int block = 0; block < 4 * ROUNDS; ++block) {
        if (block / 4 >= rounds_of_warp) continue;
#pragma unroll
        for (int j = 0; j < S::TILES; ++j) {
            if (block < S::EARLY_BLOCKS) {
                multiply_decoded(c[j], early[block < S::EARLY_BLOCKS ? block : 0][j], xs[block % S::X_STAGES]);
            } else {
                Decoded a;
                decode_next(a, j, block, false);
                multiply_decoded(c[j], a, xs[block % S::X_STAGES]);
            }
        }
        load_x(block + S::X_STAGES);
        if (block == 3) hooks.after_first_round();
    }
}

// One group of SIDES * S::TILES tiles for all rows of x: main loop, reduction over warps, reduction over the cluster,
// epilogue. ``tiles`` are the tiles of this warp; with two SIDES the second half of the warps has other tiles. The
// epilogue ``store(row, column, sums)`` gets OUTPUTS sums, one from each OUTPUTS-th part of the group's columns.
// Launch: SIDES * P::WARPS * 32 threads, P::CLUSTER blocks for a group.
template <int NT, class P, int SIDES, int OUTPUTS, class Hooks, class Store>
__device__ __forceinline__ void gemv_group(const u8* (&tiles)[P::template ConfigOf<NT>::TILES],
                                           const __nv_bfloat16* __restrict__ x, int stride, int M, int K, int rank,
                                           Hooks& hooks, Store store) {
    using S = typename P::template ConfigOf<NT>;
    constexpr int COLUMNS = SIDES * S::TILES * TILE_N, PLACES = COLUMNS / OUTPUTS, THREADS = SIDES * P::WARPS * 32;
    constexpr int UNROLL = PLACES * NT * 8 >= 4 * THREADS ? 4 : 1;  // of the reduction loops
    __shared__ float partial[P::WARPS][NT * 8][COLUMNS];
    __shared__ float gathered[P::CLUSTER][NT * 8][COLUMNS];
    // Rank 0 counts the partials of the other ranks on an mbarrier. A second cluster barrier would order all memory of
    // the device and invalidate L1, which holds x. H200, 5120 x 17408, cold L2, us with barrier / mbarrier: M = 1 17.1
    // / 16.5, M = 8 17.5 / 16.7, M = 16 21.1 / 21.1.
    __shared__ Mbarrier mbarrier;
    if constexpr (P::CLUSTER > 1) {
        if (rank == 0 && threadIdx.x == 0)
            mbarrier_init_expect_tx(&mbarrier, (P::CLUSTER - 1) * COLUMNS * M * sizeof(float));
        cluster_arrive_relaxed();
    }
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int side = SIDES == 1 ? 0 : threadIdx.x / (P::WARPS * 32);
    const int warp = (threadIdx.x >> 5) - side * P::WARPS;

    // Stage 1: each warp sums its slice of K.
    float c[S::TILES][ACCUMULATORS][NT][4] = {};
    const int first = rank * P::WARPS + warp;
    if constexpr (S::EARLY_BLOCKS > 0) accumulate_early<NT, P, S>(c, tiles, x, stride, M, first, lane, hooks);
    else accumulate<NT, P, S>(c, tiles, x, stride, M, K, first, lane, hooks);
#pragma unroll
    for (int j = 0; j < S::TILES; ++j)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = n * 8 + 2 * t + (i & 1), tile = side * S::TILES + j;
                if (row < M) partial[warp][row][tile * TILE_N + g + 8 * (i >> 1)] = c[j][0][n][i] + c[j][1][n][i];
            }

    // Stage 2: add the partials of the warps, then of the ranks, in rising order.
    if constexpr (P::CLUSTER > 1) {
        if (rank != 0) cluster_wait();  // the mbarrier of rank 0 is initialised
    }
    __syncthreads();
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < PLACES * M; i += THREADS) {
        const int row = i / PLACES, column = i % PLACES;
        float sums[OUTPUTS] = {};
#pragma unroll
        for (int w = 0; w < P::WARPS; ++w)
#pragma unroll
            for (int j = 0; j < OUTPUTS; ++j) sums[j] += partial[w][row][j * PLACES + column];
        if constexpr (P::CLUSTER == 1) {
            store(row, column, sums);
        } else {
#pragma unroll
            for (int j = 0; j < OUTPUTS; ++j) {
                if (rank == 0) gathered[0][row][j * PLACES + column] = sums[j];
                else dsmem_store_async(&gathered[rank][row][j * PLACES + column], sums[j], &mbarrier, 0);
            }
        }
    }
    if constexpr (P::CLUSTER > 1) {
        if (rank != 0) return;
        mbarrier_wait(shared_address(&mbarrier), 0);
#pragma unroll UNROLL
        for (int i = threadIdx.x; i < PLACES * M; i += THREADS) {
            const int row = i / PLACES, column = i % PLACES;
            float sums[OUTPUTS] = {};
#pragma unroll
            for (int r = 0; r < P::CLUSTER; ++r)
#pragma unroll
                for (int j = 0; j < OUTPUTS; ++j) sums[j] += gathered[r][row][j * PLACES + column];
            store(row, column, sums);
        }
    }
}

// One group of adjacent tiles of one weight with N features. The epilogue ``store(row, feature, value)`` gets each
// output below N.
template <int NT, class P, int SIDES = 1, class Store, class Hooks>
__device__ __forceinline__ void gemv_tiles(const u8* __restrict__ weight, const __nv_bfloat16* __restrict__ x,
                                           int stride, float scale, int M, int N, int K, int group, int rank,
                                           Store store, Hooks& hooks) {
    constexpr int TILES = P::template ConfigOf<NT>::TILES, DEPTH = P::template ConfigOf<NT>::STATIC_K;
    const size_t tile_bytes = (size_t)(((DEPTH > 0 ? DEPTH : K) + TILE_K - 1) / TILE_K) * SUPERTILE_BYTES;
    const int last = (N - 1) / TILE_N, first = group * SIDES * TILES * TILE_N;
    const int warp_group = SIDES == 1 ? group : group * SIDES + threadIdx.x / (P::WARPS * 32);
    const u8* tiles[TILES];
#pragma unroll
    for (int j = 0; j < TILES; ++j) tiles[j] = weight + min(warp_group * TILES + j, last) * tile_bytes;
    gemv_group<NT, P, SIDES, 1>(tiles, x, stride, M, K, rank, hooks, [=](int row, int column, const float (&sums)[1]) {
        if (first + column < N) store(row, first + column, sums[0] * scale);
    });
}
template <int NT, class P, int SIDES = 1, class Store>
__device__ __forceinline__ void gemv_tiles(const u8* __restrict__ weight, const __nv_bfloat16* __restrict__ x,
                                           int stride, float scale, int M, int N, int K, int group, int rank,
                                           Store store) {
    NoHooks hooks;
    gemv_tiles<NT, P, SIDES>(weight, x, stride, scale, M, N, K, group, rank, store, hooks);
}
