// Split-KV for few rows with long contexts: each split of a context has a block of its own, and a second launch
// combines the splits. Used by prefill_mma.cuh and prefill_wgmma.cuh. sm_80 and newer.
//
// A context is split by its length and by the number of splits of the launch. Splits are whole tiles of tokens, equally
// many in each split but the last, and at least ``min_tiles``. A context of up to ``max_whole`` tiles is one split.
// Blocks without a split end at once. The partial result of a split is in FP32: maximum score, sum of weights (-1 for
// rows that must be zeros) and sum of weighted values, in the layout of the block's registers. A row combines the
// splits that it sees, from the first token on. A row that sees a single split has the same bits as without splits. If
// a whole tile of rows sees only one, it is written directly.
#pragma once
#include "bf16.cuh"
#include "fast_math.cuh"
#include "pdl.cuh"
#include "prefill_tile.cuh"
#include "shared_memory.cuh"

constexpr int MAX_SPLITS = 32;

// The KV split of a block: tokens ``from`` to ``end - 1``. Without SPLIT_KV, the whole context.
template <bool SPLIT_KV>
struct KvSplit {
    int from = 0, end;
    bool exists = true, is_whole = true;

    __device__ __forceinline__ explicit KvSplit(const TileCoord& tile_coord)
        : end(min(tile_coord.length(ROWS - 1), tile_coord.room())) {
        if (!SPLIT_KV) return;
        const int all = end, tokens = tile_coord.split_tokens();
        from = blockIdx.y * tokens;
        end = min(all, from + tokens);
        exists = blockIdx.y == 0 || from < all;
        is_whole = all <= tokens;
    }
};

// The partial result of a split in scratch memory. A thread writes four values at a time: pair g + 8 i, columns 16 c +
// 2 t + {0, 1, 8, 9}, where lane (g, t) = (lane / 4, lane % 4) of a warp with 16 pairs. Maximum and sum of each pair
// follow.
struct PartialResult {
    float4* const at;
    const int D;

    __device__ __forceinline__ static int vectors(int D) { return ROWS * (D + 2) / 4; }
    __device__ __forceinline__ PartialResult(const PrefillParams& params, int split, int D_)
        : at(reinterpret_cast<float4*>(params.partials) +
             ((size_t)blockIdx.x * params.num_splits + split) * vectors(D_)),
          D(D_) {}
    __device__ __forceinline__ float4* values(int c, int i, int thread) const {
        return at + (2 * c + i) * THREADS + thread;
    }
    __device__ __forceinline__ float2* stats(int pair) const {
        return reinterpret_cast<float2*>(at + ROWS * D / 4) + pair;
    }
};

// Kept in shared memory for the epilogue, because registers are scarce: the first token without a page, and the split.
struct alignas(16) EpilogueState {
    int first_bad, from;
    bool is_whole;
};

// Stores the results of a tile, or the partial results of a split. Pairs see ``length`` tokens. ``shared`` is the place
// of q. By all threads.
template <class T, bool SPLIT_KV>
__device__ __forceinline__ void store_results(const PrefillParams& params, const RowOffsets& pairs,
                                              const int (&length)[2], const EpilogueState& epilogue, u32 shared,
                                              const Softmax& softmax, const float (&o)[T::D / 2]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, lane_pair = warp * 16 + (lane >> 2),
              bad = epilogue.first_bad;
    const int from = SPLIT_KV ? epilogue.from : 0;
    const bool is_zero[2] = {bad == 0 || length[0] + from > bad, bad == 0 || length[1] + from > bad};
    if (SPLIT_KV && !epilogue.is_whole) {
        const PartialResult to(params, blockIdx.y, T::D);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int c = 0; c < T::D / 16; ++c) {
                const float* const values = o + 8 * c + 2 * i;
                *to.values(c, i, threadIdx.x) = make_float4(values[0], values[1], values[4], values[5]);
            }
            if ((lane & 3) == 0)
                *to.stats(lane_pair + 8 * i) = make_float2(softmax.largest[i], is_zero[i] ? -1.0f : softmax.sum[i]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float inverse_sum = __fdiv_rn(1.0f, softmax.sum[i]);
#pragma unroll
        for (int c = 0; c < T::D / 8; ++c) {
            const float low = __fmul_rn(o[4 * c + 2 * i], inverse_sum),
                        high = __fmul_rn(o[4 * c + 2 * i + 1], inverse_sum);
            store_shared_4(shared + T::template swizzled<ROWS>(lane_pair + 8 * i, c) + 4 * (lane & 3),
                           is_zero[i] ? 0 : bf16_pair(low, high));
        }
    }
    __syncwarp();  // a warp stores its own pairs
    store_tile<T, ROWS>(shared, reinterpret_cast<uint4*>(params.out), pairs, warp, lane);
}

