// One row of attention over a paged cache with the tensor cores. Decode and prefill share the function, so that a row
// of a prompt has the bits of a decode step. Used by paged_decode.cu and fresh.cu. sm_80 and newer.
//
//   out[h, :] = sum_t softmax_t(scale * q[h, :] . k[t, :]) * v[t, :]        h: up to 8 query heads of one key head
//
// A step is 64 tokens, a tile of 16 for each of the 4 warps of a block. Keys and values of a warp's tiles pass through
// the warp's own ring in shared memory, with SLOTS tiles in flight. Warps therefore do not wait for each other until
// the end of a KV split, where they combine their results. The cache is read once for all heads of a key head. Several
// blocks may share a row (split_kv.cuh).
//
//   scores    A = k (16 tokens x 16 d), B = q (16 d x 8 heads)
//   result    A = v transposed (16 d x 16 tokens), B = the weights (16 tokens x 8 heads), the transposed scores
//
// Numerics: scores, softmax and sums in FP32. A weight enters the tensor core as two BF16, with an error of 2^-17. One
// rounding at the end, and one more with a gate. Nothing beyond the context is read. A length beyond its pages, or a
// page outside the cache, gives a row of zeros.
#pragma once
#include "any_size.cuh"
#include "async_copy.cuh"
#include "bf16.cuh"
#include "fast_math.cuh"
#include "global_memory.cuh"
#include "mma.cuh"
#include "named_barrier.cuh"
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

// One row, a block a group of splits. Launch: THREADS threads, and dynamic shared memory for Shared. By all threads of
// a block, after pdl_wait. ``entry`` is the table entry of this thread's first token. A length beyond its pages counts
// as 0. scale includes log2(e).
template <int D, class Source>
__device__ __forceinline__ void attend_per_group(const PagedCache& cache, ContextRow row, int entry, float scale,
                                                 const RowBlocks& row_blocks, Source& source) {
    constexpr int SLOTS = SwizzledRows<D>::SLOTS, TILE_BYTES = SwizzledRows<D>::TILE_BYTES,
                  RING_BYTES = SwizzledRows<D>::RING_BYTES;
    using Memory = AttentionShared<D, typename Source::Memory>;
    static_assert(sizeof(Memory) <= WARPS * RING_BYTES + OTHER_BYTES);
    extern __shared__ __align__(1024) unsigned char memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    source.begin(shared.q, row);  // before the first use of the length
    cp_async_commit();
    row.length = checked_length(row.length, cache, row.entries);
    const Splits splits(row.length, row_blocks.max_splits);
    if (row_blocks.index >= max(splits.groups, 1)) {
        cp_async_wait<0>();
        return;
    }

    // Stage 1, prologue: the first tiles, and the queries.
    SplitIterator now(row_blocks.index * GROUP_SPLITS, splits), next = now;
    const int lane_token = TILE_TOKENS * warp + (lane & 15);
    const u32 ring = shared_address(shared.tiles) + warp * RING_BYTES, stride = cache.key_heads * SwizzledRows<D>::VECS;
    const u32 target = ring + SwizzledRows<D>::template target<1>(0);
    const size_t of_head = row.key_head * SwizzledRows<D>::VECS;
    const uint4* const keys =
        SwizzledRows<D>::template columns<1>(reinterpret_cast<const uint4*>(cache.k) + of_head, 0);
    const uint4* const values =
        SwizzledRows<D>::template columns<1>(reinterpret_cast<const uint4*>(cache.v) + of_head, 0);
    u32 offset = 0, valid_mask = 0;  // of the next copy
    bool is_invalid = false, has_tile = false;
    // Starts the copy of the next tile's keys, or of the same tile's values, to a slot of the ring. The table entry of
    // the tile after it is loaded first: after the copies it would arrive only when they have.
    auto fetch = [&](bool is_value, u32 to) {
        if (!is_value) {
            has_tile = next.split != NO_SPLIT;
            const int token = next.token + lane_token;
            const int at = token < row.length && has_tile ? cache.offset(entry, token, is_invalid) : NO_OFFSET;
            offset = (u32)max(at, 0) * stride;
            valid_mask = __ballot_sync(0xffffffffu, at != NO_OFFSET);
            if (has_tile) next.advance(row, row_blocks, splits);
            const int later = next.token + lane_token;
            entry =
                load_now_if(next.split != NO_SPLIT && later < row.length, row.table + cache.page_of(later), NO_OFFSET);
        }
        if (has_tile) SwizzledRows<D>::template fetch<1>(target + to, is_value ? values : keys, offset, valid_mask);
        cp_async_commit();
    };
    // The block of the newest token.
    const int newest = row.length - 1, newest_split = splits.count > 0 ? newest / STEP_TOKENS % splits.count : 0;
    const bool is_owner = newest_split / GROUP_SPLITS % row_blocks.num_blocks == row_blocks.index;
    WarpQueries<D, 1> q;
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) fetch(i & 1, i * TILE_BYTES);
    source.make(shared.q, shared.fresh, row, is_owner);
    source.template end<SLOTS>();
    q.load(shared.q, 0);
    const int replaced = Source::FROM_PROJECTIONS && source.has_new_token() ? newest : -1;

    // Stage 2, mainloop: tile after tile.
    Softmax softmax;
    Columns<D / 16> o[1] = {};
    PartialOutput<D / 64> group, combined;
    u32 used = 0;  // the offset of the next tile
    int groups_done = 0;
