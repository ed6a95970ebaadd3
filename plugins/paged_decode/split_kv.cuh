// Split-KV: how a context is divided into splits, which block has which split, and how partial results become one row.
// Used by attention.cuh and any_size.cuh. sm_80 and newer.
//
// A context is divided by its length only: its steps go to the splits in turn. GROUP_SPLITS consecutive splits are a
// group. The warps of a split are merged at once, then the splits of a group in order, then the groups in order. The
// bits of a row are the same for all divisions of work:
//   one split        the block of the split writes the result
//   few rows         a block a split, which sends partial results to blocks without a split. Each of those combines
//                    some columns.
//   many rows        a block has all splits of a group, group after group. The last block combines the groups.
//
// Blocks that combine are the last of the grid, so that the blocks that they wait for have started before.
#pragma once
#include "bf16.cuh"
#include "paged_cache.cuh"
#include "fast_math.cuh"
#include "global_memory.cuh"
#include "opaque.cuh"

constexpr int GROUP_SPLITS = 8, MAX_GROUPS = 8;
// The fewest tokens of a split.
constexpr int MIN_SPLIT_TOKENS = 64;

// -infinity is the score of a missing token. NO_MAX, the maximum of no scores, is finite, so that a missing token has
// weight 2^-infinity = 0.
__device__ __forceinline__ float neg_infinity() { return __int_as_float(0xff800000); }
constexpr float NO_MAX = -3.0e38f;

// The splits of a row, from its length only. ``max_splits`` is the same for all rows, and for all launches with these
// heads.
struct Splits {
    int count, groups;

    __device__ __forceinline__ Splits(int length, int max_splits)
        : count(min(max_splits, (length + MIN_SPLIT_TOKENS - 1) / MIN_SPLIT_TOKENS)),
          groups((count + GROUP_SPLITS - 1) / GROUP_SPLITS) {}
};

// This block among the blocks of a row and key head: the index of its split with SPLIT_KV, else of its first group, and
// the number of blocks with splits or groups. ``scratch`` and ``zeros`` hold partial results. ``zeros`` is zero between
// launches.
struct RowBlocks {
    int index, num_blocks, max_splits;
    float* scratch;
    u32* zeros;
};

// Maximum score and sum of weights. The sum is -1 for a page outside the cache.
using SoftmaxStats = float2;

// The softmax of partial results, merged one after the other, of one head.
struct SoftmaxMerge {
    float top = NO_MAX, weight = 0.0f;
    bool is_invalid = false;

    // Returns the scales of the values so far, and of the new ones.
    __device__ __forceinline__ float2 merge(SoftmaxStats part) {
        const bool is_larger = part.x > top;
        const float smaller_scale = exp2_approx(-fabsf(__fsub_rn(top, part.x)));
        const float old_scale = is_larger ? smaller_scale : 1.0f, new_scale = is_larger ? 1.0f : smaller_scale;
        weight = __fmaf_rn(new_scale, part.y, __fmul_rn(weight, old_scale));
        top = is_larger ? part.x : top;
        is_invalid |= part.y < 0.0f;
        return make_float2(old_scale, new_scale);
    }
    __device__ __forceinline__ SoftmaxStats stats() const { return make_float2(top, is_invalid ? -1.0f : weight); }
};

__device__ __forceinline__ float rescale_add(float total, float value, float2 scales) {
    return __fmaf_rn(scales.y, value, __fmul_rn(total, scales.x));
}

// A result as it is stored. ``inverse`` is 1 / (sum of weights), and ``factor`` comes from the gate. -0 becomes 0,
// because it depends on the division of work.
__device__ __forceinline__ bf16 finish_output(float total, bool is_zero, float inverse, bool is_gated, float factor) {
    const float mean = __fmul_rn(__fadd_rn(total, 0.0f), inverse);
    const bf16 rounded = __float2bfloat16_rn(is_zero ? 0.0f : mean);
    return is_gated ? __float2bfloat16_rn(__fmul_rn(__bfloat162float(rounded), factor)) : rounded;
}

