// Shared by the prefill kernels: the rows and the KV split of a block, addresses of tokens, copies, online softmax, and
// the parameters of entry points. prefill_mma.cuh describes the whole. split_kv.cuh combines splits. Used by
// prefill_mma.cuh and prefill_wgmma.cuh. sm_80 and newer.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "fast_math.cuh"
#include "shared_memory.cuh"

constexpr int NO_OFFSET = -1;  // of a missing row, whose copy is zeros
constexpr int MAX_TOKENS = 0x7fffffff;
// A block has 64 pairs of a row and a query head, 16 for each warp, and tiles of 64 tokens.
constexpr int ROWS = 64, TOKENS = 64, WARPS = 4, THREADS = WARPS * 32;
static_assert(ROWS == 16 * WARPS);

__device__ __forceinline__ float neg_infinity() { return __int_as_float(0xff800000); }  // -infinity

// The offsets of the rows that a warp copies: lane i has that of row i % (rows of a warp), in units of 16 bytes. All
// lanes have the mask of existing rows.
struct RowOffsets {
    u32 at, exists_mask;

    __device__ __forceinline__ RowOffsets(int offset, u32 stride)
        : at((u32)max(offset, 0) * stride), exists_mask(__ballot_sync(ALL_LANES, offset != NO_OFFSET)) {}
};

// Starts the copy of COUNT rows of D values to a tile, divided among the warps. Missing rows become zeros.
template <class T, int COUNT>
__device__ __forceinline__ void fetch(u32 tile, const uint4* from, const RowOffsets& offsets, int warp, int lane) {
    constexpr int ROWS_PER_WARP = COUNT / WARPS, ROWS_PER_PASS = 32 / T::VECS;
    static_assert(COUNT % WARPS == 0 && ROWS_PER_WARP % ROWS_PER_PASS == 0 && ROWS_PER_WARP % 8 == 0 &&
                  ROWS_PER_WARP <= 32 && 32 % T::VECS == 0);
    const int lane_row = lane / T::VECS, vec = lane % T::VECS;
#pragma unroll
    for (int i = 0; i < ROWS_PER_WARP; i += ROWS_PER_PASS) {
        const u32 at = __shfl_sync(ALL_LANES, offsets.at, i + lane_row);
        cp_async_16_l2_128(tile + T::template swizzled<COUNT>(warp * ROWS_PER_WARP + i + lane_row, vec),
                           from + vec + at, (offsets.exists_mask >> (i + lane_row) & 1) * 16);
    }
}

// Stores COUNT rows of a tile, divided among the warps.
template <class T, int COUNT>
__device__ __forceinline__ void store_tile(u32 tile, uint4* to, const RowOffsets& offsets, int warp, int lane) {
    constexpr int ROWS_PER_WARP = COUNT / WARPS, ROWS_PER_PASS = 32 / T::VECS;
    const int lane_row = lane / T::VECS, vec = lane % T::VECS;
#pragma unroll
    for (int i = 0; i < ROWS_PER_WARP; i += ROWS_PER_PASS) {
        const u32 at = __shfl_sync(ALL_LANES, offsets.at, i + lane_row);
        const uint4 values =
            load_shared_16(tile + T::template swizzled<COUNT>(warp * ROWS_PER_WARP + i + lane_row, vec));
        if (offsets.exists_mask >> (i + lane_row) & 1) to[vec + at] = values;
    }
}

// The parameters of a launch.
struct PrefillParams {
    const __nv_bfloat16 *q, *k_cache, *v_cache;
    const int *block_table, *cu_rows, *context_lens;
    __nv_bfloat16* out;
    float* partials;                                                   // for contexts with several splits
    float scale;                                                       // includes log2(e)
    int M, S, L, P, B, Hk, per_key, num_splits, max_whole, min_tiles;  // the last three: split_kv.cuh
};

// The tile of a block: pairs ``first`` to ``first + ROWS - 1`` out of the ``pairs`` of a sequence and key head. The
// sequence starts at row ``row`` of the launch and has ``before`` earlier tokens. An empty tile has no pairs. Grid: key
// heads inside slots of pairs, the last rows first; splits of a context.
struct TileCoord {
    const PrefillParams& params;
    const int key_head;
    int sequence = 0, row = 0, pairs = 0, first = 0, before = 0, context = 0;