#pragma unroll 1
    while (now.split != NO_SPLIT) {
        const int token = now.token + TILE_TOKENS * warp, split = now.split;
        const bool has_newest = Source::FROM_PROJECTIONS && (u32)(replaced - token) < TILE_TOKENS;

        cp_async_wait<SLOTS - 1>();
        __syncwarp();
        if constexpr (Source::FROM_PROJECTIONS)
            if (has_newest) SwizzledRows<D>::replace(ring + used, replaced - token, shared.fresh.key, 0, 1);
        float s[4];
        score<D, 1>(s, q, ring + used, 0);
        __syncwarp();
        fetch(SLOTS & 1, used);
        used = used + TILE_BYTES == RING_BYTES ? 0 : used + TILE_BYTES;
        mask(s, scale, row.length - token);
        float2 alpha;
        const uint4 weights = softmax.weigh(s, alpha);

        cp_async_wait<SLOTS - 1>();
        __syncwarp();
        if constexpr (Source::FROM_PROJECTIONS)
            if (has_newest) SwizzledRows<D>::replace(ring + used, replaced - token, shared.fresh.value, 0, 1);
        rescale<1, D / 16>(o, {alpha});
        add_values<D, 1, D / 16>(o, {weights}, ring + used, 0, 0);
        __syncwarp();
        now.advance(row, row_blocks, splits);
        if (now.split != split) {  // the end of the split
            softmax.publish(shared.of_tile[warp], __any_sync(0xffffffffu, is_invalid));
            float4* const slot = shared.tiles + used / 16;
#pragma unroll
            for (int j = 0; j < D / 16; ++j)
                slot[warp * (RING_BYTES / 16) + j * 32 + lane] =
                    make_float4(o[0][j][0], o[0][j][1], o[0][j][2], o[0][j][3]);
            __syncthreads();
            PartialOutput<D / 64> result;
            combine_warps<D>(result, shared.of_tile, slot);
            if (splits.count == 1) {
                combined = result;
                break;
            }
            __syncthreads();
            const SoftmaxStats stats[2] = {result.of_head[0].stats(), result.of_head[1].stats()};
            group.merge(result.total, stats);
            if (now.split >= splits.count ||
                now.split / GROUP_SPLITS != split / GROUP_SPLITS) {  // the end of the group
                if (splits.groups == 1) {
                    combined = group;
                    break;
                }
                const SoftmaxStats of_group[2] = {group.of_head[0].stats(), group.of_head[1].stats()};
                if (row_blocks.num_blocks > 1) GroupPartial<D>(row_blocks, split / GROUP_SPLITS).write(group);
                else combined.merge(group.total, of_group);
                group = PartialOutput<D / 64>();
                ++groups_done;
            }
            softmax = Softmax();
#pragma unroll
            for (int j = 0; j < D / 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[0][j][i] = 0.0f;
        }
        fetch((SLOTS + 1) & 1, used);
        used = used + TILE_BYTES == RING_BYTES ? 0 : used + TILE_BYTES;
    }

    // Stage 3, epilogue: the last block combines the groups of all blocks.
    if (splits.groups > 1 && row_blocks.num_blocks > 1) {
        if (!is_last_block(row_blocks.zeros, groups_done, splits.groups)) return;
#pragma unroll 4
        for (int of = 0; of < splits.groups; ++of) GroupPartial<D>(row_blocks, of).merge(combined);
    }
    combined.write(row, D);
}

// A barrier of two warps.
__device__ __forceinline__ void pair_barrier(int pair) { named_barrier_sync(1 + pair, 64); }

// A block without a split: it combines some columns of all splits.
template <int D>
__device__ __forceinline__ void combine_splits(const PagedCache& cache, const ContextRow& row,
                                               const RowBlocks& row_blocks) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Splits splits(checked_length(row.length, cache, row.entries), row_blocks.max_splits);
    if (splits.count > 1)
        combine_columns<D>(reinterpret_cast<GroupSums*>(memory), row.out, row.gate, row.heads, row_blocks.zeros,
                           row_blocks.num_blocks, splits.count, row_blocks.index - row_blocks.num_blocks);
}

