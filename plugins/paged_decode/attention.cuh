// One row of attention over a paged cache, by the tensor cores: the same function for decode and for prefill, so that a
// row of a prompt has the bits of a decode step.
//
//   out[h, :] = sum_t softmax_t(scale * q[h, :] . k[t, :]) * v[t, :]        h: up to 8 query heads of one key head
//
// A cluster of 8 blocks of 8 warps (one block below sm_90) takes a row and a key head; its warps take tiles of 16 tokens
// in turn, a function of the context's length only. Loads go straight to registers, the next tile's while this one is
// multiplied; the cache is read once for all heads of a key head.
//
//   scores    A = q (16 x 16: 8 heads, 8 rows of zeros), B = k (16 x 8 tokens)
//   result    A = v transposed (16 d x 16 tokens, paired by byte_perm), B = the weights (16 tokens x 8 heads)
//
// so that the scores' accumulator is the weights' operand without an exchange between lanes. Both operands of a product
// use the same order of d, chosen for 16-byte loads of whole sectors.
//
// Numerics: scores, softmax and sums in FP32; a weight goes to the tensor core as two BF16, which hold it to 2^-17; one
// rounding at the end. Partial results are combined warp after warp, then rank after rank. What lies beyond the context
// is not read. A length outside its pages, or a page outside the cache, gives a row of zeros.
#pragma once
#include <cuda_bf16.h>
#include "cluster.cuh"

constexpr int HEADS = 8, TOKENS = 16, CHUNK = 64, WARPS = 8;
#if __CUDA_ARCH__ >= 900
constexpr int RANKS = 8;
#define ATTENTION_BOUNDS __cluster_dims__(RANKS, 1, 1) __launch_bounds__(WARPS * 32, 1)
#else
constexpr int RANKS = 1;
#define ATTENTION_BOUNDS __launch_bounds__(WARPS * 32, 1)
#endif
constexpr int STEP = RANKS * WARPS * TOKENS;

// --- instruction wrappers (PTX ISA 8.0) ---

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// volatile: the order in which loads are issued is the order written here
__device__ __forceinline__ uint4 load_16(const __nv_bfloat16* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// --- device functions ---

// -infinity: the score of what is not there.
__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }

// A paged cache: k, v [pages, page_size, key_heads, D].
struct Cache {
    const __nv_bfloat16 *k, *v;
    int pages, page_size, key_heads;
};

// One row of one key head: ``heads`` of its query heads, at q and out [heads, D], over ``length`` tokens in the pages of
// ``table``.
struct Row {
    const __nv_bfloat16* q;
    __nv_bfloat16* out;
    const int* table;
    int heads, key_head, length;
};

// Where a token stands in the cache; 0, and is_bad, for a page that is not there.
__device__ __forceinline__ int place_of(const Cache& cache, const int* table, int token, bool& is_bad) {
    const int page = table[token / cache.page_size];
    const bool is_there = (u32)page < (u32)cache.pages;
    is_bad |= !is_there;
    return is_there ? page * cache.page_size + token % cache.page_size : 0;
}

// The place of this lane's token of a tile. For a token beyond the context it is that of the tile's first one, so that
// what is loaded is a number; its weight will be zero.
__device__ __forceinline__ int tile_place(const Cache& cache, const Row& row, int first, int lane, bool& is_bad) {
    const int token = first + (lane & (TOKENS - 1));
    return first < row.length ? place_of(cache, row.table, token < row.length ? token : first, is_bad) : 0;
}

__device__ __forceinline__ u32 pair(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&v);
}

__device__ __forceinline__ float low_part(float p) { return __fsub_rn(p, __bfloat162float(__float2bfloat16_rn(p))); }

// 2^x, where x <= 0 or -infinity: 2^-22 relative.
__device__ __forceinline__ float power(float x) { return exp2f(x); }

// Running softmax of one warp. Lane (g, t) = (lane / 4, lane % 4) keeps largest and sum of head g (the sum over its own
// tokens), and o[c][j] = {(2t, d), (2t + 1, d), (2t, d + 1), (2t + 1, d + 1)} as (head, d), d = 64 c + 8 g + 2 j.
template <int C>
struct Softmax {
    float o[C][4][4] = {};
    float largest = no_score(), sum = 0.0f;