    // Sequence s has the slots from cu_rows[s] * per_key / ROWS + s on, which are at least as many as it needs.
    __device__ __forceinline__ explicit TileCoord(const PrefillParams& params_)
        : params(params_), key_head(blockIdx.x % params_.Hk) {
        const int slot = gridDim.x / params.Hk - 1 - blockIdx.x / params.Hk, per_key = params.per_key;
        int low = 0, high = params.S;  // the last sequence whose slots start here or before
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (params.cu_rows[middle] * per_key / ROWS + middle <= slot) low = middle;
            else high = middle;
        }
        if (params.S == 0) return;
        const int start = params.cu_rows[low], stop = params.cu_rows[low + 1], length = params.context_lens[low];
        if (start < 0 || stop > params.M || start > stop) return;
        sequence = low;
        row = start;
        pairs = (stop - start) * per_key;
        first = (slot - (start * per_key / ROWS + low)) * ROWS;
        context = length;
        before = context - (stop - start);
    }

    __device__ __forceinline__ bool is_empty() const { return first >= pairs; }

    // The number of tokens that a pair sees. A pair beyond the last sees as many as the last.
    __device__ __forceinline__ int length(int pair_of_block) const {
        return before + min(first + pair_of_block, pairs - 1) / params.per_key + 1;
    }

    // The number of tokens in the pages. A context that is too short for its rows has none.
    __device__ __forceinline__ int room() const {
        return before < 0 ? 0 : (int)min((long long)params.L * params.B, (long long)MAX_TOKENS);
    }

    // The tokens of each split but the last: whole tiles. They depend on the sequence's context and the launch only.
    __device__ __forceinline__ int split_tokens() const {
        const int tiles = (min(context, room()) + TOKENS - 1) / TOKENS;
        return max(tiles <= params.max_whole ? tiles : (tiles + params.num_splits - 1) / params.num_splits,
                   params.min_tiles) *
               TOKENS;
    }

    // The index of a pair in q and out, in heads.
    __device__ __forceinline__ int offset(int pair_of_block) const {
        const int pair = first + pair_of_block, per_key = params.per_key;
        const int at = (row + pair / per_key) * params.Hk * per_key + key_head * per_key + pair % per_key;
        return pair < pairs ? at : NO_OFFSET;
    }

    // The same for the pairs that a warp copies, in units of 16 bytes.
    __device__ __forceinline__ RowOffsets pair_offsets(int warp, int lane, int vecs) const {
        constexpr int ROWS_PER_WARP = ROWS / WARPS;
        return RowOffsets(offset(warp * ROWS_PER_WARP + lane % ROWS_PER_WARP), vecs);
    }
};

// The tokens of a context in the paged cache.
template <class T>
struct PagedTokens {
    const int *table, pages, page_size, from, end;
    const u32 stride;
    int bad = MAX_TOKENS;  // the first token without a page that this lane has met

    // For tokens ``from`` to ``end - 1``.
    __device__ __forceinline__ PagedTokens(const TileCoord& tile_coord, int from_, int end_)
        : table(tile_coord.params.block_table + (size_t)tile_coord.sequence * tile_coord.params.L),
          pages(tile_coord.params.P), page_size(tile_coord.params.B), from(from_), end(end_),
          stride(tile_coord.params.Hk * T::VECS) {}

    // The offsets of a tile, ``first`` tokens after the start. Tokens beyond the end and tokens without a page are
    // missing.
    __device__ __forceinline__ RowOffsets of_tile(int first, int warp, int lane) {
        constexpr int ROWS_PER_WARP = TOKENS / WARPS;
        const int token = first + (from + warp * ROWS_PER_WARP + lane % ROWS_PER_WARP);
        int offset = NO_OFFSET;
        if (token < end) {
            const int page = table[token / page_size];
            if ((u32)page < (u32)pages) offset = page * page_size + token % page_size;
            else bad = min(bad, token);
        }
        return RowOffsets(offset, stride);
    }
};

// Scores and weights of 16 pairs by TILES times 8 tokens. Lane (g, t) = (lane / 4, lane % 4) has pairs g and g + 8: s[4
// j + 2 i + e] is pair g + 8 i, token 8 j + 2 t + e.
template <int TILES>
using Scores = float[4 * TILES];

template <int COUNT>
__device__ __forceinline__ void scale_scores(float (&s)[COUNT], float scale) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) s[i] = __fmul_rn(s[i], scale);
}

// The causal mask: scores of tokens that a pair does not see become -infinity. ``token`` is this lane's first.
template <int COUNT>
__device__ __forceinline__ void apply_mask(float (&s)[COUNT], int token, const int (&length)[2]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (token + 8 * (i / 4) + (i & 1) >= length[i >> 1 & 1]) s[i] = neg_infinity();
}

// Online softmax of 16 pairs. Until finish, a lane's sums cover its own tokens only.
struct Softmax {
    float largest[2] = {neg_infinity(), neg_infinity()}, sum[2] = {0.0f, 0.0f}, alpha[2];

    // The maximum score of pair g + 8 i.
    template <int COUNT>
    static __device__ __forceinline__ float top(const float (&s)[COUNT], int i) {
        float x = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
        for (int j = 4; j < COUNT; j += 4) x = fmaxf(x, fmaxf(s[j + 2 * i], s[j + 2 * i + 1]));
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
        return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
    }

    // Turns the scores of pair g + 8 i, with maximum ``top``, into weights. alpha is the factor of earlier results.
    template <int COUNT>
    __device__ __forceinline__ void weigh(float (&s)[COUNT], int i, float top) {
        const float now = fmaxf(largest[i], top);
        alpha[i] = exp2_approx(__fsub_rn(largest[i], now));
        largest[i] = now;
        float lane_sum = 0.0f;
#pragma unroll
        for (int j = 0; j < COUNT; j += 4) {
            float &low = s[j + 2 * i], &high = s[j + 2 * i + 1];
            low = exp2_approx(__fsub_rn(low, now));
            high = exp2_approx(__fsub_rn(high, now));
            lane_sum = __fadd_rn(lane_sum, __fadd_rn(low, high));
        }
        sum[i] = __fmaf_rn(sum[i], alpha[i], lane_sum);
    }

    __device__ __forceinline__ bool is_unscaled() const { return alpha[0] == 1.0f && alpha[1] == 1.0f; }

    // Adds the sums of the four lanes of a pair.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(ALL_LANES, sum[i], 1));
            sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(ALL_LANES, sum[i], 2));
        }
    }
};

// The weights of tokens 16 j .. 16 j + 15 as an A operand.
template <int COUNT>
__device__ __forceinline__ void as_a_operand(u32 (&a)[4], const float (&s)[COUNT], int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = bf16_pair(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
}