// One row, a block a split, with SplitConfig<D>::THREADS threads. Warps share tiles: a warp computes the scores of a
// tile, or those of half of the columns, and later some columns of the results of all tiles. ``entries``: the table
// entries of later steps assume the most splits. Only contexts with so many splits need them, so that no load waits for
// the length.
template <int D, class Source>
__device__ __forceinline__ void attend_per_split(const PagedCache& cache, ContextRow row, TableEntries entries,
                                                 float scale, const RowBlocks& row_blocks, Source& source) {
    constexpr int SLOTS = SwizzledRows<D>::SLOTS, TILE_BYTES = SwizzledRows<D>::TILE_BYTES,
                  RING_BYTES = SwizzledRows<D>::RING_BYTES;
    constexpr int HALVES = SplitConfig<D>::HALVES, J = SplitConfig<D>::J;
    using Memory = AttentionShared<D, typename Source::Memory>;
    static_assert(sizeof(Memory) <= WARPS * RING_BYTES + OTHER_BYTES);
    extern __shared__ __align__(1024) unsigned char memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = warp / HALVES, half = warp % HALVES;
    const int lane_token = TILE_TOKENS * tile + (lane & 15);
    int now = row_blocks.index * STEP_TOKENS;  // the first token of a step
    source.begin(shared.q, row);               // before the first use of the length
    cp_async_commit();
    __syncwarp();  // keeps loads before the copies, after which they would arrive late

    // Stage 1, prologue: the first tiles, and the queries. There is no branch before the copies. Everything that does
    // not need the length runs while it is in flight.
    const u32 tiles = shared_address(shared.tiles), ring = tiles + tile * RING_BYTES,
              stride = cache.key_heads * SwizzledRows<D>::VECS;
    const u32 target = ring + SwizzledRows<D>::template target<HALVES>(half);
    const size_t of_head = row.key_head * SwizzledRows<D>::VECS;
    const uint4* const keys =
        SwizzledRows<D>::template columns<HALVES>(reinterpret_cast<const uint4*>(cache.k) + of_head, half);
    const uint4* const values =
        SwizzledRows<D>::template columns<HALVES>(reinterpret_cast<const uint4*>(cache.v) + of_head, half);
    u32 offset = 0, valid_mask = 0;  // of the next copy
    int entry = entries.first;
    bool is_invalid = false, has_tile = true;
    make_opaque(row.length);
    make_opaque(entry);
    auto find = [&](int first) {
        const int token = first + lane_token;
        const bool exists = token < row.length, is_valid = (u32)entry < (u32)cache.pages;
        is_invalid |= exists & !is_valid;
        offset = exists & is_valid ? (u32)cache.offset_in(entry, token) * stride : 0;
        valid_mask = __ballot_sync(0xffffffffu, exists & is_valid);
    };
    auto copy = [&](const uint4* from, u32 to) {
        if (has_tile) SwizzledRows<D>::template fetch<HALVES>(target + to, from, offset, valid_mask);
        cp_async_commit();
    };
    row.length = checked_length(row.length, cache, row.entries);
    find(now);
    copy(keys, 0);
    // Copies arrive in their order: the keys of all warps first, so that scores are computed before values arrive.
    __syncthreads();
    copy(values, TILE_BYTES);
    if (row_blocks.index > 0 && now >= row.length) {  // no split
        cp_async_wait<0>();
        return;
    }
    const Splits splits(row.length, row_blocks.max_splits);
    const int step = splits.count * STEP_TOKENS;
    // Starts the copy of the keys of the step from token ``first`` on, or of the same step's values, to a slot of the
    // ring. The table entry of the step after it is loaded first: after the copies it would arrive only when they have.
    // With queries from projections, the entry of the third step is already there: otherwise the computation of the
    // queries would wait for it, and so for the copies.
    auto fetch = [&](bool is_value, u32 to, int first, bool is_second) {
        if (is_value) {
            copy(values, to);
            return;
        }
        has_tile = first < row.length;
        if (has_tile) find(first);
        const int later = first + step + lane_token;
        if (Source::FROM_PROJECTIONS && is_second) entry = entries.third;
        else entry = load_now_if(later < row.length, row.table + cache.page_of(later), NO_OFFSET);
        copy(keys, to);
    };
    entry = entries.second;
    // The block of the newest token.
    const int newest = row.length - 1;
    const bool is_owner = splits.count == 0 || newest / STEP_TOKENS % splits.count == row_blocks.index;
    WarpQueries<D, HALVES> q;
#pragma unroll 1
    for (int i = 2; i < SLOTS; ++i) fetch(i & 1, i * TILE_BYTES, now + i / 2 * step, i == 2);
    source.make(shared.q, shared.fresh, row, is_owner);
    source.template end<SLOTS>();
    const bool replaces = Source::FROM_PROJECTIONS && source.has_new_token();

    // Stage 2, mainloop: step after step.
    Softmax softmax;
    Columns<J> of_tile[WARPS] = {};
    PartialOutput<J> result;
    const PartialSender<D> sender(row_blocks);
    u32 used = 0;  // the offset of the next tile
#pragma unroll 1
    while (now < row.length) {
        q.load(shared.q, half);  // 128 registers have no room for them between steps
        const int token = now + TILE_TOKENS * tile;
        const bool has_newest = replaces && (u32)(row.length - 1 - token) < TILE_TOKENS,
                   is_last_step = now + step >= row.length;
        const bool is_first_step = now == row_blocks.index * STEP_TOKENS;

        cp_async_wait<SLOTS - 1>();
        __syncwarp();
        if constexpr (Source::FROM_PROJECTIONS)
            if (has_newest)
                SwizzledRows<D>::replace(ring + used, row.length - 1 - token, shared.fresh.key, half, HALVES);
        float s[4];
        score<D, HALVES>(s, q, ring + used, half);
        __syncwarp();
        if (HALVES > 1) shared.exchange.half_scores[warp][lane] = make_float4(s[0], s[1], s[2], s[3]);
        fetch(SLOTS & 1, used, now + SLOTS / 2 * step, false);
        used = used + TILE_BYTES == RING_BYTES ? 0 : used + TILE_BYTES;
        if (HALVES > 1) {
            pair_barrier(tile);
            const float4 other = shared.exchange.half_scores[warp ^ 1][lane];
            s[0] = __fadd_rn(s[0], other.x), s[1] = __fadd_rn(s[1], other.y);
            s[2] = __fadd_rn(s[2], other.z), s[3] = __fadd_rn(s[3], other.w);
        }
        mask(s, scale, row.length - token);
        float2 alpha;
        const uint4 weights = softmax.weigh(s, alpha);
        if (half == 0) {
            shared.exchange.weights[tile][lane] = weights;
            if (lane < 4) *reinterpret_cast<float2*>(&shared.exchange.alpha[tile][2 * lane]) = alpha;
            if (is_last_step) softmax.publish(shared.of_tile[tile], __any_sync(0xffffffffu, is_invalid));
        }
        PartialOutput<J> combined;  // of the last step only, so that it takes no registers before
        TileScales scales[2];
        if (is_last_step) {
            __syncthreads();
            merge_tiles(scales, combined.of_head, shared.of_tile);
            if (splits.count > 1) sender.send(combined.of_head);
        }

        cp_async_wait<SLOTS - 1>();
        __syncwarp();
        if constexpr (Source::FROM_PROJECTIONS)
            if (has_newest)
                SwizzledRows<D>::replace(ring + used, row.length - 1 - token, shared.fresh.value, half, HALVES);
        __syncthreads();
        uint4 all_weights[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) all_weights[w] = shared.exchange.weights[w][lane];
        if (!is_first_step) {
            float2 all_keep[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
                all_keep[w] = *reinterpret_cast<const float2*>(&shared.exchange.alpha[w][2 * (lane & 3)]);
            rescale<WARPS, J>(of_tile, all_keep);
        }
        add_values<D, WARPS, J>(of_tile, all_weights, tiles + used, RING_BYTES, warp * J);
        if (is_last_step) {
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
#pragma unroll
                for (int j = 0; j < J; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        combined.total[j][i] = scales[i & 1].add(combined.total[j][i], of_tile[w][j][i], w);
            if (splits.count == 1) {
                result = combined;
                break;
            }
            sender.send(combined.total);
            return;
        }
        now += step;
        __syncthreads();
        fetch((SLOTS + 1) & 1, used, now + SLOTS / 2 * step, false);
        used = used + TILE_BYTES == RING_BYTES ? 0 : used + TILE_BYTES;
    }
    result.write(row, D);
}

template <int D, bool SPLIT_KV>
__device__ __forceinline__ void attend(const PagedCache& cache, const ContextRow& row, const TableEntries& entries,
                                       float scale, const RowBlocks& row_blocks) {
    if constexpr (SPLIT_KV) {
        StoredQueries<D, SplitConfig<D>::WARPS> source;
        attend_per_split<D>(cache, row, entries, scale, row_blocks, source);
    } else {
        StoredQueries<D, WARPS> source;
        attend_per_group<D>(cache, row, entries.first, scale, row_blocks, source);
    }
}