// Writes the results of heads 2t and 2t + 1 in column c + g of lane (g, t) = (lane / 4, lane % 4): after an exchange, a
// lane has two columns of one head. By whole warps.
__device__ __forceinline__ void write_columns(bf16* out, bool exists, float2 of_heads, float weight, float inverse,
                                              bool is_gated, u32 gate) {
    const bool is_odd = threadIdx.x & 4;
    const float value = is_odd ? of_heads.y : of_heads.x;
    const float got = __shfl_xor_sync(0xffffffffu, is_odd ? of_heads.x : of_heads.y, 4);
    // -0 becomes 0, because it depends on the division of work.
    const float low = __fmul_rn(__fadd_rn(is_odd ? got : value, 0.0f), inverse);
    const float high = __fmul_rn(__fadd_rn(is_odd ? value : got, 0.0f), inverse);
    u32 words = weight <= 0.0f ? 0u : bf16_pair(low, high);
    if (is_gated)
        words =
            bf16_pair(__fmul_rn(__uint_as_float(words << 16), sigmoid(__uint_as_float(gate << 16))),
                      __fmul_rn(__uint_as_float(words & 0xffff0000u), sigmoid(__uint_as_float(gate & 0xffff0000u))));
    if (exists) *reinterpret_cast<u32*>(out) = words;
}

// Accumulators of the tensor core: o[j] = {(2t, d), (2t + 1, d), (2t, d + 8), (2t + 1, d + 8)} as (head, d), d = 16 j +
// g from some column on.
template <int J>
using Columns = float[J][4];

// The scales of the tiles of a split, for one head. They are merged at once.
struct TileScales {
    float scales[WARPS];

    __device__ __forceinline__ SoftmaxMerge merge(const SoftmaxStats (&tiles)[WARPS]) {
        SoftmaxMerge all;
        all.top = fmaxf(fmaxf(tiles[0].x, tiles[1].x), fmaxf(tiles[2].x, tiles[3].x));
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            scales[w] = exp2_approx(__fsub_rn(tiles[w].x, all.top));
            all.weight = w == 0 ? __fmul_rn(scales[0], tiles[0].y) : __fmaf_rn(scales[w], tiles[w].y, all.weight);
            all.is_invalid |= tiles[w].y < 0.0f;
        }
        return all;
    }
    __device__ __forceinline__ float add(float total, float value, int w) const {
        return w == 0 ? __fmul_rn(scales[0], value) : __fmaf_rn(scales[w], value, total);
    }
};

template <int J>
__device__ __forceinline__ void rescale_add_columns(Columns<J>& total, const Columns<J>& part,
                                                    const float2 (&scales)[2]) {
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[j][i] = rescale_add(total[j][i], part[j][i], scales[i & 1]);
}

// Partial results of a block, merged one after the other. Warp w has 16 * J columns from 16 * J * w on.
template <int J>
struct PartialOutput {
    Columns<J> total = {};
    SoftmaxMerge of_head[2];  // 2t and 2t + 1

    __device__ __forceinline__ static int first_column() { return threadIdx.x / 32 * (16 * J); }
    __device__ __forceinline__ void merge(const Columns<J>& part, const SoftmaxStats (&stats)[2]) {
        const float2 scales[2] = {of_head[0].merge(stats[0]), of_head[1].merge(stats[1])};
        rescale_add_columns<J>(total, part, scales);
    }

    __device__ __forceinline__ void write(const ContextRow& row, int D) const {
        const int g = threadIdx.x >> 2 & 7, head = 2 * (threadIdx.x & 3) + (g & 1),
                  at = head * D + first_column() + (g & ~1);
        const bool exists = head < row.heads, is_gated = row.gate != nullptr;
        const float even = of_head[0].stats().y, odd = of_head[1].stats().y, weight = g & 1 ? odd : even;
        const float inverse = __frcp_rn(weight);
        u32 gates[2 * J] = {};
        if (is_gated && exists)
#pragma unroll
            for (int i = 0; i < 2 * J; ++i) gates[i] = *reinterpret_cast<const u32*>(row.gate + at + 8 * i);
#pragma unroll
        for (int i = 0; i < 2 * J; ++i)
            write_columns(
                row.out + at + 8 * i, exists, make_float2(total[i / 2][i % 2 * 2], total[i / 2][i % 2 * 2 + 1]), weight,
                inverse, is_gated, gates[i]);
    }
};

// --- many rows: groups in scratch memory ---

// The result of a group in the layout of the block's registers, and the statistics of all heads.
template <int D>
struct GroupPartial {
    static constexpr int FLOATS = HEADS_PER_BLOCK * (D + 2);
    float4* const at;

    __device__ __forceinline__ GroupPartial(const RowBlocks& row_blocks, int group)
        : at(reinterpret_cast<float4*>(row_blocks.scratch + (size_t)group * FLOATS)) {}
    __device__ __forceinline__ float4* stats() const { return at + HEADS_PER_BLOCK * D / 4 + (threadIdx.x & 3); }