    // Takes 16 scores a head in: those of lane (g, t) are head g, tokens 2t, 2t + 1, 2t + 8, 2t + 9. Returns the weights.
    __device__ __forceinline__ void weigh(const float (&s)[4], int t, u32 (&high)[2], u32 (&low)[2]) {
        float top = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(largest, fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)));
        const float keep = power(__fsub_rn(largest, top));
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) p[i] = power(__fsub_rn(s[i], top));
        sum = __fmaf_rn(sum, keep, __fadd_rn(__fadd_rn(p[0], p[1]), __fadd_rn(p[2], p[3])));
        largest = top;
        high[0] = pair(p[0], p[1]);
        high[1] = pair(p[2], p[3]);
        low[0] = pair(low_part(p[0]), low_part(p[1]));
        low[1] = pair(low_part(p[2]), low_part(p[3]));
        const float even = __shfl_sync(0xffffffffu, keep, 8 * t), odd = __shfl_sync(0xffffffffu, keep, 8 * t + 4);
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                o[c][j][0] = __fmul_rn(o[c][j][0], even);
                o[c][j][1] = __fmul_rn(o[c][j][1], odd);
                o[c][j][2] = __fmul_rn(o[c][j][2], even);
                o[c][j][3] = __fmul_rn(o[c][j][3], odd);
            }
    }

    // Adds the weights times 64 columns of v; v holds tokens 2t, 2t + 1, 2t + 8, 2t + 9 at d = 64 c + 8 g.
    __device__ __forceinline__ void add(int c, const uint4 (&v)[4], const u32 (&high)[2], const u32 (&low)[2]) {
        const u32 words[4][4] = {{v[0].x, v[0].y, v[0].z, v[0].w}, {v[1].x, v[1].y, v[1].z, v[1].w},
                                 {v[2].x, v[2].y, v[2].z, v[2].w}, {v[3].x, v[3].y, v[3].z, v[3].w}};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 a0 = __byte_perm(words[0][j], words[1][j], 0x5410), a1 = __byte_perm(words[0][j], words[1][j], 0x7632);
            const u32 a2 = __byte_perm(words[2][j], words[3][j], 0x5410), a3 = __byte_perm(words[2][j], words[3][j], 0x7632);
            mma_16x8x16(o[c][j], a0, a1, a2, a3, high[0], high[1]);
            mma_16x8x16(o[c][j], a0, a1, a2, a3, low[0], low[1]);
        }
    }
};

// One tile of 16 tokens as a lane reads it: k of tokens g and g + 8 at d = 64 c + 8 t and 32 more, v as Softmax::add.
template <int C>
struct Tile {
    uint4 k[C][2][2], v[C][4];

    __device__ __forceinline__ void load_k(const __nv_bfloat16* const (&at)[2], int c) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            k[c][h][0] = load_16(at[h] + c * CHUNK);
            k[c][h][1] = load_16(at[h] + c * CHUNK + CHUNK / 2);
        }
    }
    __device__ __forceinline__ void load_v(const __nv_bfloat16* const (&at)[4], int c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[c][i] = load_16(at[i] + c * CHUNK);
    }
};

// Where a lane's tokens of a tile begin, for k and for v; ``place`` is that of token lane % 16.
struct KeyPointers {
    const __nv_bfloat16* at[2];

    __device__ __forceinline__ KeyPointers(const Cache& cache, int key_head, int D, int place, int g, int t) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            at[h] = cache.k + ((size_t)__shfl_sync(0xffffffffu, place, g + 8 * h) * cache.key_heads + key_head) * D + 8 * t;
    }
};

struct ValuePointers {
    const __nv_bfloat16* at[4];

    __device__ __forceinline__ ValuePointers(const Cache& cache, int key_head, int D, int place, int g, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = 2 * t + (i & 1) + 8 * (i >> 1);
            at[i] = cache.v + ((size_t)__shfl_sync(0xffffffffu, place, token) * cache.key_heads + key_head) * D + 8 * g;
        }
    }
};

// A row's queries as lanes read them, 16 bytes each: d = 64 c + 32 half + 8 t .. + 7 of head g, zeros from ``heads`` on.
template <int C>
using Queries = uint4[C][2][32];

template <int C>
__device__ __forceinline__ void load_queries(Queries<C>& q, const Row& row) {
    for (int i = threadIdx.x; i < C * 2 * 32; i += WARPS * 32) {
        const int lane = i % 32, half = i / 32 % 2, c = i / 64;
        const __nv_bfloat16* at = row.q + (lane >> 2) * C * CHUNK + c * CHUNK + half * (CHUNK / 2) + 8 * (lane & 3);
        q[c][half][lane] = lane >> 2 < row.heads ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
    }
}

template <int C>
__device__ __forceinline__ void score(float (&s)[2][2][4], const Queries<C>& q, const Tile<C>& tile, int c, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 a = q[c][half][lane];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint4 k = tile.k[c][h][half];
            mma_16x8x16(s[h][c & 1], a.x, 0, a.y, 0, k.x, k.y);
            mma_16x8x16(s[h][c & 1], a.z, 0, a.w, 0, k.z, k.w);
        }
    }
}

