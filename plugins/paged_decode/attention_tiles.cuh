// Building blocks of paged attention on the tensor cores: swizzled rows, queries, scores, online softmax, weighted sums
// and the merge of warps. Used by attention.cuh, which describes the algorithm. sm_80 and newer.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "fast_math.cuh"
#include "mma.cuh"
#include "opaque.cuh"
#include "split_kv.cuh"
#include "shared_memory.cuh"

constexpr int NO_SPLIT = 0x7fffffff;
#define ATTENTION_BOUNDS __launch_bounds__(THREADS, 2)
#define SPLIT_KV_BOUNDS(D) __launch_bounds__(SplitConfig<D>::THREADS, 2)

// Tiles of keys or values of a warp in shared memory: 96 KB a block, two blocks a multiprocessor. Where a block is
// limited to 100 KB, 64 KB and one block. launch.py has the shared memory of both.
#if (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100)
constexpr int MAX_SLOTS = 3;
#else
constexpr int MAX_SLOTS = 2;
#endif
// The limit of everything else that a block has in shared memory.
constexpr int OTHER_BYTES = 12 * 1024;

// Rows of D values of tokens or heads in shared memory, with a swizzle of 16-byte vectors: the same vector of eight
// rows, which an ldmatrix reads, lies in different banks.
template <int D>
struct SwizzledRows {
    static constexpr int BYTES = 2 * D, VECS = D / 8, TILE_BYTES = TILE_TOKENS * BYTES;
    static constexpr int SLOTS = MAX_SLOTS * 256 / D, RING_BYTES = SLOTS * TILE_BYTES;  // of a warp

    __device__ __forceinline__ static int at(int row, int vec) { return row * BYTES + ((vec ^ (row & 7)) << 4); }

    // The destination of this lane's copies of a tile, and their source in a row: for all columns, or for the
    // ``part``-th of PARTS. 128 bytes of four rows at a time.
    template <int PARTS>
    __device__ __forceinline__ static u32 target(int part) {
        const int lane = threadIdx.x & 31;
        return part * (BYTES / PARTS) + at(lane / 8, lane & 7);
    }
    template <int PARTS>
    __device__ __forceinline__ static const uint4* columns(const uint4* rows, int part) {
        return rows + part * (VECS / PARTS) + (threadIdx.x & 7);
    }
    // Starts the copy of a tile, or of a part of it. Lane i has the offset of token i % 16 in vectors. All lanes have
    // the mask of existing tokens.
    template <int PARTS>
    __device__ __forceinline__ static void fetch(u32 to, const uint4* from, u32 offset, u32 valid_mask) {
        valid_mask >>= threadIdx.x >> 3 & 3;
#pragma unroll
        for (int i = 0; i < TILE_TOKENS / 4; ++i) {
            const uint4* const row = from + __shfl_sync(0xffffffffu, offset, (threadIdx.x >> 3 & 3) + 4 * i);
            const u32 is_valid = valid_mask >> 4 * i & 1;
#pragma unroll
            for (int c = 0; c < VECS / PARTS; c += 8)  // four rows further, the swizzle differs by 64
                cp_async_16((i & 1 ? to ^ 64 : to) + 4 * i * BYTES + 16 * c, row + c, is_valid * 16);
        }
    }
    // Replaces a row of a tile, or one of ``parts`` of its columns. By one warp.
    __device__ __forceinline__ static void replace(u32 tile, int row, const __nv_bfloat16* by, int part, int parts) {
        const int lane = threadIdx.x & 31;
        if (lane < VECS && lane / (VECS / parts) == part)
            store_shared_16(tile + at(row, lane), reinterpret_cast<const uint4*>(by)[lane]);
        __syncwarp();
    }
};

// The queries of a row in shared memory. Heads from row.heads on are zeros.
template <int D>
struct alignas(16) Queries {
    uint4 at[HEADS_PER_BLOCK * SwizzledRows<D>::VECS];

    __device__ __forceinline__ uint4& vec(int head, int i) { return at[head * SwizzledRows<D>::VECS + (i ^ head)]; }
};

// The source of a row's queries: memory. The other source computes them from projections, together with the newest
// token's key and value (fresh.cuh).
template <int D, int WARPS>
struct StoredQueries {
    static constexpr bool FROM_PROJECTIONS = false;
    static constexpr int THREADS = 32 * WARPS;
    struct Memory {};

    __device__ __forceinline__ static bool has_new_token() { return false; }
    __device__ __forceinline__ void begin(Queries<D>& q, const ContextRow& row) {
        constexpr int ALL = HEADS_PER_BLOCK * SwizzledRows<D>::VECS;
#pragma unroll
        for (int first = 0; first < ALL; first += THREADS) {
            const u32 i = first + threadIdx.x, head = i / SwizzledRows<D>::VECS, exists = head < row.heads;
            if (ALL % THREADS == 0 || i < ALL)
                cp_async_16(
                    shared_address(&q.vec(head, i % SwizzledRows<D>::VECS)), row.q + (exists ? 8 * i : 0), exists * 16);
        }
    }
    __device__ __forceinline__ void make(Queries<D>& q, Memory& memory, const ContextRow& row, bool is_owner) {}
    // PENDING: groups of copies that were started later.
    template <int PENDING>
    __device__ __forceinline__ void end() {
        cp_async_wait<PENDING>();
        __syncthreads();
    }
};

