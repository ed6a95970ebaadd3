// Parts of a context, for few rows behind many tokens: each has a block of its own, and a launch behind puts them together.
//
// A context is cut by its length, and by how many parts a launch has room for: whole tiles, as many in each part but the
// last, and never fewer than ``least``; up to ``whole`` tiles are one part. What a context leaves free costs a block that
// ends at once. Of a part there are, in
// FP32, the largest score, the sum of weights (-1 where a row must be zeros) and the sum of weighted values, as the threads
// of its block have them. A row takes the parts that it sees, from the first token on. One that sees a single part has the
// bits that it has without parts, and a tile of rows that sees no other is written at once.
#pragma once
#include "bf16.cuh"
#include "fast_math.cuh"
#include "pdl.cuh"
#include "prompts.cuh"
#include "shared_memory.cuh"

constexpr int MAX_PARTS = 32;  // launch.py has the number too

// Which part of its context a block has: tokens ``from`` to ``end - 1``. Without parts: all of it.
template <bool IN_PARTS>
struct Part {
    int from = 0, end;
    bool is_there = true, is_whole = true;

    __device__ __forceinline__ explicit Part(const Block& block) : end(min(block.length(ROWS - 1), block.room())) {
        if (!IN_PARTS) return;
        const int all = end, tokens = block.part_tokens();
        from = blockIdx.y * tokens;
        end = min(all, from + tokens);
        is_there = blockIdx.y == 0 || from < all;
        is_whole = all <= tokens;
    }
};

// A part in scratch memory: four values a thread at a time, of pair g + 8 i and columns 16 c + 2 t + {0, 1, 8, 9}, where lane
// (g, t) = (lane / 4, lane % 4) of a warp with 16 pairs; then a pair's largest score and sum.
struct Partial {
    float4* const at;
    const int D;

    __device__ __forceinline__ static int vectors(int D) { return ROWS * (D + 2) / 4; }
    __device__ __forceinline__ Partial(const Prompts& given, int part, int D_)
        : at(reinterpret_cast<float4*>(given.partials) + ((size_t)blockIdx.x * given.parts + part) * vectors(D_)), D(D_) {}
    __device__ __forceinline__ float4* values(int c, int i, int thread) const { return at + (2 * c + i) * THREADS + thread; }
    __device__ __forceinline__ float2* stats(int pair) const { return reinterpret_cast<float2*>(at + ROWS * D / 4) + pair; }
};

// What a block keeps in shared memory for its end, as registers are few: the first token without a page; its part.
struct alignas(16) Kept {
    int first_bad, from;
    bool is_whole;
};

// Brings a tile's results out, or those of a part, of which pairs see so many tokens. ``shared`` is where q was; by all threads.
template <class T, bool IN_PARTS>
__device__ __forceinline__ void bring_out_results(const Prompts& given, const Places& pairs, const int (&length)[2],
                                                  const Kept& kept, u32 shared, const Softmax& softmax,
                                                  const float (&o)[T::D / 2]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, own_pair = warp * 16 + (lane >> 2), bad = kept.first_bad;
    const int from = IN_PARTS ? kept.from : 0;
    const bool is_zero[2] = {bad == 0 || length[0] + from > bad, bad == 0 || length[1] + from > bad};
    if (IN_PARTS && !kept.is_whole) {
        const Partial to(given, blockIdx.y, T::D);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int c = 0; c < T::D / 16; ++c) {
                const float* const own = o + 8 * c + 2 * i;
                *to.values(c, i, threadIdx.x) = make_float4(own[0], own[1], own[4], own[5]);
            }
            if ((lane & 3) == 0)
                *to.stats(own_pair + 8 * i) = make_float2(softmax.largest[i], is_zero[i] ? -1.0f : softmax.sum[i]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float share = __fdiv_rn(1.0f, softmax.sum[i]);
#pragma unroll
        for (int c = 0; c < T::D / 8; ++c) {
            const float low = __fmul_rn(o[4 * c + 2 * i], share), high = __fmul_rn(o[4 * c + 2 * i + 1], share);
            store_shared_4(shared + T::template piece_at<ROWS>(own_pair + 8 * i, c) + 4 * (lane & 3),
                         is_zero[i] ? 0 : bf16_pair(low, high));
        }
    }
    __syncwarp();  // a warp brings out its own pairs
    bring_out<T, ROWS>(shared, reinterpret_cast<uint4*>(given.out), pairs, warp, lane);
}

// What a block puts together: so many times 16 columns, of which it loads so many parts at a time.
constexpr int COMBINING_THREADS = 2 * THREADS, COLUMNS = 2, PARTS_AT_ONCE = 8;

// Loads so many parts of 32 columns. What is not there is -0, which changes no sum: 0 would change the sign of -0.
__device__ __forceinline__ void load_parts(float4 (&loaded)[PARTS_AT_ONCE][COLUMNS], const Prompts& given, int D, int own_parts,
                                           int part, int first, int i, int thread) {
    const float4* const from = Partial(given, part, D).values(first, i, thread);
#pragma unroll
    for (int j = 0; j < PARTS_AT_ONCE; ++j)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            loaded[j][c] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
            if (part + j < own_parts) loaded[j][c] = __ldcg(from + j * Partial::vectors(D) + c * 2 * THREADS);
        }
}

