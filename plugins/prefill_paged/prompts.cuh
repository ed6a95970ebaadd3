// What tiles of rows share: which rows and which part of their context a block has, where tokens stand, copies, online
// softmax, and the entry points' parameters. tiles.cuh says what for; parts.cuh puts parts together.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "fast_math.cuh"
#include "shared_memory.cuh"

constexpr int NOWHERE = -1;  // the place of a row that is not there: its copy is zeros
constexpr int MAX_TOKENS = 0x7fffffff;
// What a block has: pairs of a row and a query head, of which a warp has 16; tokens of a tile.
constexpr int ROWS = 64, TOKENS = 64, WARPS = 4, THREADS = WARPS * 32;
static_assert(ROWS == 16 * WARPS);

// --- device functions ---

__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }  // -infinity

// Where the rows of a warp's share of a tile begin: lane i has that of row i % share, in units of 16 bytes, and of all
// lanes whether it is there.
struct Places {
    u32 at, there;

    __device__ __forceinline__ Places(int place, u32 stride)
        : at((u32)max(place, 0) * stride), there(__ballot_sync(ALL_LANES, place != NOWHERE)) {}
};

// Sends COUNT rows of D values on their way to a tile, each warp its share; what is not there becomes zeros.
template <class T, int COUNT>
__device__ __forceinline__ void fetch(u32 tile, const uint4* from, const Places& places, int warp, int lane) {
    constexpr int OWN = COUNT / WARPS, TOGETHER = 32 / T::PIECES;
    static_assert(COUNT % WARPS == 0 && OWN % TOGETHER == 0 && OWN % 8 == 0 && OWN <= 32 && 32 % T::PIECES == 0);
    const int own = lane / T::PIECES, piece = lane % T::PIECES;
#pragma unroll
    for (int i = 0; i < OWN; i += TOGETHER) {
        const u32 at = __shfl_sync(ALL_LANES, places.at, i + own);
        cp_async_16_l2_128(tile + T::template piece_at<COUNT>(warp * OWN + i + own, piece), from + piece + at,
                           (places.there >> (i + own) & 1) * 16);
    }
}

// Brings COUNT rows of a tile out, each warp its share.
template <class T, int COUNT>
__device__ __forceinline__ void bring_out(u32 tile, uint4* to, const Places& places, int warp, int lane) {
    constexpr int OWN = COUNT / WARPS, TOGETHER = 32 / T::PIECES;
    const int own = lane / T::PIECES, piece = lane % T::PIECES;
#pragma unroll
    for (int i = 0; i < OWN; i += TOGETHER) {
        const u32 at = __shfl_sync(ALL_LANES, places.at, i + own);
        const uint4 values = load_shared_16(tile + T::template piece_at<COUNT>(warp * OWN + i + own, piece));
        if (places.there >> (i + own) & 1) to[piece + at] = values;
    }
}

// The arguments of a launch, as the kernels below have them.
struct Prompts {
    const __nv_bfloat16 *q, *k_cache, *v_cache;
    const int *block_table, *cu_rows, *context_lens;
    __nv_bfloat16* out;
    float* partials;  // where a context may have several parts
    float scale;      // includes log2(e)
    int M, S, L, P, B, Hk, per_key, parts, whole, least;  // parts.cuh has the last three
};

// What a block has: pairs ``first`` to ``first + ROWS - 1`` of a sequence of ``pairs``, of one key head; the sequence's
// first row of the launch is ``row`` and has ``before`` tokens ahead of it. Nothing: pairs is 0. Grid: key heads go round,
// the last rows first; parts of a context.
struct Block {
    const Prompts& given;
    const int key_head;
    int sequence = 0, row = 0, pairs = 0, first = 0, before = 0, context = 0;

    // Sequence s has the slots cu_rows[s] * per_key / ROWS + s and following: no less than it needs.
    __device__ __forceinline__ explicit Block(const Prompts& given_) : given(given_), key_head(blockIdx.x % given_.Hk) {
        const int slot = gridDim.x / given.Hk - 1 - blockIdx.x / given.Hk, per_key = given.per_key;
        int low = 0, high = given.S;  // the last sequence whose slots begin here or before
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (given.cu_rows[middle] * per_key / ROWS + middle <= slot) low = middle;
            else high = middle;
        }
        if (given.S == 0) return;
        const int start = given.cu_rows[low], stop = given.cu_rows[low + 1], length = given.context_lens[low];
        if (start < 0 || stop > given.M || start > stop) return;
        sequence = low;
        row = start;
        pairs = (stop - start) * per_key;
        first = (slot - (start * per_key / ROWS + low)) * ROWS;
        context = length;
        before = context - (stop - start);
    }

    __device__ __forceinline__ bool is_empty() const { return first >= pairs; }

    // How many tokens a pair sees; one beyond the last sees what the last one does.
    __device__ __forceinline__ int length(int pair_of_block) const {
        return before + min(first + pair_of_block, pairs - 1) / given.per_key + 1;
    }

    // How many tokens the pages hold; a context too short for its rows has none.
    __device__ __forceinline__ int room() const {
        return before < 0 ? 0 : (int)min((long long)given.L * given.B, (long long)MAX_TOKENS);
    }

    // How many tokens a part has, but for the last one: whole tiles, by the sequence's context and the launch alone.
    __device__ __forceinline__ int part_tokens() const {
        const int tiles = (min(context, room()) + TOKENS - 1) / TOKENS;
        return max(tiles <= given.whole ? tiles : (tiles + given.parts - 1) / given.parts, given.least) * TOKENS;
    }

    // Where a pair stands in q and out, in heads.
    __device__ __forceinline__ int place(int pair_of_block) const {
        const int own = first + pair_of_block, per_key = given.per_key;
        const int at = (row + own / per_key) * given.Hk * per_key + key_head * per_key + own % per_key;
        return own < pairs ? at : NOWHERE;
    }

    // The same of this lane's pair of a warp's share, in 16 bytes.
    __device__ __forceinline__ Places pair_places(int warp, int lane, int pieces) const {
        constexpr int OWN = ROWS / WARPS;
        return Places(place(warp * OWN + lane % OWN), pieces);
    }
};

