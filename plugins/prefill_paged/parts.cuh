// Parts of a context, for few rows behind many tokens: each has a block of its own, and a launch behind puts them together.
//
// A context is cut by its length, and by how many parts a launch has room for: whole tiles, as many in each part but the
// last, and never fewer than ``least``. What a context leaves free costs a block that ends at once. Of a part there are, in
// FP32, the largest score, the sum of weights (-1 where a row must be zeros) and the sum of weighted values, as the threads
// of its block have them. A row takes the parts that it sees, from the first token on. One that sees a single part has the
// bits that it has without parts, and a tile of rows that sees no other is written at once.
#pragma once
#include "prompts.cuh"

constexpr int MOST_PARTS = 32;  // launch.py has the number too

// Which part of its context a block has: tokens ``from`` to ``end - 1``.
struct Part {
    int from, end;
    bool is_there, is_whole;

    __device__ __forceinline__ explicit Part(const Block& block) {
        const int all = min(block.length(ROWS - 1), block.room()), tokens = block.part_tokens();
        from = blockIdx.y * tokens;
        end = min(all, from + tokens);
        is_there = blockIdx.y == 0 || from < all;
        is_whole = all <= tokens;
    }
};

// A part in scratch memory: four values a thread at a time, of pairs g and g + 8 and columns 8 c + 2 t + {0, 1}, where lane
// (g, t) = (lane / 4, lane % 4); then a pair's largest score and sum.
struct Partial {
    float4* const at;
    const int D;

    __device__ __forceinline__ Partial(const Prompts& given, int part, int D_)
        : at(reinterpret_cast<float4*>(given.partials + ((size_t)blockIdx.x * given.parts + part) * ROWS * (D_ + 2))), D(D_) {}
    __device__ __forceinline__ float4* values(int c) const { return at + c * THREADS + threadIdx.x; }
    __device__ __forceinline__ float2* stats(int pair) const { return reinterpret_cast<float2*>(at + ROWS * D / 4) + pair; }
};

