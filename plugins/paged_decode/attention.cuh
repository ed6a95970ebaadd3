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
#include "attention_tiles.cuh"
#include "async_copy.cuh"
#include "bf16.cuh"
#include "fast_math.cuh"
#include "global_memory.cuh"
#include "named_barrier.cuh"
#include "opaque.cuh"
#include "split_kv.cuh"
#include "shared_memory.cuh"

// One row, a block a group of splits. Launch: THREADS threads, and dynamic shared memory for AttentionShared. By all
// threads of a block, after pdl_wait. ``entry`` is the table entry of this thread's first token. A length beyond its
// pages counts as 0. scale includes log2(e).
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