// Online softmax over tiles. Lane (g, t) has maximum and sum of heads 2t and 2t + 1. The sum covers its own tokens
// only.
struct Softmax {
    float largest[2] = {NO_MAX, NO_MAX}, sum[2] = {};

    // Takes the scores of a tile, s = {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)} as (token, head). Returns
    // weights: the high parts of tokens 2t, 2t + 1 and 2t + 8, 2t + 9 of head g, then their low parts. ``alphas`` gets
    // the factors of earlier sums.
    __device__ __forceinline__ uint4 weigh(float (&s)[4], float2& alphas) {
        float alpha[2];
        u32 high[2], low[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = fmaxf(s[h], s[2 + h]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            top = fmaxf(largest[h], top);
            alpha[h] = exp2_approx(__fsub_rn(largest[h], top));
            largest[h] = top;
            s[h] = exp2_approx(__fsub_rn(s[h], top));
            s[2 + h] = exp2_approx(__fsub_rn(s[2 + h], top));
            sum[h] = __fmaf_rn(sum[h], alpha[h], __fadd_rn(s[h], s[2 + h]));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 pair = bf16_pair(s[2 * i], s[2 * i + 1]);
            high[i] = movmatrix_trans(pair);
            low[i] = movmatrix_trans(bf16_pair(__fsub_rn(s[2 * i], __uint_as_float(pair << 16)),
                                               __fsub_rn(s[2 * i + 1], __uint_as_float(pair & 0xffff0000u))));
        }
        alphas = make_float2(alpha[0], alpha[1]);
        return make_uint4(high[0], high[1], low[0], low[1]);
    }

    __device__ __forceinline__ SoftmaxStats stats(int h, bool is_invalid) const {
        float total = sum[h];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, step));
        return make_float2(largest[h], is_invalid ? -1.0f : total);
    }
    __device__ __forceinline__ void publish(SoftmaxStats (&of_heads)[HEADS_PER_BLOCK], bool is_invalid) const {
        const SoftmaxStats first = stats(0, is_invalid), second = stats(1, is_invalid);
        const int lane = threadIdx.x & 31;
        if (lane < 4)
            *reinterpret_cast<float4*>(&of_heads[2 * lane]) = make_float4(first.x, first.y, second.x, second.y);
    }
};

