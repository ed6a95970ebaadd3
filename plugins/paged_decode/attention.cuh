// One row of attention over a paged cache, by the tensor cores: the same function for decode and for prefill, so that a
// row of a prompt has the bits of a decode step.
//
//   out[h, :] = sum_t softmax_t(scale * q[h, :] . k[t, :]) * v[t, :]        h: up to 8 query heads of one key head
//
// A context is cut into pieces by its length alone: tiles of 16 tokens go round pieces, ranks of a cluster and warps. A
// cluster of 2 blocks of 4 warps (one block below sm_90) takes one piece after the other, or, where there are too few rows
// for a device, several clusters share a row's pieces and a second launch combines them: a row has the same bits either
// way. Loads go straight to registers, the next tile's while this one is multiplied, also over the end of a piece; two
// blocks an SM, so that one streams while the other combines. The cache is read once for all heads of a key head.
//
// Tried on an H200 (heads of 35b, 1 x 4096, 16 x 4096, 1 x 32768 and 16 x 32768 tokens, us; a read of the bytes takes 3.4,
// 32, 17, 253): this 12.2, 50.4, 30.8, 277. Combined by the last block of a row to arrive: 13.2, 50.8, 30.8, 282; so, with
// clusters of 4 and 16 pieces 12.0, 64.4, 33.9, 357; of 8 and 8 pieces 12.2, 66.4, 32.9, 321: large clusters wait for their
// slowest block. Pieces of 1024 tokens at least 25.4, 42.5, 33.2, 281: long ones suit many rows, short ones one.
//
//   scores    A = q (16 x 16: 8 heads, 8 rows of zeros), B = k (16 x 8 tokens)
//   result    A = v transposed (16 d x 16 tokens, paired by byte_perm), B = the weights (16 tokens x 8 heads)
//
// so that the scores' accumulator is the weights' operand without an exchange between lanes. Both operands of a product
// use the same order of d, chosen for 16-byte loads of whole sectors.
//
// Numerics: scores, softmax and sums in FP32; a weight goes to the tensor core as two BF16, which hold it to 2^-17; one
// rounding at the end. Partial results are combined warp after warp, then rank after rank, then piece after piece. What
// lies beyond the context is not read. A length outside its pages, or a page outside the cache, gives a row of zeros.
#pragma once
#include <cuda_bf16.h>
#include "cluster.cuh"

constexpr int HEADS = 8, TOKENS = 16, CHUNK = 64, WARPS = 4, THREADS = WARPS * 32;
#if __CUDA_ARCH__ >= 900
constexpr int RANKS = 2;
#define ATTENTION_BOUNDS __cluster_dims__(RANKS, 1, 1) __launch_bounds__(THREADS, 2)
#else
constexpr int RANKS = 1;
#define ATTENTION_BOUNDS __launch_bounds__(THREADS, 2)
#endif
// A piece has at least so many tokens, a context at most so many pieces (launch.py has both numbers too).
constexpr int PIECE_TOKENS = 256, MOST_PIECES = 32;
constexpr int STEP = RANKS * WARPS * TOKENS;  // tokens of a piece that a cluster has in hand
constexpr int NO_PIECE = 0x7fffffff;

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

__device__ __forceinline__ int load_entry(const int* p) {
    int v;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(p));
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

    __device__ __forceinline__ int pieces() const { return min(MOST_PIECES, (length + PIECE_TOKENS - 1) / PIECE_TOKENS); }
};

// A block among those that work on one row and key head: rank ``rank`` of the ``cluster``-th of ``clusters``. If there are
// several, ``slices`` holds their results [MOST_PIECES, RANKS] and ``count`` how many pieces there are, for combine.
struct Team {
    int rank, cluster, clusters;
    float* slices;
    int* count;
};