// The combine kernel: COLUMNS times 16 columns a block at a time, and loads of SPLITS_AT_ONCE splits in flight.
constexpr int COMBINE_THREADS = 2 * THREADS, COLUMNS = 2, SPLITS_AT_ONCE = 8;

// Loads some splits of 32 columns. Missing values are -0, which changes no sum. 0 would change the sign of -0.
__device__ __forceinline__ void load_splits(float4 (&loaded)[SPLITS_AT_ONCE][COLUMNS], const PrefillParams& params,
                                            int D, int splits_of_pair, int split, int first, int i, int thread) {
    const float4* const from = PartialResult(params, split, D).values(first, i, thread);
#pragma unroll
    for (int j = 0; j < SPLITS_AT_ONCE; ++j)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            loaded[j][c] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
            if (split + j < splits_of_pair)
                loaded[j][c] = __ldcg(from + j * PartialResult::vectors(D) + c * 2 * THREADS);
        }
}

// Combines the splits of a tile, 32 columns at a time. A thread has one of the two pairs that it had in the first
// launch.
__device__ __forceinline__ void combine(const PrefillParams& params, int D) {
    __shared__ float weights[MAX_SPLITS][ROWS];
    const TileCoord tile_coord(params);
    if (tile_coord.is_empty()) return;  // the whole block
    const int room = tile_coord.room(), all = min(tile_coord.length(ROWS - 1), room),
              tokens = tile_coord.split_tokens();
    if (all <= tokens) return;  // the whole block: there is only one split
    const int thread = threadIdx.x % THREADS, i = threadIdx.x / THREADS, lane = thread & 31, t = lane & 3;
    const int lane_pair = (thread >> 5) * 16 + (lane >> 2) + 8 * i;
    const int splits_of_pair = (min(tile_coord.length(lane_pair), room) + tokens - 1) / tokens,
              num_splits = (all + tokens - 1) / tokens;

    // The first values, in flight before their weights are known.
    int first = blockIdx.y * COLUMNS, split = 0;
    float4 loaded[SPLITS_AT_ONCE][COLUMNS];
    load_splits(loaded, params, D, splits_of_pair, split, first, i, thread);

    // Stage 1: the weights of the splits. A lane has every fourth.
    const PartialResult partial(params, t, D);
    float2 stats[MAX_SPLITS / 4];
    float top = neg_infinity(), sum = 0.0f;
    bool is_zero = false;
#pragma unroll
    for (int k = 0; k < MAX_SPLITS / 4; ++k) {
        stats[k] = make_float2(neg_infinity(), 0.0f);
        if (4 * k + t < splits_of_pair)
            stats[k] = __ldcg(partial.stats(lane_pair) + 4 * k * 2 * PartialResult::vectors(D));
    }
#pragma unroll
    for (int k = 0; k < MAX_SPLITS / 4; ++k) top = fmaxf(top, stats[k].x), is_zero |= stats[k].y < 0.0f;
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
#pragma unroll
    for (int k = 0; k < MAX_SPLITS / 4; ++k) {
        const float weight = exp2_approx(__fsub_rn(stats[k].x, top));
        sum = __fmaf_rn(weight, stats[k].y, sum);
        weights[4 * k + t][lane_pair] = weight;
    }
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
    is_zero = __ballot_sync(ALL_LANES, is_zero) >> (lane & 28) & 15;

    const float inverse_sum = __fdiv_rn(1.0f, sum);
    const int offset = tile_coord.offset(lane_pair);
    __syncwarp();  // the weights are in shared memory

    // Stage 2: the splits in order. The sums start with -0, and missing splits add -0, because 0 would change a sign.
    float o[COLUMNS][4];
#pragma unroll 1
    do {
        if (split == 0)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[c][e] = -0.0f;
        __syncwarp();  // ptxas keeps loads before it; without it they would wait for each other
#pragma unroll
        for (int j = 0; j < SPLITS_AT_ONCE; ++j) {
            const float weight = weights[split + j][lane_pair];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                o[c][0] = __fmaf_rn(weight, loaded[j][c].x, o[c][0]);
                o[c][1] = __fmaf_rn(weight, loaded[j][c].y, o[c][1]);
                o[c][2] = __fmaf_rn(weight, loaded[j][c].z, o[c][2]);
                o[c][3] = __fmaf_rn(weight, loaded[j][c].w, o[c][3]);
            }
        }
        const int done = first;
        split += SPLITS_AT_ONCE;
        const bool is_last = split >= num_splits;
        if (is_last) split = 0, first += gridDim.y * COLUMNS;
        if (first < D / 16) load_splits(loaded, params, D, splits_of_pair, split, first, i, thread);
        else pdl_launch_dependents();
        if (is_last && offset != NO_OFFSET) {
            u32* const to = reinterpret_cast<u32*>(params.out + (size_t)offset * D + 16 * done) + t;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    to[8 * c + 4 * half] = is_zero ? 0
                                                   : bf16_pair(__fmul_rn(o[c][2 * half], inverse_sum),
                                                               __fmul_rn(o[c][2 * half + 1], inverse_sum));
        }
    } while (first < D / 16);
}

