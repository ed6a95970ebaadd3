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
#include "cluster.cuh"
#include "global_memory.cuh"
#include "mbarrier.cuh"
#include "nvfp4_mma.cuh"
#include "opaque.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

constexpr int WHOLE = -TILE_K;

// How a warp works, which changes no bit of the result: how many row tiles share what it loads of x, how many blocks of
// 64 k of x are loaded before their turn, how many warps should fit a multiprocessor (which bounds the registers), a
// depth K that is known when compiled, whose loop is unrolled (0 is any depth, WHOLE any of whole supertiles), and how
// many blocks of 64 k are decoded before the launch ahead is waited for: at most one supertile, and only at a known
// depth. With LAST_ROW the last row of x stands for those that are missing, whose sums nobody stores: no load is left
// out, and no register cleared for it. H200, 16 rows, us without / with: 14336 x 5120 16.5 / 16.2, 5120 x 17408 21.7 /
// 20.9, but of one tile a warp 17408 x 5120 20.0 / 20.9 and 9216 x 2048 6.4 / 6.8.
template <int TILES_, int AHEAD_, int RESIDENT_WARPS_, int STATIC_K_, int EARLY_ = 0, bool LAST_ROW_ = false>
struct Shape {
    static constexpr int TILES = TILES_, AHEAD = AHEAD_, RESIDENT_WARPS = RESIDENT_WARPS_, STATIC_K = STATIC_K_;
    static constexpr int EARLY = EARLY_;
    static constexpr bool LAST_ROW = LAST_ROW_;
    static_assert(STATIC_K % TILE_K == 0 && (EARLY == 0 || STATIC_K > 0));
};

// How K is split, the same for any number of rows: WARPS warps of CLUSTER blocks take supertiles in turn. The shapes
// are for up to 8 rows and for up to 16.
template <int WARPS_, int CLUSTER_, class SHAPE_8, class SHAPE_16>
struct Split {
    static constexpr int WARPS = WARPS_, CLUSTER = CLUSTER_, STEP = WARPS * CLUSTER;
    template <int NT>
    struct Rows {
        using S = SHAPE_8;
    };
    template <>
    struct Rows<2> {
        using S = SHAPE_16;
    };
    template <int NT>
    using ShapeOf = typename Rows<NT>::S;
    template <int NT>  // thread blocks that should fit a multiprocessor
    static constexpr int BLOCKS = ShapeOf<NT>::RESIDENT_WARPS < WARPS ? 1 : ShapeOf<NT>::RESIDENT_WARPS / WARPS;
};

constexpr int ACCUMULATORS = 2;  // of a warp for one output; four cost registers, and one is slower at one row

// The scales of block ``block`` of a supertile, of both row halves.
__device__ __forceinline__ u32 scale_low(const Supertile& tile, int block) {
    return scale_pair(block < 2 ? tile.scales.x : tile.scales.y, 2 * (block & 1));
}
__device__ __forceinline__ u32 scale_high(const Supertile& tile, int block) {
    return scale_pair(block < 2 ? tile.scales.x : tile.scales.y, 2 * (block & 1) + 1);
}

// The rows of x that a lane feeds to its mma: row g of each group of eight, from its first k on. Addresses that the
// compiler cannot see through stay in registers; it would compute them again for every load, to save some.
template <int NT, bool LAST_ROW = false>
struct LaneRows {
    const __nv_bfloat16* at[NT];
    bool is_there[NT];

    __device__ __forceinline__ LaneRows(const __nv_bfloat16* __restrict__ x, int stride, int M, int g, int k) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            is_there[n] = LAST_ROW || n * 8 + g < M;
            at[n] = x + (size_t)(LAST_ROW ? min(n * 8 + g, M - 1) : n * 8 + g) * stride + k;
            make_opaque(at[n]);
        }
    }
    // x[row, k .. k + 15], k counted from the lane's first; k from ``end`` on is zeros, rows from M on are or are the
    // last.
    __device__ __forceinline__ void load(uint4 (&v)[NT][2], int k, int end) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            v[n][0] = v[n][1] = make_uint4(0, 0, 0, 0);
            if (is_there[n] && k < end) {
                const uint4* p = reinterpret_cast<const uint4*>(at[n] + k);
                v[n][0] = load_now(p), v[n][1] = load_now(p + 1);
            }
        }
    }
};