// Where a token stands in the cache; 0, and is_bad, for a page that is not there.
__device__ __forceinline__ int place_of(const Cache& cache, const int* table, int token, bool& is_bad) {
    const int page = load_entry(table + token / cache.page_size);
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

// What the table says for a warp's first tile, read before the length of the context is known: the page of this lane's
// token, and of the tile's first one.
struct FirstPages {
    int own = -1, first = -1;

    __device__ __forceinline__ FirstPages(const Cache& cache, const int* table, int entries, int token, int lane) {
        if (entries > 0 && cache.page_size > 0) {
            own = load_entry(table + min((token + (lane & (TOKENS - 1))) / cache.page_size, entries - 1));
            first = load_entry(table + min(token / cache.page_size, entries - 1));
        }
    }
    // tile_place, of these pages.
    __device__ __forceinline__ int place(const Cache& cache, const Row& row, int tile, int lane, bool& is_bad) const {
        const int token = tile + (lane & (TOKENS - 1));
        if (tile >= row.length) return 0;
        const bool is_own = token < row.length;
        const int page = is_own ? own : first;
        const bool is_there = (u32)page < (u32)cache.pages;
        is_bad |= !is_there;
        return is_there ? page * cache.page_size + (is_own ? token : tile) % cache.page_size : 0;
    }
};

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

// Sends them on their way to shared memory; wait_for_queries before the barrier that everybody reads them after.
template <int C>
__device__ __forceinline__ void fetch_queries(Queries<C>& q, const Row& row) {
    for (int i = threadIdx.x; i < C * 2 * 32; i += THREADS) {
        const int lane = i % 32, half = i / 32 % 2, c = i / 64, exists = lane >> 2 < row.heads;
        const __nv_bfloat16* at = row.q + (lane >> 2) * C * CHUNK + c * CHUNK + half * (CHUNK / 2) + 8 * (lane & 3);
        const u32 to = (u32)__cvta_generic_to_shared(&q[c][half][lane]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(exists ? at : row.q), "r"(exists * 16)
                     : "memory");
    }
}
__device__ __forceinline__ void wait_for_queries() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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

// Where a warp is in the context: at a tile of 16 tokens from ``token`` on, in ``piece``.
struct Walk {
    int piece, token;

    __device__ __forceinline__ Walk(int piece_, int warp_of_team)
        : piece(piece_), token((piece_ * RANKS * WARPS + warp_of_team) * TOKENS) {}

    // The next tile; the next piece of the cluster after a piece's last one.
    __device__ __forceinline__ void advance(const Row& row, const Team& team, int pieces, int warp_of_team) {
        token += pieces * STEP;
        if (token >= row.length) {
            *this = Walk(piece + team.clusters, warp_of_team);
            end_beyond(row, pieces);
        }
    }
    __device__ __forceinline__ void end_beyond(const Row& row, int pieces) {
        if (piece >= pieces || token >= row.length) piece = NO_PIECE, token = row.length;
    }
};

// What counts of a partial result among others whose largest score is ``top``.
__device__ __forceinline__ float share(float largest, float top) {
    return largest == no_score() ? 0.0f : power(__fsub_rn(largest, top));
}

// Largest score and sum of weights.
using Stats = float2;

// Results of pieces, taken in one after the other by the thread that owns some columns of one head.
struct Running {
    float top = no_score(), weight = 0.0f;

    // Returns what the values so far, and the new ones, count.
    __device__ __forceinline__ float2 take(Stats piece) {
        const float largest = fmaxf(top, piece.x), old_share = share(top, largest), new_share = share(piece.x, largest);
        weight = __fmaf_rn(new_share, piece.y, __fmul_rn(weight, old_share));
        top = largest;
        return make_float2(old_share, new_share);
    }
};

__device__ __forceinline__ float2 mix(float2 total, float2 value, float2 shares) {
    return make_float2(__fmaf_rn(shares.y, value.x, __fmul_rn(total.x, shares.x)),
                       __fmaf_rn(shares.y, value.y, __fmul_rn(total.y, shares.x)));
}

// Writes 8 bytes of another rank's shared memory.
__device__ __forceinline__ void store_to_rank(float2* p, int rank, float2 value) {
#if __CUDA_ARCH__ >= 900
    u32 address = (u32)__cvta_generic_to_shared(p), remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(value.x), "f"(value.y) : "memory");
#else
    *p = value;
#endif
}

// A block may write another's shared memory once all of the cluster have begun.
__device__ __forceinline__ void announce_sending() {
#if __CUDA_ARCH__ >= 900
    cluster_arrive_relaxed();
#endif
}
__device__ __forceinline__ void begin_sending() {
#if __CUDA_ARCH__ >= 900
    cluster_wait();
#endif
}

// Shared memory of a block. Of each head a rank owns D / RANKS columns, whose partial results the others send it.
template <int C>
struct Shared {
    static constexpr int D = C * CHUNK, OWN = D / RANKS, BUFFERS = RANKS > 1 ? 2 : 1;
    static constexpr int PASS_CHUNKS = RANKS > 1 ? C : 1, PASS = PASS_CHUNKS * CHUNK;  // below sm_90 48 KB are all
    Queries<C> q;
    float partial[WARPS][HEADS][PASS + 4];
    Stats of_warp[WARPS][HEADS];
    float2 incoming[BUFFERS][RANKS][HEADS][OWN / 2];
    Stats of_rank[BUFFERS][RANKS][HEADS];
    float2 bad_of_rank[BUFFERS][RANKS];
    float2 total[HEADS][OWN / 2];  // each element is one thread's
};