// Brings a tile's results out, or those of a part. ``shared`` is where q was; by all threads.
template <class T>
__device__ __forceinline__ void bring_out_results(const Prompts& given, const Places& pairs, const int (&length)[2], int bad,
                                                  bool is_whole, u32 shared, const Softmax& softmax,
                                                  const float (&o)[T::D / 2]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, own_pair = warp * 16 + (lane >> 2);
    const bool is_zero[2] = {bad == 0 || length[0] > bad, bad == 0 || length[1] > bad};
    if (!is_whole) {
        const Partial to(given, blockIdx.y, T::D);
#pragma unroll
        for (int c = 0; c < T::D / 8; ++c) *to.values(c) = make_float4(o[4 * c], o[4 * c + 1], o[4 * c + 2], o[4 * c + 3]);
        if ((lane & 3) == 0)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                *to.stats(own_pair + 8 * i) = make_float2(softmax.largest[i], is_zero[i] ? -1.0f : softmax.sum[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float share = __fdiv_rn(1.0f, softmax.sum[i]);
#pragma unroll
        for (int c = 0; c < T::D / 8; ++c) {
            const float low = __fmul_rn(o[4 * c + 2 * i], share), high = __fmul_rn(o[4 * c + 2 * i + 1], share);
            store_shared(shared + T::template piece_at<ROWS>(own_pair + 8 * i, c) + 4 * (lane & 3),
                         is_zero[i] ? 0 : pair(low, high));
        }
    }
    __syncwarp();  // a warp brings out its own pairs
    bring_out<T, ROWS>(shared, reinterpret_cast<uint4*>(given.out), pairs, warp, lane);
}

// How many columns of eight a block puts together, and from how many parts it loads at a time.
constexpr int COLUMNS_A_BLOCK = 4, PARTS_AT_ONCE = 4;

// Puts the parts of a tile together: 32 columns of it. A warp has the pairs that it has in the launch before.
__device__ __forceinline__ void combine(const Prompts& given, int D) {
    __shared__ float weights[MOST_PARTS][ROWS];
    const Block block(given);
    if (block.is_empty()) return;  // the whole block
    const int room = block.room(), all = min(block.length(ROWS - 1), room), tokens = block.part_tokens();
    if (all <= tokens) return;  // the whole block: there is one part
    const int lane = threadIdx.x & 31, t = lane & 3, own_pair = (threadIdx.x >> 5) * 16 + (lane >> 2);

    // Stage 1: what each part counts; a lane has every fourth part of its pairs.
    int count[2];
    float share[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int pair_of_block = own_pair + 8 * i;
        count[i] = (min(block.length(pair_of_block), room) + tokens - 1) / tokens;
        float2 stats[MOST_PARTS / 4];
        float top = no_score(), sum = 0.0f;
        bool is_zero = false;
#pragma unroll
        for (int k = 0; k < MOST_PARTS / 4; ++k) {
            const int part = 4 * k + t;
            stats[k] = make_float2(no_score(), 0.0f);
            if (part < count[i]) stats[k] = __ldcg(Partial(given, part, D).stats(pair_of_block));
        }
#pragma unroll
        for (int k = 0; k < MOST_PARTS / 4; ++k) top = fmaxf(top, stats[k].x), is_zero |= stats[k].y < 0.0f;
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
#pragma unroll
        for (int k = 0; k < MOST_PARTS / 4; ++k) {
            const float weight = power(__fsub_rn(stats[k].x, top));
            sum = __fmaf_rn(weight, stats[k].y, sum);
            weights[4 * k + t][pair_of_block] = weight;
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
        share[i] = __fdiv_rn(1.0f, sum);
        if (__ballot_sync(ALL_LANES, is_zero) >> (lane & 28) & 15) count[i] = 0;
    }
    __syncwarp();

    // Stage 2: the parts, one after the other.
    const int parts = (all + tokens - 1) / tokens, first = blockIdx.y * COLUMNS_A_BLOCK;
    float o[COLUMNS_A_BLOCK][4];
#pragma unroll
    for (int c = 0; c < COLUMNS_A_BLOCK; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[c][i] = -0.0f;  // 0 would change the sign of what is -0
#pragma unroll 1
    for (int part = 0; part < parts; part += PARTS_AT_ONCE) {
        float4 loaded[PARTS_AT_ONCE][COLUMNS_A_BLOCK];
#pragma unroll
        for (int j = 0; j < PARTS_AT_ONCE; ++j) {
            const Partial from(given, min(part + j, parts - 1), D);
#pragma unroll
            for (int c = 0; c < COLUMNS_A_BLOCK; ++c) loaded[j][c] = __ldcg(from.values(first + c));
        }
#pragma unroll
        for (int j = 0; j < PARTS_AT_ONCE; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (part + j >= count[i]) continue;
                const float weight = weights[part + j][own_pair + 8 * i];
#pragma unroll
                for (int c = 0; c < COLUMNS_A_BLOCK; ++c) {
                    const float low = i ? loaded[j][c].z : loaded[j][c].x, high = i ? loaded[j][c].w : loaded[j][c].y;
                    o[c][2 * i] = __fmaf_rn(weight, low, o[c][2 * i]);
                    o[c][2 * i + 1] = __fmaf_rn(weight, high, o[c][2 * i + 1]);
                }
            }
    }

    // Stage 3: the results.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int place = block.place(own_pair + 8 * i);
        if (place == NOWHERE) continue;
        u32* const to = reinterpret_cast<u32*>(given.out + (size_t)place * D + 8 * first) + t;
#pragma unroll
        for (int c = 0; c < COLUMNS_A_BLOCK; ++c)
            to[4 * c] = count[i] == 0 ? 0 : pair(__fmul_rn(o[c][2 * i], share[i]), __fmul_rn(o[c][2 * i + 1], share[i]));
    }
}

// The entry point of a shape. Grid: see Block; launched by launch.py.
#define PREFILL_TILES(NAME, ATTEND, SHAPE, BLOCKS)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(                                            \
        const __nv_bfloat16* __restrict__ q,       /* [M, Hq, D] */                                                \
        const __nv_bfloat16* __restrict__ k_cache, /* [P, B, Hk, D] */                                             \
        const __nv_bfloat16* __restrict__ v_cache, /* [P, B, Hk, D] */                                             \
        const int* __restrict__ block_table,       /* [S, L] */                                                    \
        const int* __restrict__ cu_rows,           /* [S + 1] */                                                   \
        const int* __restrict__ context_lens,      /* [S] */                                                       \
        __nv_bfloat16* __restrict__ out,           /* [M, Hq, D] */                                                \
        float* partials,                           /* tiles, parts: see Partial */                                 \
        float scale, int M, int S, int L, int P, int B, int Hk, int per_key, int parts, int least) {               \
        allow_next_launch();                                                                                       \
        wait_for_previous_launch();                                                                                \
        ATTEND<SHAPE>({q, k_cache, v_cache, block_table, cu_rows, context_lens, out, partials, scale, M, S, L, P,  \
                       B, Hk, per_key, parts, least});                                                             \
    }

// Grid: tiles; groups of 32 columns. Launched by launch.py.
#define PREFILL_COMBINE(NAME)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                                    \
        const int* cu_rows,      /* [S + 1] */                                                                     \
        const int* context_lens, /* [S] */                                                                         \
        __nv_bfloat16* out,      /* [M, Hq, D] */                                                                  \
        float* partials,         /* tiles, parts: see Partial */                                                   \
        int M, int S, int L, int B, int Hk, int per_key, int parts, int least, int D) {                            \
        allow_next_launch();                                                                                       \
        wait_for_previous_launch();                                                                                \
        combine({nullptr, nullptr, nullptr, nullptr, cu_rows, context_lens, out, partials, 0.0f, M, S, L, 0, B,    \
                 Hk, per_key, parts, least}, D);                                                                   \
    }