    __device__ __forceinline__ void write(const PartialOutput<D / 64>& held) const {
        const SoftmaxStats first = held.of_head[0].stats(), second = held.of_head[1].stats();
#pragma unroll
        for (int j = 0; j < D / 64; ++j)
            at[j * THREADS + threadIdx.x] =
                make_float4(held.total[j][0], held.total[j][1], held.total[j][2], held.total[j][3]);
        if (threadIdx.x < 4) *stats() = make_float4(first.x, first.y, second.x, second.y);
    }
    __device__ __forceinline__ void merge(PartialOutput<D / 64>& held) const {
        const float4 both = __ldcg(stats());
        const SoftmaxStats of_head[2] = {make_float2(both.x, both.y), make_float2(both.z, both.w)};
        Columns<D / 64> part;
#pragma unroll
        for (int j = 0; j < D / 64; ++j) {
            const float4 v = __ldcg(at + j * THREADS + threadIdx.x);
            part[j][0] = v.x, part[j][1] = v.y, part[j][2] = v.z, part[j][3] = v.w;
        }
        held.merge(part, of_head);
    }
};

// Whether this block is the last to have written its groups: ``added`` of ``all``.
__device__ __forceinline__ bool is_last_block(u32* count, int added, int all) {
    bool is_all = false;
    __syncthreads();
    if (threadIdx.x == 0) {
        is_all = add_acq_rel(count, added) + added == all;
        if (is_all) *count = 0;
    }
    return __syncthreads_or(is_all);
}

// --- few rows: partial results ---

// The warps of a block with SPLIT_KV: two for each 16 tokens of a step, with half of the columns each, or one if there
// are fewer than 128 columns. Each has D / WARPS columns of the result.
template <int D>
struct SplitConfig {
    static constexpr int HALVES = D >= 128 ? 2 : 1, WARPS = ::WARPS * HALVES, THREADS = 32 * WARPS, J = D / WARPS / 16;
};

// The buffer of partial results. Its unit holds eight columns of a split: values [4, HEADS_PER_BLOCK, 2], each with the
// fourth column after it, then statistics. This is the order in the sender's registers, and the combining warp reads
// two columns at once. A word arrives when it is not zero: there is no counter, and a reader waits for its own words
// only. It sets them to zero again. A value of zero is sent as -0, which has the same effect.
struct Partials {
    static constexpr int PER_LANE = 2, COLUMNS = 4 * PER_LANE, STATS = COLUMNS * HEADS_PER_BLOCK,
                         WORDS = STATS + 2 * HEADS_PER_BLOCK;

    __device__ __forceinline__ static int words_of(int D) { return D / COLUMNS * WORDS; }  // of a split
    // Room for as many splits as the combining warps read, as launch.py counts it.
    __device__ __forceinline__ static int room_for(int count) { return (count + 15) / 16 * 16; }
    __device__ __forceinline__ static u32* at(u32* of_row, int D, int split, int part) {
        return of_row + (size_t)split * words_of(D) + part * WORDS;
    }
    __device__ __forceinline__ static u32 encode(float v) { return v == 0.0f ? 0x80000000u : __float_as_uint(v); }
};

// A lane of the block that sends the partial results of a split.
template <int D>
struct PartialSender {
    static constexpr int PARTS = 16 * SplitConfig<D>::J / Partials::COLUMNS;  // of a warp
    static_assert(PARTS <= 8);
    u32* words;

    __device__ __forceinline__ explicit PartialSender(const RowBlocks& row_blocks)
        : words(Partials::at(row_blocks.zeros, D, row_blocks.index, (threadIdx.x >> 5) * PARTS)) {
        make_opaque(words);
    }
    // The statistics are known before the values: the combining warps need them first.
    __device__ __forceinline__ void send(const SoftmaxMerge (&of_head)[2]) const {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const SoftmaxStats even = of_head[0].stats(), odd = of_head[1].stats();
        if (g < PARTS)
            store_relaxed(reinterpret_cast<uint4*>(words + g * Partials::WORDS + Partials::STATS) + t,
                          make_uint4(Partials::encode(even.x), Partials::encode(even.y), Partials::encode(odd.x),
                                     Partials::encode(odd.y)));
    }
    __device__ __forceinline__ void send(const Columns<SplitConfig<D>::J>& total) const {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int j = 0; j < SplitConfig<D>::J; ++j)
            store_relaxed(reinterpret_cast<uint4*>(words + (2 * j + (g >> 2)) * Partials::WORDS) +
                              (g & 3) * (HEADS_PER_BLOCK / 2) + t,
                          make_uint4(Partials::encode(total[j][0]), Partials::encode(total[j][2]),
                                     Partials::encode(total[j][1]), Partials::encode(total[j][3])));
    }
};