// A warp's share of the context: tiles first, first + STEP, ...
template <int C>
__device__ __forceinline__ void attend_tiles(Softmax<C>& softmax, const Cache& cache, const Row& row,
                                             const Queries<C>& q, float scale, int first, int lane, bool& is_bad) {
    constexpr int D = C * CHUNK;
    const int g = lane >> 2, t = lane & 3;
    Tile<C> tile;
    int place = tile_place(cache, row, first, lane, is_bad);
    {
        const KeyPointers keys(cache, row.key_head, D, place, g, t);
        const ValuePointers values(cache, row.key_head, D, place, g, t);
#pragma unroll
        for (int c = 0; c < C; ++c) tile.load_k(keys.at, c);
#pragma unroll
        for (int c = 0; c < C; ++c) tile.load_v(values.at, c);
    }
    int next_place = tile_place(cache, row, first + STEP, lane, is_bad);
#pragma unroll 1
    for (int token = first; token < row.length; token += STEP) {
        const bool has_next = token + STEP < row.length;
        place = next_place;
        next_place = tile_place(cache, row, token + 2 * STEP, lane, is_bad);
        const KeyPointers keys(cache, row.key_head, D, place, g, t);
        float parts[2][2][4] = {};
#pragma unroll
        for (int c = 0; c < C; ++c) {
            score<C>(parts, q, tile, c, lane);
            if (has_next) tile.load_k(keys.at, c);
        }
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int h = i >> 1, at = token + 8 * h + 2 * t + (i & 1);
            const float product = __fmul_rn(__fadd_rn(parts[h][0][i & 1], parts[h][1][i & 1]), scale);
            s[i] = at < row.length ? product : no_score();
        }
        u32 high[2], low[2];
        softmax.weigh(s, t, high, low);
        const ValuePointers values(cache, row.key_head, D, place, g, t);
#pragma unroll
        for (int c = 0; c < C; ++c) {
            softmax.add(c, tile.v[c], high, low);
            if (has_next) tile.load_v(values.at, c);
        }
    }
}

// What a partial result counts among others whose largest score is ``top``.
__device__ __forceinline__ float share(float largest, float top) {
    return largest == no_score() ? 0.0f : power(__fsub_rn(largest, top));
}

// One row. Launch: WARPS * 32 threads, RANKS blocks; all threads of all of them come here. scale includes log2(e).
template <int C>
__device__ __forceinline__ void attend(const Cache& cache, const Row& row, float scale, int rank) {
    constexpr int D = C * CHUNK;
    __shared__ Queries<C> q;
    __shared__ float partial[WARPS][HEADS][CHUNK + 4];
    __shared__ float mine[HEADS * D];
    __shared__ float largest[WARPS][HEADS], sums[WARPS][HEADS];
    __shared__ float block_largest[HEADS], block_sum[HEADS], block_bad[1];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

    // Stage 1: each warp attends to its tiles.
    load_queries<C>(q, row);
    __syncthreads();
    Softmax<C> softmax;
    bool is_bad = false;
    const int first = (rank * WARPS + warp) * TOKENS;
    if (first < row.length) attend_tiles<C>(softmax, cache, row, q, scale, first, lane, is_bad);
    float sum = softmax.sum;
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
    if (t == 0) {
        largest[warp][g] = softmax.largest;
        sums[warp][g] = sum;
    }
    const bool any_bad = __syncthreads_or(is_bad);

    // Stage 2: sums over warps in rising order, 64 columns at a time.
    float even_top = no_score(), odd_top = no_score();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        even_top = fmaxf(even_top, largest[w][2 * t]);
        odd_top = fmaxf(odd_top, largest[w][2 * t + 1]);
    }
    const float even = share(largest[warp][2 * t], even_top), odd = share(largest[warp][2 * t + 1], odd_top);
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                partial[warp][2 * t + (i & 1)][8 * g + 2 * j + (i >> 1)] = __fmul_rn(softmax.o[c][j][i], i & 1 ? odd : even);
        __syncthreads();
        for (int i = threadIdx.x; i < HEADS * CHUNK; i += WARPS * 32) {
            const int head = i / CHUNK, d = i % CHUNK;
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) total = __fadd_rn(total, partial[w][head][d]);
            mine[head * D + c * CHUNK + d] = total;
        }
        __syncthreads();
    }
    if (threadIdx.x < HEADS) {
        const int head = threadIdx.x;
        float top = no_score(), total = 0.0f;
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, largest[w][head]);
        for (int w = 0; w < WARPS; ++w) total = __fmaf_rn(share(largest[w][head], top), sums[w][head], total);
        block_largest[head] = top;
        block_sum[head] = total;
    }
    if (threadIdx.x == 0) block_bad[0] = any_bad ? 1.0f : 0.0f;

    // Stage 3: each rank sums its columns over ranks in rising order, and stores.
    cluster_barrier();
    constexpr int OWN = HEADS * D / RANKS;
    for (int i = rank * OWN + threadIdx.x; i < (rank + 1) * OWN; i += WARPS * 32) {
        const int head = i / D;
        float top = no_score(), total = 0.0f, weight = 0.0f, bad = 0.0f, tops[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            tops[r] = load_from_rank(&block_largest[head], r);
            bad = bad + load_from_rank(&block_bad[0], r);
            top = fmaxf(top, tops[r]);
        }
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            const float counts = share(tops[r], top);
            weight = __fmaf_rn(counts, load_from_rank(&block_sum[head], r), weight);
            total = __fmaf_rn(counts, load_from_rank(&mine[i], r), total);
        }
        const bool is_zero = row.length == 0 || bad != 0.0f;
        if (head < row.heads) row.out[i] = __float2bfloat16_rn(is_zero ? 0.0f : __fdiv_rn(total, weight));
    }
    cluster_barrier();  // nobody leaves while others read its shared memory
}