// Puts the parts of a tile together, 32 columns at a time. A thread has one of the two pairs that it has in the launch
// before.
__device__ __forceinline__ void combine(const Prompts& given, int D) {
    __shared__ float weights[MAX_PARTS][ROWS];
    const Block block(given);
    if (block.is_empty()) return;  // the whole block
    const int room = block.room(), all = min(block.length(ROWS - 1), room), tokens = block.part_tokens();
    if (all <= tokens) return;  // the whole block: there is one part
    const int thread = threadIdx.x % THREADS, i = threadIdx.x / THREADS, lane = thread & 31, t = lane & 3;
    const int own_pair = (thread >> 5) * 16 + (lane >> 2) + 8 * i;
    const int own_parts = (min(block.length(own_pair), room) + tokens - 1) / tokens, parts = (all + tokens - 1) / tokens;

    // The first values, which do not wait for what they count.
    int first = blockIdx.y * COLUMNS, part = 0;
    float4 loaded[PARTS_AT_ONCE][COLUMNS];
    load_parts(loaded, given, D, own_parts, part, first, i, thread);

    // Stage 1: what each part counts; a lane has every fourth.
    const Partial own(given, t, D);
    float2 stats[MAX_PARTS / 4];
    float top = no_score(), sum = 0.0f;
    bool is_zero = false;
#pragma unroll
    for (int k = 0; k < MAX_PARTS / 4; ++k) {
        stats[k] = make_float2(no_score(), 0.0f);
        if (4 * k + t < own_parts) stats[k] = __ldcg(own.stats(own_pair) + 4 * k * 2 * Partial::vectors(D));
    }
#pragma unroll
    for (int k = 0; k < MAX_PARTS / 4; ++k) top = fmaxf(top, stats[k].x), is_zero |= stats[k].y < 0.0f;
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
#pragma unroll
    for (int k = 0; k < MAX_PARTS / 4; ++k) {
        const float weight = exp2_approx(__fsub_rn(stats[k].x, top));
        sum = __fmaf_rn(weight, stats[k].y, sum);
        weights[4 * k + t][own_pair] = weight;
    }
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
    is_zero = __ballot_sync(ALL_LANES, is_zero) >> (lane & 28) & 15;

    const float share = __fdiv_rn(1.0f, sum);
    const int place = block.place(own_pair);
    __syncwarp();  // weights are there

    // Stage 2: the parts, one after the other. What is not there adds -0, as the sums begin with it: 0 would change a sign.
    float o[COLUMNS][4];
#pragma unroll 1
    do {
        if (part == 0)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[c][e] = -0.0f;
        __syncwarp();  // ptxas, which would wait for one part after the other, keeps loads ahead of it
#pragma unroll
        for (int j = 0; j < PARTS_AT_ONCE; ++j) {
            const float weight = weights[part + j][own_pair];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                o[c][0] = __fmaf_rn(weight, loaded[j][c].x, o[c][0]);
                o[c][1] = __fmaf_rn(weight, loaded[j][c].y, o[c][1]);
                o[c][2] = __fmaf_rn(weight, loaded[j][c].z, o[c][2]);
                o[c][3] = __fmaf_rn(weight, loaded[j][c].w, o[c][3]);
            }
        }
        const int done = first;
        part += PARTS_AT_ONCE;
        const bool is_last = part >= parts;
        if (is_last) part = 0, first += gridDim.y * COLUMNS;
        if (first < D / 16) load_parts(loaded, given, D, own_parts, part, first, i, thread);
        else pdl_launch_dependents();
        if (is_last && place != NOWHERE) {
            u32* const to = reinterpret_cast<u32*>(given.out + (size_t)place * D + 16 * done) + t;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    to[8 * c + 4 * half] =
                        is_zero ? 0 : bf16_pair(__fmul_rn(o[c][2 * half], share), __fmul_rn(o[c][2 * half + 1], share));
        }
    } while (first < D / 16);
}

// An entry point: the function of a shape that walks over tiles. Grid: see Block; launched by launch.py.
#define PREFILL_TILES(NAME, BLOCKS, ...)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(                                            \
        const __nv_bfloat16* __restrict__ q,       /* [M, Hq, D] */                                                \
        const __nv_bfloat16* __restrict__ k_cache, /* [P, B, Hk, D] */                                             \
        const __nv_bfloat16* __restrict__ v_cache, /* [P, B, Hk, D] */                                             \
        const int* __restrict__ block_table,       /* [S, L] */                                                    \
        const int* __restrict__ cu_rows,           /* [S + 1] */                                                   \
        const int* __restrict__ context_lens,      /* [S] */                                                       \
        __nv_bfloat16* __restrict__ out,           /* [M, Hq, D] */                                                \
        float* partials,                           /* tiles, parts: see Partial */                                 \
        float scale, int M, int S, int L, int P, int B, int Hk, int per_key, int parts, int whole,                 \
        int least) {                                                                                               \
        pdl_wait();                                                                                \
        __VA_ARGS__({q, k_cache, v_cache, block_table, cu_rows, context_lens, out, partials, scale, M, S, L, P, B, \
                     Hk, per_key, parts, whole, least});                                                           \
    }

// Grid: tiles; blocks that share the columns of one. Launched by launch.py.
#define PREFILL_COMBINE(NAME)                                                                                      \
    extern "C" __global__ void __launch_bounds__(COMBINING_THREADS) NAME(                                          \
        const int* cu_rows,      /* [S + 1] */                                                                     \
        const int* context_lens, /* [S] */                                                                         \
        __nv_bfloat16* out,      /* [M, Hq, D] */                                                                  \
        float* partials,         /* tiles, parts: see Partial */                                                   \
        int M, int S, int L, int B, int Hk, int per_key, int parts, int whole, int least, int D) {                 \
        pdl_wait();                                                                                \
        combine({nullptr, nullptr, nullptr, nullptr, cu_rows, context_lens, out, partials, 0.0f, M, S, L, 0, B,    \
                 Hk, per_key, parts, whole, least}, D);                                                            \
    }