// Multiplies the sums of COUNT tiles by alpha, if any alpha is not 1.
template <int COUNT, int J>
__device__ __forceinline__ void rescale(Columns<J> (&o)[COUNT], const float2 (&alpha)[COUNT]) {
    bool is_kept = true;
#pragma unroll
    for (int w = 0; w < COUNT; ++w) is_kept = is_kept && alpha[w].x == 1.0f && alpha[w].y == 1.0f;
    if (__any_sync(0xffffffffu, !is_kept)) {
#pragma unroll
        for (int w = 0; w < COUNT; ++w)
#pragma unroll
            for (int j = 0; j < J; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[w][j][i] = __fmul_rn(o[w][j][i], i & 1 ? alpha[w].y : alpha[w].x);
    }
}

// Adds weights times values of COUNT tiles, ``stride`` bytes apart, for J times 16 columns from 16 * ``first`` on.
template <int D, int COUNT, int J>
__device__ __forceinline__ void add_values(Columns<J> (&o)[COUNT], const uint4 (&weights)[COUNT], u32 tile, u32 stride,
                                           int first) {
    const int lane = threadIdx.x & 31;
    const u32 row = tile + SwizzledRows<D>::at((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
    // Products on the same accumulator are interleaved with others, because they wait for each other.
#pragma unroll
    for (int w = 0; w < COUNT; w += 2) {
        u32 a[COUNT > 1 ? 2 : 1][J][4];
#pragma unroll
        for (int n = 0; n < min(COUNT, 2); ++n)
#pragma unroll
            for (int j = 0; j < J; ++j) ldmatrix_x4_trans(a[n][j], row + (w + n) * stride ^ (first + j << 5));
#pragma unroll
        for (int n = 0; n < min(COUNT, 2); ++n)
#pragma unroll
            for (int j = 0; j < J; ++j) mma_16x8x16(o[w + n][j], a[n][j], weights[w + n].x, weights[w + n].y);
#pragma unroll
        for (int n = 0; n < min(COUNT, 2); ++n)
#pragma unroll
            for (int j = 0; j < J; ++j) mma_16x8x16(o[w + n][j], a[n][j], weights[w + n].z, weights[w + n].w);
    }
}

// The queries of a warp: all columns, or one of HALVES.
template <int D, int HALVES>
struct WarpQueries {
    static constexpr int STEPS = D / 16 / HALVES;
    u32 at[STEPS / 2][4];

    __device__ __forceinline__ void load(Queries<D>& q, int half) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int j = 0; j < STEPS / 2; ++j)
            ldmatrix_x4(at[j], shared_address(&q.vec(lane & 7, half * (STEPS * 2) + 4 * j + (lane >> 3))));
    }
};

// The scores of a tile of keys, or the part from one of HALVES of the columns. Each 64 columns have a sum of their own:
// products on one accumulator wait for each other.
template <int D, int HALVES>
__device__ __forceinline__ void score(float (&s)[4], const WarpQueries<D, HALVES>& q, u32 tile, int half) {
    constexpr int STEPS = WarpQueries<D, HALVES>::STEPS, SUMS = D / 64;
    const int lane = threadIdx.x & 31;
    const u32 row = tile + SwizzledRows<D>::at(lane & 15, lane >> 4);
    float parts[SUMS / HALVES][4] = {};
#pragma unroll
    for (int n = 0; n < STEPS; ++n) {
        const int part = n % (SUMS / HALVES), i = 4 * part + n / (SUMS / HALVES);
        u32 a[4];
        ldmatrix_x4(a, row ^ (half * STEPS + i << 5));
        mma_16x8x16(parts[part], a, q.at[i / 2][i % 2 * 2], q.at[i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        s[i] = parts[0][i];
        if constexpr (SUMS / HALVES > 1) s[i] = __fadd_rn(s[i], parts[1][i]);
        if constexpr (SUMS / HALVES > 2) s[i] = __fadd_rn(s[i], __fadd_rn(parts[2][i], parts[3][i]));
    }
}

// The position of a block in the context: the step from ``token`` on, in ``split``.
struct SplitIterator {
    int split, token;

    __device__ __forceinline__ SplitIterator(int split_, const Splits& splits)
        : split(split_), token(split_ * STEP_TOKENS) {
        if (split >= splits.count) split = token = NO_SPLIT;
    }
    __device__ __forceinline__ static int after(int split, const RowBlocks& row_blocks) {
        return (split + 1) % GROUP_SPLITS != 0 ? split + 1 : split + 1 + (row_blocks.num_blocks - 1) * GROUP_SPLITS;
    }
    __device__ __forceinline__ void advance(const ContextRow& row, const RowBlocks& row_blocks, const Splits& splits) {
        token += splits.count * STEP_TOKENS;
        if (token >= row.length) *this = SplitIterator(after(split, row_blocks), splits);
    }
};

// Scaled scores of ``count`` existing tokens. The others become -infinity.
__device__ __forceinline__ void mask(float (&s)[4], float scale, int count) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = g + 8 * (i >> 1) < count ? __fmul_rn(s[i], scale) : neg_infinity();
}

// The results of a tile's warp for all warps of the block, with SPLIT_KV.
struct WarpExchange {
    uint4 weights[WARPS][32];
    alignas(16) float alpha[WARPS][HEADS_PER_BLOCK];
    float4 half_scores[2 * WARPS][32];
};

// The shared memory of a block.
template <int D, class Memory>
struct AttentionShared {
    float4 tiles[WARPS * SwizzledRows<D>::RING_BYTES / 16];  // [WARPS][SLOTS][TILE_TOKENS][D] of BF16
    Queries<D> q;
    alignas(16) SoftmaxStats of_tile[WARPS][HEADS_PER_BLOCK];
    Memory fresh;
    WarpExchange exchange;
};

// The scales of the tiles, and their merged softmax, for heads 2t and 2t + 1.
__device__ __forceinline__ void merge_tiles(TileScales (&tiles)[2], SoftmaxMerge (&all)[2],
                                            const SoftmaxStats (&of_tile)[WARPS][HEADS_PER_BLOCK]) {
    SoftmaxStats even[WARPS], odd[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float4 both = *reinterpret_cast<const float4*>(&of_tile[w][2 * (threadIdx.x & 3)]);
        even[w] = make_float2(both.x, both.y), odd[w] = make_float2(both.z, both.w);
    }
    all[0] = tiles[0].merge(even), all[1] = tiles[1].merge(odd);
}

// Combines the warps of a block into the result of a split. The warps' results lie in their tiles at ``slot``.
template <int D>
__device__ __forceinline__ void combine_warps(
    PartialOutput<D / 64>& result, const SoftmaxStats (&of_tile)[WARPS][HEADS_PER_BLOCK], const float4* slot) {
    const int lane = threadIdx.x & 31, first = threadIdx.x / 32 * (D / 64);
    TileScales tiles[2];
    merge_tiles(tiles, result.of_head, of_tile);
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
#pragma unroll
        for (int j = 0; j < D / 64; ++j) {
            const float4 v = slot[w * (SwizzledRows<D>::RING_BYTES / 16) + (first + j) * 32 + lane];
            const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) result.total[j][i] = tiles[i & 1].add(result.total[j][i], values[i], w);
        }
}