// The simple way, for any D up to 8 * 128: one block of 128 threads a query head. ``row`` has one head.
constexpr int ANY_THREADS = 128, ANY_COLUMNS = 8, ANY_TOKENS = 32;

__device__ __forceinline__ void attend_any(const Cache& cache, const Row& row, float scale, int D) {
    __shared__ float scores[ANY_TOKENS];
    __shared__ int places[ANY_TOKENS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const size_t stride = (size_t)cache.key_heads * D, head = (size_t)row.key_head * D;
    float o[ANY_COLUMNS] = {}, largest = no_score(), sum = 0.0f;
    bool is_bad = false;
    for (int first = 0; first < row.length; first += ANY_TOKENS) {
        const int count = min(ANY_TOKENS, row.length - first);
        __syncthreads();
        if (threadIdx.x < count) places[threadIdx.x] = place_of(cache, row.table, first + threadIdx.x, is_bad);
        __syncthreads();
        for (int i = warp; i < count; i += ANY_THREADS / 32) {
            const __nv_bfloat16* k = cache.k + places[i] * stride + head;
            float dot = 0.0f;
            for (int d = lane; d < D; d += 32) dot = __fmaf_rn(__bfloat162float(row.q[d]), __bfloat162float(k[d]), dot);
#pragma unroll
            for (int step = 16; step > 0; step >>= 1) dot = __fadd_rn(dot, __shfl_xor_sync(0xffffffffu, dot, step));
            if (lane == 0) scores[i] = __fmul_rn(dot, scale);
        }
        __syncthreads();
        float top = largest;
        for (int i = 0; i < count; ++i) top = fmaxf(top, scores[i]);
        const float keep = power(__fsub_rn(largest, top));
        largest = top;
        sum = __fmul_rn(sum, keep);
#pragma unroll
        for (int j = 0; j < ANY_COLUMNS; ++j) o[j] = __fmul_rn(o[j], keep);
        for (int i = 0; i < count; ++i) {
            const float p = power(__fsub_rn(scores[i], top));
            const __nv_bfloat16* v = cache.v + places[i] * stride + head;
            sum = __fadd_rn(sum, p);
#pragma unroll
            for (int j = 0; j < ANY_COLUMNS; ++j) {
                const int d = threadIdx.x + j * ANY_THREADS;
                if (d < D) o[j] = __fmaf_rn(p, __bfloat162float(v[d]), o[j]);
            }
        }
    }
    const bool is_zero = __syncthreads_or(is_bad) || row.length == 0;
#pragma unroll
    for (int j = 0; j < ANY_COLUMNS; ++j) {
        const int d = threadIdx.x + j * ANY_THREADS;
        if (d < D) row.out[d] = __float2bfloat16_rn(is_zero ? 0.0f : __fdiv_rn(o[j], sum));
    }
}

// The length of a context, or 0 where it does not fit its pages: such a row is zeros.
__device__ __forceinline__ int checked_length(int length, const Cache& cache, int entries) {
    const bool fits = length > 0 && cache.pages > 0 && length <= (long long)entries * cache.page_size;
    return fits ? length : 0;
}

// Which row, key head and eight of its query heads a block works on. Grid: rows * key_heads * ceil(per_key / 8) * RANKS.
struct BlockPlace {
    int row, key_head, head, heads, rank;

    __device__ __forceinline__ BlockPlace(int key_heads, int per_key) {
        const int groups = (per_key + HEADS - 1) / HEADS, index = blockIdx.x / RANKS;
        rank = blockIdx.x % RANKS;
        const int group = index % groups;
        key_head = index / groups % key_heads;
        row = index / groups / key_heads;
        head = key_head * per_key + group * HEADS;
        heads = min(HEADS, per_key - group * HEADS);
    }
};