__device__ __forceinline__ float top_of_warps(const Stats (&of_warp)[WARPS][HEADS], int head) {
    float top = no_score();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, of_warp[w][head].x);
    return top;
}
__device__ __forceinline__ float share_of_warp(const Stats (&of_warp)[WARPS][HEADS], int warp, int head) {
    return share(of_warp[warp][head].x, top_of_warps(of_warp, head));
}

// Sends every rank its columns of this block's result of a piece, and the statistics of all heads.
template <int C>
__device__ __forceinline__ void send(Shared<C>& shared, const Softmax<C>& softmax, bool is_bad, int buffer, int rank,
                                     bool is_first) {
    using S = Shared<C>;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float sum = softmax.sum;
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
    if (t == 0) shared.of_warp[warp][g] = make_float2(softmax.largest, sum);
    const bool any_bad = __syncthreads_or(is_bad);
    const float even = share_of_warp(shared.of_warp, warp, 2 * t), odd = share_of_warp(shared.of_warp, warp, 2 * t + 1);
    if (is_first) begin_sending();
    for (int i = threadIdx.x; i < HEADS * RANKS; i += THREADS) {
        const int head = i / RANKS;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
            total = __fmaf_rn(share_of_warp(shared.of_warp, w, head), shared.of_warp[w][head].y, total);
        store_to_rank(&shared.of_rank[buffer][rank][head], i % RANKS, make_float2(top_of_warps(shared.of_warp, head), total));
    }
    if (threadIdx.x < RANKS)
        store_to_rank(&shared.bad_of_rank[buffer][rank], threadIdx.x, make_float2(any_bad ? 1.0f : 0.0f, 0.0f));
#pragma unroll
    for (int pass = 0; pass < C / S::PASS_CHUNKS; ++pass) {
        if (pass > 0) __syncthreads();
#pragma unroll
        for (int c = 0; c < S::PASS_CHUNKS; ++c)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float* o = softmax.o[pass * S::PASS_CHUNKS + c][j];
                    const float counts = h ? odd : even;
                    *reinterpret_cast<float2*>(&shared.partial[warp][2 * t + h][c * CHUNK + 8 * g + 2 * j]) =
                        make_float2(__fmul_rn(o[h], counts), __fmul_rn(o[2 + h], counts));
                }
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < HEADS * S::PASS / 2; i += THREADS) {
            const int head = i / (S::PASS / 2), at = i % (S::PASS / 2), pair = pass * (S::PASS / 2) + at;
            float2 total = *reinterpret_cast<const float2*>(&shared.partial[0][head][2 * at]);
#pragma unroll
            for (int w = 1; w < WARPS; ++w) {
                const float2 value = *reinterpret_cast<const float2*>(&shared.partial[w][head][2 * at]);
                total = make_float2(__fadd_rn(total.x, value.x), __fadd_rn(total.y, value.y));
            }
            store_to_rank(&shared.incoming[buffer][rank][head][pair % (S::OWN / 2)], pair / (S::OWN / 2), total);
        }
    }
}

// A thread's head, and the first of its pairs of columns among those of its rank: every 16th is its own.
constexpr int PAIR_STEP = THREADS / HEADS;
__device__ __forceinline__ int own_head() { return threadIdx.x / PAIR_STEP; }
__device__ __forceinline__ int own_pair() { return threadIdx.x % PAIR_STEP; }

// What the ranks sent of a piece: the statistics of this thread's head, then its columns.
template <int C>
struct Piece {
    Stats stats;
    float shares[RANKS];

    __device__ __forceinline__ Piece(const Shared<C>& shared, int buffer) {
        float top = no_score(), weight = 0.0f;
        Stats ranks[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            ranks[r] = shared.of_rank[buffer][r][own_head()];
            top = fmaxf(top, ranks[r].x);
        }
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            shares[r] = share(ranks[r].x, top);
            weight = __fmaf_rn(shares[r], ranks[r].y, weight);
        }
        stats = make_float2(top, weight);
    }
    __device__ __forceinline__ float2 columns(const Shared<C>& shared, int buffer, int pair) const {
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            const float2 value = shared.incoming[buffer][r][own_head()][pair];
            total = make_float2(__fmaf_rn(shares[r], value.x, total.x), __fmaf_rn(shares[r], value.y, total.y));
        }
        return total;
    }
};