// An entry point: the attention function of a configuration. Grid: see TileCoord. Launched by launch.py.
#define PREFILL_TILES(NAME, BLOCKS, ...)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(                                                \
        const __nv_bfloat16* __restrict__ q,       /* [M, Hq, D] */                                                    \
        const __nv_bfloat16* __restrict__ k_cache, /* [P, B, Hk, D] */                                                 \
        const __nv_bfloat16* __restrict__ v_cache, /* [P, B, Hk, D] */                                                 \
        const int* __restrict__ block_table,       /* [S, L] */                                                        \
        const int* __restrict__ cu_rows,           /* [S + 1] */                                                       \
        const int* __restrict__ context_lens,      /* [S] */                                                           \
        __nv_bfloat16* __restrict__ out,           /* [M, Hq, D] */                                                    \
        float* partials,                           /* tiles, splits: see PartialResult */                              \
        float scale, int M, int S, int L, int P, int B, int Hk, int per_key, int num_splits, int max_whole,            \
        int min_tiles) {                                                                                               \
        pdl_wait();                                                                                                    \
        __VA_ARGS__({q, k_cache, v_cache, block_table, cu_rows, context_lens, out, partials, scale, M, S, L, P, B, Hk, \
                     per_key, num_splits, max_whole, min_tiles});                                                      \
    }

// Grid: tiles; blocks that divide the columns of a tile. Launched by launch.py.
#define PREFILL_COMBINE(NAME)                                                                                       \
    extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) NAME(                                             \
        const int* cu_rows,      /* [S + 1] */                                                                      \
        const int* context_lens, /* [S] */                                                                          \
        __nv_bfloat16* out,      /* [M, Hq, D] */                                                                   \
        float* partials,         /* tiles, splits: see PartialResult */                                             \
        int M, int S, int L, int B, int Hk, int per_key, int num_splits, int max_whole, int min_tiles, int D) {     \
        pdl_wait();                                                                                                 \
        combine({nullptr, nullptr, nullptr, nullptr, cu_rows, context_lens, out, partials, 0.0f, M, S, L, 0, B, Hk, \
                 per_key, num_splits, max_whole, min_tiles},                                                        \
                D);                                                                                                 \
    }