// Groups of the warps that combine the same columns, for the first of these warps. It reads the most groups that a row
// may have.
struct GroupSums {
    float2 total[2 * MAX_GROUPS][32];
    SoftmaxStats stats[2 * MAX_GROUPS][32];
};

// Combines the same columns by one or more warps, a lane one head of PER_LANE columns. By the ``index``-th block
// without a split.
template <int D>
__device__ __noinline__ void combine_columns(GroupSums* groups, bf16* out, const bf16* gate, int heads, u32* partials,
                                             int num_blocks, int splits, int index) {
    constexpr int BLOCK_WARPS = SplitConfig<D>::WARPS, OWN_GROUPS = MAX_GROUPS / BLOCK_WARPS,
                  OWN = OWN_GROUPS * GROUP_SPLITS;  // of a warp
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int warps = num_blocks > 4 * OWN ? 8 : num_blocks > 2 * OWN ? 4 : num_blocks > OWN ? 2 : 1;
    const int part = index * (BLOCK_WARPS / warps) + warp / warps, first = warp % warps * OWN, count = splits - first;
    const int head = lane % HEADS_PER_BLOCK;
    const bool is_first = first == 0, exists = is_first && head < heads;
    int out_offset = head * D + part / 2 * 16 + part % 2 * 4 + lane / HEADS_PER_BLOCK;
    u32* words = Partials::at(partials, D, first, part);
    make_opaque(out_offset);
    make_opaque(words);
    bf16 gates[Partials::PER_LANE] = {};
    if (exists && gate != nullptr)
#pragma unroll
        for (int c = 0; c < Partials::PER_LANE; ++c) gates[c] = gate[out_offset + 8 * c];

    // Stage 1: the statistics of the splits, before their values arrive. The buffer has room for whole groups. The
    // words beyond the splits are zero and are read too: with a branch, loads would wait for each other.
    float2 scales[OWN];
    if (count > 0) {
        uint2 stats[OWN];
        u32 missing;
        do {
            back_off();  // partials arrive late, and another block of this multiprocessor reads the cache
            missing = 0;
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                stats[i] = load_relaxed(
                    reinterpret_cast<const uint2*>(words + i * Partials::words_of(D) + Partials::STATS) + head);
#pragma unroll
            for (int i = 0; i < OWN; ++i) missing |= i < count && (stats[i].x == 0 || stats[i].y == 0);
        } while (__any_sync(0xffffffffu, missing != 0));
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; ++g) {
            SoftmaxMerge of_group;
#pragma unroll
            for (int i = g * GROUP_SPLITS; i < (g + 1) * GROUP_SPLITS; ++i) {
                const bool exists_here = i < count;
                scales[i] = of_group.merge(
                    make_float2(exists_here ? __uint_as_float(stats[i].x) : NO_MAX, __uint_as_float(stats[i].y)));
            }
            groups->stats[warp * OWN_GROUPS + g][lane] = of_group.stats();
        }
    } else {
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; ++g) {
            groups->stats[warp * OWN_GROUPS + g][lane] = make_float2(NO_MAX, 0.0f);
            groups->total[warp * OWN_GROUPS + g][lane] = make_float2(0.0f, 0.0f);
        }
    }
    __syncthreads();
    // Stage 2: the values, which are replaced by zeros. The scales of the groups are computed while the values are in
    // flight. The groups of other warps are read too, and ignored.
    const int all = warps * OWN_GROUPS, from = is_first ? warp * OWN_GROUPS : 0;
    // A read before this would find most words missing, and lines that are not in L2 would be fetched for nothing.
    uint2 values[OWN];
    auto look_at_values = [&] {
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            values[i] = load_relaxed(reinterpret_cast<const uint2*>(words + i * Partials::words_of(D)) + lane);
    };
    if (count > 0) look_at_values();
    float2 group_scales[MAX_GROUPS];
    float inverse = 0.0f, factors[Partials::PER_LANE];
    bool is_zero = true;
    if (is_first) {
        SoftmaxMerge merged;
        SoftmaxStats of_groups[MAX_GROUPS];
#pragma unroll
        for (int g = 0; g < MAX_GROUPS; ++g) of_groups[g] = groups->stats[from + g][lane];
#pragma unroll
        for (int g = 0; g < MAX_GROUPS; ++g)
            group_scales[g] = merged.merge(g < all ? of_groups[g] : make_float2(NO_MAX, 0.0f));
        inverse = __frcp_rn(merged.weight), is_zero = merged.stats().y <= 0.0f;
#pragma unroll
        for (int c = 0; c < Partials::PER_LANE; ++c) factors[c] = sigmoid(__bfloat162float(gates[c]));
    }
    if (count > 0) {
        while (true) {
            u32 missing = 0;
#pragma unroll
            for (int i = 0; i < OWN; ++i) missing |= i < count && (values[i].x == 0 || values[i].y == 0);
            if (!__any_sync(0xffffffffu, missing != 0)) break;
            look_at_values();
        }
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; ++g) {
            float2 total = {};
#pragma unroll
            for (int i = g * GROUP_SPLITS; i < (g + 1) * GROUP_SPLITS; ++i) {
                total.x = rescale_add(total.x, __uint_as_float(values[i].x), scales[i]);
                total.y = rescale_add(total.y, __uint_as_float(values[i].y), scales[i]);
            }
            groups->total[warp * OWN_GROUPS + g][lane] = total;
        }
        static_assert(Partials::WORDS % 4 == 0 && Partials::WORDS <= 4 * 32);
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (lane < Partials::WORDS / 4)
                store_relaxed(
                    reinterpret_cast<uint4*>(words + i * Partials::words_of(D)) + lane, make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
    if (!is_first) return;
    float2 total = {};
#pragma unroll
    for (int g = 0; g < MAX_GROUPS; ++g) {
        const float2 of_group = groups->total[from + g][lane];
        total.x = rescale_add(total.x, g < all ? of_group.x : 0.0f, group_scales[g]);
        total.y = rescale_add(total.y, g < all ? of_group.y : 0.0f, group_scales[g]);
    }
    if (exists) {
        out[out_offset] = finish_output(total.x, is_zero, inverse, gate != nullptr, factors[0]);
        out[out_offset + 8] = finish_output(total.y, is_zero, inverse, gate != nullptr, factors[1]);
    }
}