// Where tokens of a context stand in the cache.
template <class T>
struct Pages {
    const int *table, pages, page_size, from, end;
    const u32 stride;
    int bad = MAX_TOKENS;  // the first token without a page that this lane met

    // Of tokens ``from`` to ``end - 1``.
    __device__ __forceinline__ Pages(const Block& block, int from_, int end_)
        : table(block.given.block_table + (size_t)block.sequence * block.given.L), pages(block.given.P),
          page_size(block.given.B), from(from_), end(end_), stride(block.given.Hk * T::PIECES) {}

    // The places of the tile that is ``first`` tokens on; there is none beyond the end, nor without a page.
    __device__ __forceinline__ Places of_tile(int first, int warp, int lane) {
        constexpr int OWN = TOKENS / WARPS;
        const int token = first + (from + warp * OWN + lane % OWN);
        int place = NOWHERE;
        if (token < end) {
            const int page = table[token / page_size];
            if ((u32)page < (u32)pages) place = page * page_size + token % page_size;
            else bad = min(bad, token);
        }
        return Places(place, stride);
    }
};

// Scores and weights of 16 pairs by TILES times 8 tokens: lane (g, t) = (lane / 4, lane % 4) has those of pairs g and g + 8,
// s[4 j + 2 i + e] is pair g + 8 i, token 8 j + 2 t + e.
template <int TILES>
using Scores = float[4 * TILES];

template <int COUNT>
__device__ __forceinline__ void scale_scores(float (&s)[COUNT], float scale) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) s[i] = __fmul_rn(s[i], scale);
}

// Makes scores of tokens that a pair does not see -infinity; ``token`` is this lane's first.
template <int COUNT>
__device__ __forceinline__ void hide(float (&s)[COUNT], int token, const int (&length)[2]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (token + 8 * (i / 4) + (i & 1) >= length[i >> 1 & 1]) s[i] = no_score();
}

// Running softmax of 16 pairs; a lane's sums are over its own tokens until finish.
struct Softmax {
    float largest[2] = {no_score(), no_score()}, sum[2] = {0.0f, 0.0f}, keep[2];

    // The largest score of pair g + 8 i.
    template <int COUNT>
    static __device__ __forceinline__ float top(const float (&s)[COUNT], int i) {
        float x = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
        for (int j = 4; j < COUNT; j += 4) x = fmaxf(x, fmaxf(s[j + 2 * i], s[j + 2 * i + 1]));
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
        return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
    }

    // Turns scores of pair g + 8 i, of which ``top`` is the largest, into weights; keep is what results so far count.
    template <int COUNT>
    __device__ __forceinline__ void weigh(float (&s)[COUNT], int i, float top) {
        const float now = fmaxf(largest[i], top);
        keep[i] = exp2_approx(__fsub_rn(largest[i], now));
        largest[i] = now;
        float own = 0.0f;
#pragma unroll
        for (int j = 0; j < COUNT; j += 4) {
            float &low = s[j + 2 * i], &high = s[j + 2 * i + 1];
            low = exp2_approx(__fsub_rn(low, now));
            high = exp2_approx(__fsub_rn(high, now));
            own = __fadd_rn(own, __fadd_rn(low, high));
        }
        sum[i] = __fmaf_rn(sum[i], keep[i], own);
    }

    __device__ __forceinline__ bool keeps_all() const { return keep[0] == 1.0f && keep[1] == 1.0f; }

    // Makes a sum that of all four lanes.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(ALL_LANES, sum[i], 1));
            sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(ALL_LANES, sum[i], 2));
        }
    }
};

// The weights of 16 tokens from token 16 j on, as A operand of a product.
template <int COUNT>
__device__ __forceinline__ void as_operand(u32 (&a)[4], const float (&s)[COUNT], int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = bf16_pair(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
}