// A slice holds what one rank has of one piece: its columns of all heads, then the heads' statistics. Of a bad piece the
// sum of weights is -1.
template <int C>
struct Slice {
    static constexpr int COLUMNS = Shared<C>::OWN / 2, PAIRS = HEADS * COLUMNS, FLOATS = 2 * PAIRS + 32;
    float2* at;

    __device__ __forceinline__ Slice(float* slices, int piece, int rank)
        : at(reinterpret_cast<float2*>(slices + (size_t)(piece * RANKS + rank) * FLOATS)) {}
    __device__ __forceinline__ float2* columns(int head, int pair) const { return at + head * COLUMNS + pair; }
    __device__ __forceinline__ Stats* stats(int head) const { return at + PAIRS + head; }
};

__device__ __forceinline__ void finish(__nv_bfloat16* out, float2 total, float weight, bool is_zero) {
    const float low = is_zero ? 0.0f : __fdiv_rn(total.x, weight), high = is_zero ? 0.0f : __fdiv_rn(total.y, weight);
    *reinterpret_cast<u32*>(out) = pair(low, high);
}

// One row. Launch: THREADS threads, RANKS blocks a cluster; all threads of all of them come here, once their memory is
// there to be read. scale includes log2(e).
template <int C>
__device__ __forceinline__ void attend(const Cache& cache, const Row& row, const FirstPages& pages, float scale,
                                       const Team& team) {
    constexpr int D = C * CHUNK, PAIRS = Shared<C>::OWN / 2;
    __shared__ Shared<C> shared;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp_of_team = team.rank * WARPS + warp, pieces = row.pieces();
    if (team.cluster > 0 && team.cluster >= pieces) return;  // the whole cluster
    announce_sending();

    // Stage 1: the first tile, and the queries.
    Walk now(team.cluster, warp_of_team);
    now.end_beyond(row, pieces);
    Walk next = now;
    if (now.piece != NO_PIECE) next.advance(row, team, pieces, warp_of_team);
    bool is_bad = false;
    Tile<C> tile;
    // Loads return in the order in which they were issued: what is needed first, and what is small, goes ahead.
    fetch_queries<C>(shared.q, row);
    int place = pages.place(cache, row, now.token, lane, is_bad);
    int next_place = tile_place(cache, row, next.token, lane, is_bad);
    if (now.piece != NO_PIECE) {
        const KeyPointers keys(cache, row.key_head, D, place, g, t);
        const ValuePointers values(cache, row.key_head, D, place, g, t);
#pragma unroll
        for (int c = 0; c < C; ++c) tile.load_k(keys.at, c);
#pragma unroll
        for (int c = 0; c < C; ++c) tile.load_v(values.at, c);
    }
    wait_for_queries();
    for (int i = own_pair(); i < PAIRS; i += PAIR_STEP) shared.total[own_head()][i] = make_float2(0.0f, 0.0f);
    __syncthreads();

    // Stage 2: piece after piece.
    Running running;
    bool any_bad = false, is_first = true;
    int buffer = 0;
#pragma unroll 1
    for (int piece = team.cluster; piece < pieces; piece += team.clusters) {
        Softmax<C> softmax;
#pragma unroll 1
        while (now.piece == piece) {
            const int token = now.token;
            const bool has_next = next.piece != NO_PIECE;
            now = next;
            place = next_place;
            if (has_next) next.advance(row, team, pieces, warp_of_team);
            next_place = tile_place(cache, row, next.token, lane, is_bad);
            const KeyPointers keys(cache, row.key_head, D, place, g, t);
            float parts[2][2][4] = {};
#pragma unroll
            for (int c = 0; c < C; ++c) {
                score<C>(parts, shared.q, tile, c, lane);
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
        send<C>(shared, softmax, is_bad, buffer, team.rank, is_first);
        is_first = false;
        cluster_barrier();
        const Piece<C> result(shared, buffer);
        bool piece_bad = false;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) piece_bad |= shared.bad_of_rank[buffer][r].x != 0.0f;
        any_bad |= piece_bad;
        if (team.clusters > 1) {
            const Slice<C> slice(team.slices, piece, team.rank);
            for (int i = own_pair(); i < PAIRS; i += PAIR_STEP)
                *slice.columns(own_head(), i) = result.columns(shared, buffer, i);
            if (own_pair() == 0) *slice.stats(own_head()) = make_float2(result.stats.x, piece_bad ? -1.0f : result.stats.y);
        } else {
            const float2 shares = running.take(result.stats);
            for (int i = own_pair(); i < PAIRS; i += PAIR_STEP)
                shared.total[own_head()][i] = mix(shared.total[own_head()][i], result.columns(shared, buffer, i), shares);
        }
        if (Shared<C>::BUFFERS > 1) buffer ^= 1;
        else __syncthreads();  // the next piece writes what this one reads
    }

    if (pieces == 0) begin_sending();  // what was announced ends here

    // Stage 3: the results, unless there is more to combine.
    if (team.clusters > 1) {
        if (team.cluster == 0 && team.rank == 0 && threadIdx.x == 0) *team.count = pieces;
        return;
    }
    for (int i = own_pair(); i < PAIRS && own_head() < row.heads; i += PAIR_STEP)
        finish(row.out + own_head() * D + team.rank * 2 * PAIRS + 2 * i, shared.total[own_head()][i], running.weight,
               any_bad || row.length == 0);
}

// The pieces of one head, in their order, by a block of D / 2 threads or more.
constexpr int COMBINED_TOGETHER = 16;

template <int C>
__device__ __forceinline__ void combine(float* slices, const int* counts, __nv_bfloat16* out, int per_key) {
    constexpr int D = C * CHUNK, COLUMNS = Slice<C>::COLUMNS;
    const int team = blockIdx.x / HEADS, head = blockIdx.x % HEADS, groups = (per_key + HEADS - 1) / HEADS;
    const int of_key = team % groups * HEADS + head;  // among the query heads of a key head
    if (threadIdx.x >= D / 2 || of_key >= per_key) return;
    const int pieces = min(counts[team], MOST_PIECES), rank = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    float* const own = slices + (size_t)team * MOST_PIECES * RANKS * Slice<C>::FLOATS;
    Running running;
    float2 total = make_float2(0.0f, 0.0f);
    bool any_bad = false;
#pragma unroll 1
    for (int first = 0; first < pieces; first += COMBINED_TOGETHER) {
        Stats stats[COMBINED_TOGETHER];
        float2 values[COMBINED_TOGETHER];
#pragma unroll
        for (int j = 0; j < COMBINED_TOGETHER; ++j) {
            if (first + j >= pieces) continue;
            const Slice<C> slice(own, first + j, rank);
            stats[j] = __ldcg(slice.stats(head));
            values[j] = __ldcg(slice.columns(head, column));
        }
#pragma unroll
        for (int j = 0; j < COMBINED_TOGETHER; ++j) {
            if (first + j >= pieces) continue;
            any_bad |= stats[j].y < 0.0f;
            total = mix(total, values[j], running.take(stats[j]));
        }
    }
    __nv_bfloat16* const heads = out + ((size_t)(team / groups) * per_key + of_key) * D;
    finish(heads + 2 * threadIdx.x, total, running.weight, any_bad || pieces == 0);
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

// Which row, key head and eight of its query heads a block works on, and in which team. Grid: clusters * rows * key_heads *
// ceil(per_key / 8) * RANKS, the first cluster of every row first.
struct BlockPlace {
    int row, key_head, head, heads, team, rank, cluster;

    __device__ __forceinline__ BlockPlace(int teams, int key_heads, int per_key) {
        const int groups = (per_key + HEADS - 1) / HEADS, index = blockIdx.x / RANKS;
        rank = blockIdx.x % RANKS;
        cluster = index / teams;
        team = index % teams;
        const int group = team % groups;
        key_head = team / groups % key_heads;
        row = team / groups / key_heads;
        head = key_head * per_key + group * HEADS;
        heads = min(HEADS, per_key - group * HEADS);
    }

    // The first token of this warp.
    __device__ __forceinline__ int first_token() const {
        return ((cluster * RANKS + rank) * WARPS + (int)(threadIdx.x >> 5)) * TOKENS;
    }

    // This block's team; of several clusters it has scratch memory.
    template <int C>
    __device__ __forceinline__ Team team_of(int clusters, float* slices, int* counts) const {
        return {rank, cluster, clusters, slices + (size_t)team * MOST_PIECES * RANKS * Slice<C>::FLOATS, counts + team};
    }
};

// The second launch, for teams of several clusters. Grid: teams * HEADS.
#define COMBINE(NAME, D)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_combine_d##D(                                     \
        float* slices, const int* counts, __nv_bfloat16* __restrict__ out, /* [rows, Hq, D] */ int per_key) {      \
        allow_next_launch();                                                                                       \
        wait_for_previous_launch();                                                                                \
        combine<D / CHUNK>(slices, counts, out, per_key);                                                          \
    }