// The row, key head and eight query heads of a block, and its place among the blocks of the row. Grid: rows; key_heads
// * ceil(per_key / 8); blocks with splits, then with SPLIT_KV those that combine columns.
struct BlockCoord {
    int row, key_head, head, heads;

    __device__ __forceinline__ explicit BlockCoord(int per_key) {
        const int groups = (per_key + HEADS_PER_BLOCK - 1) / HEADS_PER_BLOCK;
        row = blockIdx.x;
        key_head = groups == 1 ? blockIdx.y : blockIdx.y / groups;
        const int group = blockIdx.y - key_head * groups;
        head = key_head * per_key + group * HEADS_PER_BLOCK;
        heads = min(HEADS_PER_BLOCK, per_key - group * HEADS_PER_BLOCK);
    }

    // With SPLIT_KV there are ``max_splits`` splits.
    template <int D, bool SPLIT_KV, bool FROM_PROJECTIONS>
    __device__ __forceinline__ static TableEntries table_entries_of(const PagedCache& cache, const int* table,
                                                                    int count, int max_splits) {
        const int tile = threadIdx.x / (SPLIT_KV ? 32 * SplitConfig<D>::HALVES : 32), step = max_splits * STEP_TOKENS;
        const int token = (int)blockIdx.z * (SPLIT_KV ? 1 : GROUP_SPLITS) * STEP_TOKENS + tile * TILE_TOKENS +
                          threadIdx.x % TILE_TOKENS;
        TableEntries found{load_table_entry(cache, table, count, token), NO_OFFSET, NO_OFFSET};
        if (SPLIT_KV) found.second = load_table_entry(cache, table, count, token + step);
        if (SPLIT_KV && FROM_PROJECTIONS) found.third = load_table_entry(cache, table, count, token + 2 * step);
        return found;
    }

    // The blocks of this block's row. If there are several, they have a buffer of partial results, or scratch memory
    // for the groups of ``max_splits`` and a counter.
    template <int D, bool SPLIT_KV>
    __device__ __forceinline__ RowBlocks row_blocks_of(int num_blocks, int max_splits, float* scratch,
                                                       u32* zeros) const {
        const int groups = (max_splits + GROUP_SPLITS - 1) / GROUP_SPLITS;
        const size_t row_blocks = (size_t)row * gridDim.y + blockIdx.y;
        return {(int)blockIdx.z, num_blocks, max_splits, scratch + row_blocks * groups * GroupPartial<D>::FLOATS,
                zeros + row_blocks * (SPLIT_KV ? Partials::room_for(num_blocks) * Partials::words_of(D) : 1)};
    }
};