// The first supertile of a warp, under way before the launch ahead is waited for.
__device__ __forceinline__ void load_early(Supertile& tile, const u8* p, int lane) {
#pragma unroll
    for (int block = 0; block < 4; ++block) tile.codes[block] = load_codes_now(p + block * 512 + lane * 16);
    tile.scales = load_scales_now(p + CODE_BYTES + lane * 8);
}

// What a thread does beside its warp's work: ``ahead`` of the wait for the launch before, ``begin`` behind it,
// ``go_on`` once what it loaded then has come, in warps that have a share of K (the first always has).
struct Nothing {
    __device__ __forceinline__ void ahead() {}
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void go_on() {}
};

// Sums of one warp over its share of K, for S::TILES row tiles (one may stand twice).
template <int NT, class P, class S, class Meanwhile>
__device__ __forceinline__ void accumulate(float (&c)[S::TILES][ACCUMULATORS][NT][4], const u8* (&tile)[S::TILES],
                                           const __nv_bfloat16* __restrict__ x, int stride, int M, int K, int first,
                                           int lane, Meanwhile& meanwhile) {
    constexpr int STATIC_COUNT = S::STATIC_K / TILE_K, ROUNDS = (STATIC_COUNT + P::STEP - 1) / P::STEP;
    constexpr bool EVEN = S::STATIC_K > 0 && STATIC_COUNT % P::STEP == 0;  // the same number of rounds for every warp
    const int count = S::STATIC_K > 0 ? STATIC_COUNT : (K + TILE_K - 1) / TILE_K;
    const int first_k = first * TILE_K + (lane & 3) * 16;
    const LaneRows<NT, S::LAST_ROW> rows(x, stride, M, lane >> 2, first_k);
    Supertile weights[S::TILES];
#pragma unroll
    for (int j = 0; j < S::TILES; ++j) {
        tile[j] += (size_t)first * SUPERTILE_BYTES;
        if (EVEN || first < count) load_early(weights[j], tile[j], lane);
    }
    meanwhile.ahead();
    pdl_wait();
    meanwhile.begin();
    // The r-th round: multiplies, and loads the next supertiles block by block as these are used up.
    auto round = [&](int r, bool has_next) {
        const int k = r * P::STEP * TILE_K, end = S::STATIC_K != 0 ? 1 << 30 : K - first_k;
        const int next = (r + 1) * P::STEP * SUPERTILE_BYTES;
        uint4 xs[4][NT][2];
#pragma unroll
        for (int b = 0; b < S::AHEAD; ++b) rows.load(xs[b], k + b * 64, end);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int ahead = b + S::AHEAD - 1;
            if (b > 0 && ahead < 4) rows.load(xs[ahead], k + ahead * 64, end);
#pragma unroll
            for (int j = 0; j < S::TILES; ++j) {
                multiply_block(c[j], weights[j].codes[b], scale_low(weights[j], b), scale_high(weights[j], b), xs[b]);
                if (has_next) weights[j].load_block(tile[j] + next, b, lane);
            }
        }
        if (has_next)
#pragma unroll
            for (int j = 0; j < S::TILES; ++j) weights[j].scales = load_scales(tile[j] + next + CODE_BYTES + lane * 8);
        if (r == 0) meanwhile.go_on();
    };
    // Many rounds are unrolled by two (H200, us: 5120 x 17408 unrolled 17.0, by two 16.1, and 16 rows 21.6 / 21.2),
    // fewer all (14336 x 5120 13.5, by two 13.8).
    if constexpr (ROUNDS > 8) {
        constexpr int COMMON = STATIC_COUNT / P::STEP;  // that every warp has
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

// Whether a block begins while blocks of the launch ahead may still run: those that begin later take the place of
// others of their own launch.
__device__ __forceinline__ bool is_in_first_wave(int blocks_per_multiprocessor) {
    u32 multiprocessors;
    asm volatile("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
    return blockIdx.x < multiprocessors * blocks_per_multiprocessor;
}

// accumulate with S::EARLY blocks of weights decoded before the wait, which leaves mma alone to be done for them when x
// is there; a block that has nothing to wait for decodes them while x is under way. x is loaded S::AHEAD blocks before
// its turn over all rounds.
template <int NT, class P, class S, class Meanwhile>
__device__ __forceinline__ void accumulate_early(float (&c)[S::TILES][ACCUMULATORS][NT][4], const u8* (&tile)[S::TILES],
                                                 const __nv_bfloat16* __restrict__ x, int stride, int M, int first,
                                                 int lane, Meanwhile& meanwhile) {
    constexpr int COUNT = S::STATIC_K / TILE_K, ROUNDS = (COUNT + P::STEP - 1) / P::STEP;
    static_assert(COUNT >= P::STEP && S::EARLY <= 4);  // every warp has a supertile, and loads it first
    const int mine = COUNT % P::STEP == 0 ? ROUNDS : (COUNT - first + P::STEP - 1) / P::STEP;
    const LaneRows<NT> rows(x, stride, M, lane >> 2, first * TILE_K + (lane & 3) * 16);
    Supertile weights[S::TILES];
#pragma unroll
    for (int j = 0; j < S::TILES; ++j) {
        tile[j] += (size_t)first * SUPERTILE_BYTES;
        load_early(weights[j], tile[j], lane);
    }
    meanwhile.ahead();
    // Blocks are counted over all rounds; a block of the next supertile takes the place of one that is used up.
    auto decode_next = [&](Decoded& a, int j, int block, bool is_pinned) {
        const int r = block / 4 + 1, b = block % 4;
        decode_block(a, weights[j].codes[b], scale_low(weights[j], b), scale_high(weights[j], b));
        if (r >= ROUNDS || r >= mine) return;
        const u8* next = tile[j] + r * P::STEP * SUPERTILE_BYTES;
        const u8 *codes = next + b * 512 + lane * 16, *scales = next + CODE_BYTES + lane * 8;
        weights[j].codes[b] = is_pinned ? load_codes_now(codes) : load_codes(codes);
        if (b == 3) weights[j].scales = is_pinned ? load_scales_now(scales) : load_scales(scales);
    };
    Decoded early[S::EARLY][S::TILES];
    auto decode_early = [&] {
#pragma unroll
        for (int block = 0; block < S::EARLY; ++block)
#pragma unroll
            for (int j = 0; j < S::TILES; ++j) decode_next(early[block][j], j, block, true);
    };
    const bool waits = is_in_first_wave(P::template BLOCKS<NT>);
    if (waits) decode_early();
    pdl_wait();
    meanwhile.begin();
    uint4 xs[S::AHEAD][NT][2];
    auto load_x = [&](int block) {
        const int r = block / 4;
        if (r < ROUNDS && r < mine) rows.load(xs[block % S::AHEAD], r * P::STEP * TILE_K + block % 4 * 64, 1 << 30);
    };
#pragma unroll
    for (int block = 0; block < S::AHEAD; ++block) load_x(block);
    if (!waits) decode_early();
#pragma unroll
    for (int block = 0; block < 4 * ROUNDS; ++block) {
        if (block / 4 >= mine) continue;
#pragma unroll
        for (int j = 0; j < S::TILES; ++j) {
            if (block < S::EARLY) {
                multiply_decoded(c[j], early[block < S::EARLY ? block : 0][j], xs[block % S::AHEAD]);
            } else {
                Decoded a;
                decode_next(a, j, block, false);
                multiply_decoded(c[j], a, xs[block % S::AHEAD]);
            }
        }
        load_x(block + S::AHEAD);
        if (block == 3) meanwhile.go_on();
    }
}

// A group of tiles, SIDES * S::TILES of them, for all rows of x: load and multiply, reduce over warps, reduce over the
// cluster, store. ``tiles`` are those that this warp takes; with two SIDES the second half of the warps has others than
// the first. ``store(row, column, sums)`` gets JOINT sums at a time, of columns as far apart as a JOINT-th of the
// group. Launch: SIDES * P::WARPS * 32 threads, P::CLUSTER blocks a group.
template <int NT, class P, int SIDES, int JOINT, class Meanwhile, class Store>
__device__ __forceinline__ void gemv_group(const u8* (&tiles)[P::template ShapeOf<NT>::TILES],
                                           const __nv_bfloat16* __restrict__ x, int stride, int M, int K, int rank,
                                           Meanwhile& meanwhile, Store store) {
    using S = typename P::template ShapeOf<NT>;
    constexpr int COLUMNS = SIDES * S::TILES * TILE_N, PLACES = COLUMNS / JOINT, THREADS = SIDES * P::WARPS * 32;
    constexpr int UNROLL = PLACES * NT * 8 >= 4 * THREADS ? 4 : 1;  // rounds of stores for all rows
    __shared__ float partial[P::WARPS][NT * 8][COLUMNS];
    __shared__ float gathered[P::CLUSTER][NT * 8][COLUMNS];
    // Rank 0 counts the sums of the other ranks on an mbarrier. A second barrier of the cluster would do too, but it
    // orders all memory of the device and drops L1, where x lives. H200, 5120 x 17408, cold L2, us with the barrier /
    // with this: M = 1 17.1 / 16.5, M = 8 17.5 / 16.7, M = 16 21.1 / 21.1.
    __shared__ Mbarrier mbarrier;
    if constexpr (P::CLUSTER > 1) {
        if (rank == 0 && threadIdx.x == 0)
            mbarrier_init_expect_tx(&mbarrier, (P::CLUSTER - 1) * COLUMNS * M * sizeof(float));
        cluster_arrive_relaxed();
    }
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int side = SIDES == 1 ? 0 : threadIdx.x / (P::WARPS * 32);
    const int warp = (threadIdx.x >> 5) - side * P::WARPS;

    // Stage 1: each warp sums its share of K.
    float c[S::TILES][ACCUMULATORS][NT][4] = {};
    const int first = rank * P::WARPS + warp;
    if constexpr (S::EARLY > 0) accumulate_early<NT, P, S>(c, tiles, x, stride, M, first, lane, meanwhile);
    else accumulate<NT, P, S>(c, tiles, x, stride, M, K, first, lane, meanwhile);
#pragma unroll
    for (int j = 0; j < S::TILES; ++j)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = n * 8 + 2 * t + (i & 1), tile = side * S::TILES + j;
                if (row < M) partial[warp][row][tile * TILE_N + g + 8 * (i >> 1)] = c[j][0][n][i] + c[j][1][n][i];
            }

    // Stage 2: sums over warps, then over ranks, each in rising order.
    if constexpr (P::CLUSTER > 1) {
        if (rank != 0) cluster_wait();  // rank 0 expects what is sent now
    }
    __syncthreads();
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < PLACES * M; i += THREADS) {
        const int row = i / PLACES, column = i % PLACES;
        float sums[JOINT] = {};
#pragma unroll
        for (int w = 0; w < P::WARPS; ++w)
#pragma unroll
            for (int j = 0; j < JOINT; ++j) sums[j] += partial[w][row][j * PLACES + column];
        if constexpr (P::CLUSTER == 1) {
            store(row, column, sums);
        } else {
#pragma unroll
            for (int j = 0; j < JOINT; ++j) {
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
            float sums[JOINT] = {};
#pragma unroll
            for (int r = 0; r < P::CLUSTER; ++r)
#pragma unroll
                for (int j = 0; j < JOINT; ++j) sums[j] += gathered[r][row][j * PLACES + column];
            store(row, column, sums);
        }
    }
}

// A group of tiles of one weight with N rows, which lie next to each other. ``store(row, column, value)`` puts one
// output where it belongs, if that lies in the weight.
template <int NT, class P, int SIDES = 1, class Store, class Meanwhile>
__device__ __forceinline__ void gemv_tiles(const u8* __restrict__ weight, const __nv_bfloat16* __restrict__ x,
                                           int stride, float scale, int M, int N, int K, int group, int rank,
                                           Store store, Meanwhile& meanwhile) {
    constexpr int TILES = P::template ShapeOf<NT>::TILES, DEPTH = P::template ShapeOf<NT>::STATIC_K;
    const size_t tile_bytes = (size_t)(((DEPTH > 0 ? DEPTH : K) + TILE_K - 1) / TILE_K) * SUPERTILE_BYTES;
    const int last = (N - 1) / TILE_N, first = group * SIDES * TILES * TILE_N;
    const int own = SIDES == 1 ? group : group * SIDES + threadIdx.x / (P::WARPS * 32);
    const u8* tiles[TILES];
#pragma unroll
    for (int j = 0; j < TILES; ++j) tiles[j] = weight + min(own * TILES + j, last) * tile_bytes;
    gemv_group<NT, P, SIDES, 1>(
        tiles, x, stride, M, K, rank, meanwhile, [=](int row, int column, const float (&sums)[1]) {
            if (first + column < N) store(row, first + column, sums[0] * scale);
        });
}
template <int NT, class P, int SIDES = 1, class Store>
__device__ __forceinline__ void gemv_tiles(const u8* __restrict__ weight, const __nv_bfloat16* __restrict__ x,
                                           int stride, float scale, int M, int N, int K, int group, int rank,
                                           Store store) {
    Nothing meanwhile;
    gemv_tiles<NT, P, SIDES>(weight, x, stride, scale, M, N, K, group, rank, store, meanwhile);
}
