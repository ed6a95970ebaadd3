// One row of attention over a paged cache, by the tensor cores: the same function for decode and for prefill, so that a
// row of a prompt has the bits of a decode step.
//
//   out[h, :] = sum_t softmax_t(scale * q[h, :] . k[t, :]) * v[t, :]        h: up to 8 query heads of one key head
//
// A step is 64 tokens, which a block of 4 warps has in its registers: each warp multiplies the keys of 16 of them, the
// weights go through shared memory, and each warp multiplies all 64 values in its quarter of the columns. So no warp has
// anything to combine with another. The next step's loads are issued while this one is multiplied. The cache is read once
// for all heads of a key head.
//
// A context is cut by its length alone: its steps go round pieces, RANKS pieces that follow each other are a group. Pieces
// are taken in one after the other within a group, then groups. A row has the same bits however it is shared out:
//   one piece              the block that has it writes the result
//   few rows, sm_90 on     a cluster a group, a block a piece; the blocks push each other their columns of all heads
//   many rows              a block takes all pieces of a group, and group after group
// Where several groups have several owners, the last one to be done combines them.
//
//   scores    A = q (16 x 16: 8 heads, 8 rows of zeros), B = k (16 x 8 tokens)
//   result    A = v transposed (16 d x 16 tokens, paired by byte_perm), B = the weights (16 tokens x 8 heads)
//
// Both operands of a product use the same order of d, chosen for wide loads of whole sectors.
//
// Numerics: scores, softmax and sums in FP32; a weight goes to the tensor core as two BF16, which hold it to 2^-17; one
// rounding at the end, and one more with a gate. What lies beyond the context is not read. A length outside its pages, or
// a page outside the cache, gives a row of zeros.
#pragma once
#include "bf16.cuh"
#include "cluster.cuh"

constexpr int HEADS = 8, TILE = 16, CHUNK = 64, WARPS = 4, THREADS = WARPS * 32;
constexpr int TOKENS = WARPS * TILE;  // of a step
#if __CUDA_ARCH__ >= 900
constexpr int RANKS = 8;
#define SPREAD_BOUNDS __cluster_dims__(RANKS, 1, 1) __launch_bounds__(THREADS, 2)
#else
constexpr int RANKS = 1;  // without clusters a group is one piece
#define SPREAD_BOUNDS __launch_bounds__(THREADS, 2)
#endif
#define ATTENTION_BOUNDS __launch_bounds__(THREADS, 2)
// A piece has at least so many tokens (launch.py has the number too).
constexpr int PIECE_TOKENS = 64;
constexpr int NO_PIECE = 0x7fffffff;
constexpr bool HAS_CLUSTERS = RANKS > 1;

// --- instruction wrappers (PTX ISA 8.0) ---

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int N>
struct alignas(4 * N) Words {
    u32 at[N];
};

// volatile: the order in which loads are issued is the order written here
__device__ __forceinline__ void load_words(Words<4>& v, const __nv_bfloat16* p) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.at[0]), "=r"(v.at[1]), "=r"(v.at[2]), "=r"(v.at[3]) : "l"(p));
}
__device__ __forceinline__ void load_words(Words<2>& v, const __nv_bfloat16* p) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.at[0]), "=r"(v.at[1]) : "l"(p));
}
__device__ __forceinline__ void load_words(Words<1>& v, const __nv_bfloat16* p) {
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v.at[0]) : "l"(p));
}

__device__ __forceinline__ int load_entry(const int* p) {
    int v;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Shared memory of another block of the cluster.
__device__ __forceinline__ u32 address_in_rank(const void* p, int rank) {
    u32 address = (u32)__cvta_generic_to_shared(p);
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}
__device__ __forceinline__ void push(u32 address, float2 value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
#endif
}
__device__ __forceinline__ void push(u32 address, float4 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
#endif
}

// --- device functions ---

// -infinity: the score of what is not there.
__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }

// A paged cache: k, v [pages, page_size, key_heads, D].
struct Cache {
    const __nv_bfloat16 *k, *v;
    int pages, page_size, key_heads;

    __device__ __forceinline__ int page_of(int token) const {  // a division costs as much as twenty additions
        const bool is_power = (page_size & (page_size - 1)) == 0;
        return is_power ? token >> (31 - __clz(page_size)) : token / page_size;
    }
    // Where a token stands that has this page; 0, and is_bad, for a page that is not there.
    __device__ __forceinline__ int place(int page, int token, bool& is_bad) const {
        const bool is_there = (u32)page < (u32)pages;
        is_bad |= !is_there;
        return is_there ? page * page_size + token - page_of(token) * page_size : 0;
    }
};

// One row of one key head: ``heads`` of its query heads, at q and out [heads, D], over ``length`` tokens in the pages of
// ``table``. With a gate, out = BF16(attention) * sigmoid(gate).
struct Row {
    const __nv_bfloat16* q;
    __nv_bfloat16* out;
    const int* table;
    int heads, key_head, length;
    const __nv_bfloat16* gate;
};

// How a row is cut, by its length alone: ``most`` is the same for all rows of a launch, and of every launch with these heads.
struct Cut {
    int pieces, groups;

    __device__ __forceinline__ Cut(int length, int most)
        : pieces(min(most, (length + PIECE_TOKENS - 1) / PIECE_TOKENS)), groups((pieces + RANKS - 1) / RANKS) {}
};

// A block among those that work on one row and key head: its first group, and how many take groups in turn; in a cluster
// its rank. ``slices`` holds what several of them have to combine, ``counts`` how many groups are done (for each rank).
struct Team {
    int rank, index, sharing, most;
    float* slices;
    int* counts;
};

// The places of two tokens of a step a lane: lane, and lane + 32. For a token beyond the context it is that of the step's
// first one, so that what is loaded is a number; its weight will be zero.
struct Places {
    int at[2] = {0, 0};

    __device__ __forceinline__ Places() {}
    __device__ __forceinline__ Places(const Cache& cache, const Row& row, int first, int lane, bool& is_bad) {
        if (first >= row.length) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int wanted = first + 32 * i + lane, token = wanted < row.length ? wanted : first;
            at[i] = cache.place(load_entry(row.table + cache.page_of(token)), token, is_bad);
        }
    }
    // The place of token 16 * tile + offset of the step.
    __device__ __forceinline__ int of(int tile, int offset) const {
        return __shfl_sync(0xffffffffu, at[tile >> 1], (tile & 1) * TILE + offset);
    }
};

// What the table says of a block's first step, read before the length of the context is known: the pages of this lane's
// tokens, and of the first one.
struct FirstPages {
    int own[2] = {-1, -1}, first = -1;

    __device__ __forceinline__ FirstPages(const Cache& cache, const int* table, int entries, int token, int lane) {
        if (entries <= 0 || cache.page_size <= 0) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) own[i] = load_entry(table + min(cache.page_of(token + 32 * i + lane), entries - 1));
        first = load_entry(table + min(cache.page_of(token), entries - 1));
    }
    __device__ __forceinline__ Places places(const Cache& cache, const Row& row, int token, int lane, bool& is_bad) const {
        Places found;
        if (token >= row.length) return found;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int wanted = token + 32 * i + lane;
            const bool is_own = wanted < row.length;
            found.at[i] = cache.place(is_own ? own[i] : first, is_own ? wanted : token, is_bad);
        }
        return found;
    }
};

__device__ __forceinline__ u32 pair(float low, float high) { return bf16_pair(low, high); }
__device__ __forceinline__ float low_part(float p) { return __fsub_rn(p, __bfloat162float(__float2bfloat16_rn(p))); }

// 2^x, where x <= 0 or -infinity: 2^-22 relative.
__device__ __forceinline__ float power(float x) { return exp2f(x); }

// What counts of a partial result among others whose largest score is ``top``.
__device__ __forceinline__ float share(float largest, float top) {
    return largest == no_score() ? 0.0f : power(__fsub_rn(largest, top));
}

// Largest score and sum of weights; a sum of -1 for what has a page outside the cache.
using Stats = float2;

// Partial results, taken in one after the other, of one head.
struct Running {
    float top = no_score(), weight = 0.0f;
    bool is_bad = false;

    // Returns what the values so far, and the new ones, count.
    __device__ __forceinline__ float2 take(Stats part) {
        const float largest = fmaxf(top, part.x), old_share = share(top, largest), new_share = share(part.x, largest);
        weight = __fmaf_rn(new_share, part.y, __fmul_rn(weight, old_share));
        top = largest;
        is_bad |= part.y < 0.0f;
        return make_float2(old_share, new_share);
    }
    __device__ __forceinline__ Stats stats() const { return make_float2(top, is_bad ? -1.0f : weight); }
};

__device__ __forceinline__ float mix(float total, float value, float2 shares) {
    return __fmaf_rn(shares.y, value, __fmul_rn(total, shares.x));
}
__device__ __forceinline__ float2 mix(float2 total, float2 value, float2 shares) {
    return make_float2(mix(total.x, value.x, shares), mix(total.y, value.y, shares));
}

// Two results as they are stored.
struct Finish {
    float inverse;
    bool is_zero;

    __device__ __forceinline__ Finish(Stats stats) : inverse(__frcp_rn(stats.y)), is_zero(stats.y <= 0.0f) {}

    __device__ __forceinline__ u32 operator()(float low, float high, bool is_gated, u32 gate) const {
        const u32 rounded = is_zero ? 0u : pair(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
        if (!is_gated) return rounded;
        const float own = __uint_as_float(rounded << 16), other = __uint_as_float(rounded & 0xffff0000u);
        return pair(__fmul_rn(own, sigmoid(__uint_as_float(gate << 16))),
                    __fmul_rn(other, sigmoid(__uint_as_float(gate & 0xffff0000u))));
    }
};

// What a lane (g, t) = (lane / 4, lane % 4) of a warp has of the result: o[j] = {(2t, d), (2t + 1, d), (2t, d + 1),
// (2t + 1, d + 1)} as (head, d), d = 16 C warp + 2 C g + 2 j.
template <int C>
using Columns = float[C][4];

template <int C>
__device__ __forceinline__ int first_column() {
    return (threadIdx.x >> 5) * (CHUNK / WARPS) * C + ((threadIdx.x & 31) >> 2) * 2 * C;
}

// Partial results in those columns, taken in one after the other.
template <int C>
struct Held {
    Columns<C> total = {};
    Running of_head[2];  // 2t and 2t + 1

    __device__ __forceinline__ void take(const Columns<C>& part, const Stats (&stats)[2]) {
        const float2 shares[2] = {of_head[0].take(stats[0]), of_head[1].take(stats[1])};
#pragma unroll
        for (int j = 0; j < C; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[j][i] = mix(total[j][i], part[j][i], shares[i & 1]);
    }
};

// The gate in those columns of heads 2t and 2t + 1.
template <int C>
struct Gates {
    Words<C> of_head[2] = {};

    __device__ __forceinline__ void load(const Row& row) {
        if (row.gate == nullptr) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int head = 2 * (threadIdx.x & 3) + h;
            if (head < row.heads) load_words(of_head[h], row.gate + head * C * CHUNK + first_column<C>());
        }
    }
};

// Writes a row's result from where lanes have it.
template <int C>
__device__ __forceinline__ void write_row(const Row& row, const Columns<C>& total, const Stats (&stats)[2], const Gates<C>& gates) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = 2 * (threadIdx.x & 3) + h;
        if (head >= row.heads) continue;
        const Finish finish(stats[h]);
        Words<C> words;
#pragma unroll
        for (int j = 0; j < C; ++j)
            words.at[j] = finish(total[j][h], total[j][2 + h], row.gate != nullptr, gates.of_head[h].at[j]);
        *reinterpret_cast<Words<C>*>(row.out + head * C * CHUNK + first_column<C>()) = words;
    }
}
template <int C>
__device__ __forceinline__ void write_row(const Row& row, const Columns<C>& total, const Stats (&stats)[2]) {
    Gates<C> gates;
    gates.load(row);
    write_row<C>(row, total, stats, gates);
}

// Running softmax of a block's steps. Lane (g, t) keeps largest and sum of head g (the sum over its own tokens; a
// tile's are 2t, 2t + 1, 2t + 8, 2t + 9), alike in every warp.
template <int C>
struct Softmax {
    Columns<C> o = {};
    float largest = no_score(), sum = 0.0f;

    // Takes the largest scores of a step's tiles in, and returns what each tile's weights count.
    __device__ __forceinline__ void see(const float (&tops)[WARPS], int t, float (&shares)[WARPS]) {
        float top = largest;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w]);
        const float keep = share(largest, top);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) shares[w] = share(tops[w], top);
        sum = __fmul_rn(sum, keep);
        largest = top;
        const float even = __shfl_sync(0xffffffffu, keep, 8 * t), odd = __shfl_sync(0xffffffffu, keep, 8 * t + 4);
#pragma unroll
        for (int j = 0; j < C; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[j][i] = __fmul_rn(o[j][i], i & 1 ? odd : even);
    }

    // Adds a tile's weights times values. v holds tokens 2t, 2t + 1, 2t + 8, 2t + 9 in this lane's columns.
    __device__ __forceinline__ void add(float2 first, float2 second, float share, const Words<C> (&v)[4]) {
        const float p[4] = {__fmul_rn(first.x, share), __fmul_rn(first.y, share), __fmul_rn(second.x, share),
                            __fmul_rn(second.y, share)};
        sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(p[0], p[1]), __fadd_rn(p[2], p[3])));
        const u32 high[2] = {pair(p[0], p[1]), pair(p[2], p[3])};
        const u32 low[2] = {pair(low_part(p[0]), low_part(p[1])), pair(low_part(p[2]), low_part(p[3]))};
#pragma unroll
        for (int j = 0; j < C; ++j) {
            const u32 a0 = __byte_perm(v[0].at[j], v[1].at[j], 0x5410), a1 = __byte_perm(v[0].at[j], v[1].at[j], 0x7632);
            const u32 a2 = __byte_perm(v[2].at[j], v[3].at[j], 0x5410), a3 = __byte_perm(v[2].at[j], v[3].at[j], 0x7632);
            mma_16x8x16(o[j], a0, a1, a2, a3, high[0], high[1]);
            mma_16x8x16(o[j], a0, a1, a2, a3, low[0], low[1]);
        }
    }

    // Those of heads 2t and 2t + 1.
    __device__ __forceinline__ void stats(int t, bool is_bad, Stats (&found)[2]) const {
        float total = sum;
        total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 1));
        total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 2));
        if (is_bad) total = -1.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            found[h] = make_float2(__shfl_sync(0xffffffffu, largest, 8 * t + 4 * h),
                                   __shfl_sync(0xffffffffu, total, 8 * t + 4 * h));
    }
};

// A step as a lane reads it: k of tokens g and g + 8 of its warp's tile at d = 64 c + 8 t and 32 more; v of every tile as
// Softmax::add.
template <int C>
struct Step {
    Words<4> k[C][2][2];
    Words<C> v[WARPS][4];

    __device__ __forceinline__ void load_k(const __nv_bfloat16* const (&at)[2], int c) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int half = 0; half < 2; ++half) load_words(k[c][h][half], at[h] + c * CHUNK + half * (CHUNK / 2));
    }
    __device__ __forceinline__ void load_v(const __nv_bfloat16* values, int stride, const Places& places, int tile, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            load_words(v[tile][i], values + (long long)places.of(tile, 2 * t + (i & 1) + 8 * (i >> 1)) * stride);
    }
    // Replaces token ``at`` of the step by what stands in shared memory; those after it too, which may have been loaded from
    // its place, since they are beyond the context.
    __device__ __forceinline__ void replace(int at, const __nv_bfloat16* key, const __nv_bfloat16* value, int warp, int g, int t) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (TILE * warp + g + 8 * h >= at)
#pragma unroll
                for (int c = 0; c < C; ++c)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        k[c][h][half] = *reinterpret_cast<const Words<4>*>(key + c * CHUNK + half * (CHUNK / 2) + 8 * t);
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (TILE * w + 2 * t + (i & 1) + 8 * (i >> 1) >= at)
                    v[w][i] = *reinterpret_cast<const Words<C>*>(value + first_column<C>());
    }
};

// Where a lane's two tokens begin.
struct KeyPointers {
    const __nv_bfloat16* at[2];

    __device__ __forceinline__ KeyPointers(const __nv_bfloat16* keys, int stride, const Places& places, int warp, int g) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int lane = (warp & 1) * TILE + g + 8 * h;
            at[h] = keys + (long long)__shfl_sync(0xffffffffu, warp & 2 ? places.at[1] : places.at[0], lane) * stride;
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

// Where a row's queries come from: memory, as they are. Another source may make them, and with them the newest token's key
// and value, which stand in memory later (fresh.cuh).
template <int C>
struct Stored {
    static constexpr bool IS_FRESH = false;
    struct Memory {};

    __device__ __forceinline__ static bool has_token() { return false; }
    __device__ __forceinline__ void begin(Queries<C>& q, const Row& row) { fetch_queries<C>(q, row); }
    __device__ __forceinline__ void end(Queries<C>& q, Memory& memory, const Row& row, bool is_owner) {
        wait_for_queries();
        __syncthreads();
    }
};

template <int C>
__device__ __forceinline__ void score(float (&s)[2][2][4], const Queries<C>& q, const Step<C>& step, int c, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 a = q[c][half][lane];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Words<4>& k = step.k[c][h][half];
            mma_16x8x16(s[h][c & 1], a.x, 0, a.y, 0, k.at[0], k.at[1]);
            mma_16x8x16(s[h][c & 1], a.z, 0, a.w, 0, k.at[2], k.at[3]);
        }
    }
}

// Where a block is in the context: at the step from ``token`` on, in ``piece``. A block of a cluster has one piece.
template <bool SPREAD>
struct Walk {
    int piece, token;

    __device__ __forceinline__ Walk(int piece_, const Cut& cut) : piece(piece_), token(piece_ * TOKENS) {
        if (piece >= cut.pieces) piece = token = NO_PIECE;
    }
    __device__ __forceinline__ static int after(int piece, const Team& team) {
        if (SPREAD) return NO_PIECE;
        return (piece + 1) % RANKS != 0 ? piece + 1 : piece + 1 + (team.sharing - 1) * RANKS;
    }
    __device__ __forceinline__ void advance(const Row& row, const Team& team, const Cut& cut) {
        token += cut.pieces * TOKENS;
        if (token >= row.length) *this = Walk(after(piece, team), cut);
    }
};

// What one group has of all heads: [HEADS, D], then statistics [RANKS, HEADS], of which each rank of a cluster writes its own.
template <int C>
struct Slice {
    static constexpr int D = C * CHUNK, FLOATS = HEADS * D + 2 * RANKS * HEADS;
    float* at;

    __device__ __forceinline__ Slice(const Team& team, int group) : at(team.slices + (size_t)group * FLOATS) {}
    __device__ __forceinline__ float* values(int head, int column) const { return at + head * D + column; }
    __device__ __forceinline__ Stats* stats(int rank, int head) const {
        return reinterpret_cast<Stats*>(at + HEADS * D) + rank * HEADS + head;
    }
};

// Whether this block, which has written ``added`` of ``all`` slices, is the last one to have done so.
__device__ __forceinline__ bool is_last(int* count, int added, int all) {
    __shared__ int before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        before = atomicAdd(count, added);
        if (before + added == all) *count = 0;
    }
    __syncthreads();
    __threadfence();
    return before + added == all;
}

// Shared memory of a block. WEIGHT_STRIDE keeps the lanes of a store in different banks.
constexpr int WEIGHT_STRIDE = TOKENS + 8;

template <int C, bool SPREAD>
struct Shared {
    static constexpr int COLUMNS = C * CHUNK / RANKS;  // of each head that a rank combines
    Queries<C> q;
    float weights[2][HEADS][WEIGHT_STRIDE];
    alignas(16) float tops[2][HEADS][WARPS];
    alignas(16) float2 incoming[SPREAD ? RANKS : 1][HEADS][COLUMNS / 2];
    Stats of_rank[SPREAD ? RANKS : 1][HEADS];
    alignas(16) float whole[SPREAD ? 1 : THREADS][sizeof(Held<C>) / 4];  // a Held each: groups are seldom, registers few
};

// Pushes the rank that combines them this lane's columns of a piece, and every rank the statistics.
template <int C, bool SPREAD>
__device__ __forceinline__ void push_piece(Shared<C, SPREAD>& shared, const Columns<C>& o, const Stats (&stats)[2], int rank) {
    const int t = threadIdx.x & 3, column = first_column<C>(), to = column / Shared<C, SPREAD>::COLUMNS;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const u32 at = address_in_rank(&shared.incoming[rank][2 * t + h][column % Shared<C, SPREAD>::COLUMNS / 2], to);
        if constexpr (C == 1) push(at, make_float2(o[0][h], o[0][2 + h]));
#pragma unroll
        for (int j = 0; j + 1 < C; j += 2)
            push(at + 8 * j, make_float4(o[j][h], o[j][2 + h], o[j + 1][h], o[j + 1][2 + h]));
    }
    const int lane = threadIdx.x & 31, other = threadIdx.x / 32 * 2 + (lane >> 2 & 1);  // 4 warps, 2 ranks each
    if (lane < 8 && other < RANKS)
#pragma unroll
        for (int h = 0; h < 2; ++h) push(address_in_rank(&shared.of_rank[rank][2 * t + h], other), stats[h]);
}

// The pair of columns of one head that a thread of a rank combines, and its gate.
template <int C, bool SPREAD>
struct RankColumns {
    static constexpr int PAIRS = Shared<C, SPREAD>::COLUMNS / 2;
    int head, pair, column;
    bool exist;
    u32 gate = 0;

    __device__ __forceinline__ explicit RankColumns(int rank)
        : head(threadIdx.x / PAIRS), pair(threadIdx.x % PAIRS), column((rank * PAIRS + pair) * 2), exist(head < HEADS) {}
    __device__ __forceinline__ int place() const { return head * C * CHUNK + column; }
    __device__ __forceinline__ void load_gate(const Row& row) {
        if (row.gate != nullptr && head < row.heads) gate = *reinterpret_cast<const u32*>(row.gate + place());
    }
};

// A rank's columns of all heads: the pieces of the group, and of the last rank to be done the groups.
template <int C, bool SPREAD>
__device__ __forceinline__ void combine_ranks(const Shared<C, SPREAD>& shared, const RankColumns<C, SPREAD>& own,
                                              const Row& row, const Team& team, const Cut& cut) {
    constexpr int TOGETHER = 8;
    const int head = own.head, pair = own.pair, column = own.column;
    const bool has_columns = own.exist;
    const int pieces = min(RANKS, cut.pieces - team.index * RANKS);
    Running running;
    float2 total = make_float2(0.0f, 0.0f);
    if (has_columns) {
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r < pieces) total = mix(total, shared.incoming[r][head][pair], running.take(shared.of_rank[r][head]));
    }
    if (cut.groups > 1) {
        if (has_columns) {
            const Slice<C> slice(team, team.index);
            *reinterpret_cast<float2*>(slice.values(head, column)) = total;
            if (pair == 0) *slice.stats(team.rank, head) = running.stats();
        }
        if (!is_last(team.counts + team.rank, 1, cut.groups)) return;
        running = Running();
        total = make_float2(0.0f, 0.0f);
        if (has_columns) {
#pragma unroll 1
            for (int first = 0; first < cut.groups; first += TOGETHER) {
                Stats stats[TOGETHER];
                float2 values[TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    if (first + i >= cut.groups) continue;
                    const Slice<C> slice(team, first + i);
                    stats[i] = __ldcg(slice.stats(team.rank, head));
                    values[i] = __ldcg(reinterpret_cast<const float2*>(slice.values(head, column)));
                }
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
                    if (first + i < cut.groups) total = mix(total, values[i], running.take(stats[i]));
            }
        }
    }
    if (head >= row.heads) return;
    *reinterpret_cast<u32*>(row.out + own.place()) =
        Finish(running.stats())(total.x, total.y, row.gate != nullptr, own.gate);
}

// Writes a group's slice from where lanes have it, and takes one in from there.
template <int C>
__device__ __forceinline__ void write_slice(const Slice<C>& slice, const Held<C>& held) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < C; ++j)
            *reinterpret_cast<float2*>(slice.values(2 * t + h, first_column<C>() + 2 * j)) =
                make_float2(held.total[j][h], held.total[j][2 + h]);
        if (threadIdx.x < 4) *slice.stats(0, 2 * t + h) = held.of_head[h].stats();
    }
}
template <int C>
__device__ __forceinline__ void take_slice(Held<C>& held, const Slice<C>& slice) {
    const int t = threadIdx.x & 3;
    Columns<C> part;
    Stats stats[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        stats[h] = __ldcg(slice.stats(0, 2 * t + h));
#pragma unroll
        for (int j = 0; j < C; ++j) {
            const float2 value = __ldcg(reinterpret_cast<const float2*>(slice.values(2 * t + h, first_column<C>() + 2 * j)));
            part[j][h] = value.x, part[j][2 + h] = value.y;
        }
    }
    held.take(part, stats);
}

// One row. Launch: THREADS threads; all of a block, and with SPREAD of a cluster, come here once their memory is there to
// be read. scale includes log2(e).
template <int C, bool SPREAD, class Source>
__device__ __forceinline__ void attend(const Cache& cache, const Row& row, const FirstPages& pages, float scale,
                                       const Team& team, Source& source) {
    constexpr int D = C * CHUNK;
    __shared__ Shared<C, SPREAD> shared;
    __shared__ typename Source::Memory fresh;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const Cut cut(row.length, team.most);
    if (team.index >= max(cut.groups, 1)) return;  // with SPREAD the whole cluster
    if (SPREAD && team.rank > 0 && cut.pieces <= 1) return;
#if __CUDA_ARCH__ >= 900
    // A block may write another's shared memory once all of the cluster have begun.
    if (SPREAD && cut.pieces > 1) cluster_arrive_relaxed();
#endif

    // Stage 1: the first step, and the queries. What is needed first, and what is small, goes ahead.
    Walk<SPREAD> now(team.index * RANKS + (SPREAD ? team.rank : 0), cut), next = now;
    if (now.piece != NO_PIECE) next.advance(row, team, cut);
    bool is_bad = false;
    const int stride = cache.key_heads * D;
    const __nv_bfloat16* const keys = cache.k + row.key_head * D + 8 * t;
    const __nv_bfloat16* const values = cache.v + row.key_head * D + first_column<C>();
    Step<C> step;
    source.begin(shared.q, row);
    Places places = pages.places(cache, row, now.token, lane, is_bad);
    Places next_places(cache, row, next.token, lane, is_bad);
    if (now.piece != NO_PIECE) {
        const KeyPointers at(keys, stride, places, warp, g);
#pragma unroll
        for (int c = 0; c < C; ++c) step.load_k(at.at, c);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) step.load_v(values, stride, places, w, t);
    }
    Gates<C> gates;  // of one piece, or of what a rank combines
    RankColumns<C, SPREAD> own(team.rank);
    if (SPREAD && cut.pieces <= 1) gates.load(row);
    if (SPREAD && cut.pieces > 1) own.load_gate(row);
    // The block that has the newest token.
    const int newest = row.length - 1, newest_piece = cut.pieces > 0 ? newest / TOKENS % cut.pieces : 0;
    const bool is_owner = SPREAD ? newest_piece == team.index * RANKS + team.rank
                                 : newest_piece / RANKS % team.sharing == team.index;
    source.end(shared.q, fresh, row, is_owner);
    const int replaced = Source::IS_FRESH && source.has_token() ? newest : -1;  // the token that memory may not have yet

    // Stage 2: piece after piece.
    Held<C> group;
    Held<C>& whole = *reinterpret_cast<Held<C>*>(shared.whole[SPREAD ? 0 : threadIdx.x]);
    if (!SPREAD) whole = Held<C>();
    int buffer = 0, groups_done = 0;
#pragma unroll 1
    for (int piece = now.piece; piece < cut.pieces;) {
        Softmax<C> softmax;
        bool any_bad = false;
#pragma unroll 1
        while (now.piece == piece) {
            const int token = now.token + TILE * warp;
            const bool has_next = next.piece != NO_PIECE;
            if constexpr (Source::IS_FRESH) {
                const int at = replaced - now.token;
                if (at >= 0 && at < TOKENS) step.replace(at, fresh.key, fresh.value, warp, g, t);
            }
            now = next;
            places = next_places;
            if (has_next) next.advance(row, team, cut);
            next_places = Places(cache, row, next.token, lane, is_bad);

            // The warp's own tile: scores, and weights as if there were no others.
            const KeyPointers at(keys, stride, places, warp, g);
            float parts[2][2][4] = {};
#pragma unroll
            for (int c = 0; c < C; ++c) {
                score<C>(parts, shared.q, step, c, lane);
                if (has_next) step.load_k(at.at, c);
            }
            float s[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i >> 1, at_token = token + 8 * h + 2 * t + (i & 1);
                const float product = __fmul_rn(__fadd_rn(parts[h][0][i & 1], parts[h][1][i & 1]), scale);
                s[i] = at_token < row.length ? product : no_score();
            }
            float top = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            float2* const weights = reinterpret_cast<float2*>(&shared.weights[buffer][g][TILE * warp + 2 * t]);
            weights[0] = make_float2(share(s[0], top), share(s[1], top));
            weights[4] = make_float2(share(s[2], top), share(s[3], top));
            if (t == 0) shared.tops[buffer][g][warp] = top;
            any_bad |= __syncthreads_or(is_bad) != 0;

            // All tiles.
            const float4 seen = *reinterpret_cast<const float4*>(shared.tops[buffer][g]);
            const float tops[WARPS] = {seen.x, seen.y, seen.z, seen.w};
            float shares[WARPS];
            softmax.see(tops, t, shares);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float2* const p = reinterpret_cast<const float2*>(&shared.weights[buffer][g][TILE * w + 2 * t]);
                softmax.add(p[0], p[4], shares[w], step.v[w]);
                if (has_next) step.load_v(values, stride, places, w, t);
            }
            buffer ^= 1;
        }

        // The piece is done.
        Stats stats[2];
        softmax.stats(t, any_bad, stats);
        if (cut.pieces == 1) {
            if constexpr (SPREAD) write_row<C>(row, softmax.o, stats, gates);
            else write_row<C>(row, softmax.o, stats);
            return;
        }
        if constexpr (SPREAD) {
#if __CUDA_ARCH__ >= 900
            cluster_wait();
#endif
            push_piece<C, SPREAD>(shared, softmax.o, stats, team.rank);
            break;
        }
        group.take(softmax.o, stats);
        const int following = Walk<SPREAD>::after(piece, team);
        if (following >= cut.pieces || following / RANKS != piece / RANKS) {
            const Stats of_group[2] = {group.of_head[0].stats(), group.of_head[1].stats()};
            if (cut.groups == 1) {
                write_row<C>(row, group.total, of_group);
                return;
            }
            if (team.sharing > 1) write_slice<C>(Slice<C>(team, piece / RANKS), group);
            else whole.take(group.total, of_group);
            group = Held<C>();
            ++groups_done;
        }
        piece = following;
    }

    // Stage 3: what several have to combine.
    if (cut.pieces == 0) {
        const Stats nothing[2] = {};
        write_row<C>(row, group.total, nothing);
        return;
    }
    if constexpr (SPREAD) {
#if __CUDA_ARCH__ >= 900
        if (team.index * RANKS + team.rank >= cut.pieces) cluster_wait();  // what was announced ends here
#endif
        cluster_barrier();
        combine_ranks<C, SPREAD>(shared, own, row, team, cut);
    } else {
        if (team.sharing > 1) {
            if (!is_last(team.counts, groups_done, cut.groups)) return;
#pragma unroll 4
            for (int of = 0; of < cut.groups; ++of) take_slice<C>(whole, Slice<C>(team, of));
        }
        const Stats stats[2] = {whole.of_head[0].stats(), whole.of_head[1].stats()};
        write_row<C>(row, whole.total, stats);
    }
}

template <int C, bool SPREAD>
__device__ __forceinline__ void attend(const Cache& cache, const Row& row, const FirstPages& pages, float scale,
                                       const Team& team) {
    Stored<C> source;
    attend<C, SPREAD>(cache, row, pages, scale, team, source);
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
        if (threadIdx.x < count) {
            const int token = first + threadIdx.x;
            places[threadIdx.x] = cache.place(load_entry(row.table + cache.page_of(token)), token, is_bad);
        }
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
        if (d >= D) continue;
        const __nv_bfloat16 result = __float2bfloat16_rn(is_zero ? 0.0f : __fdiv_rn(o[j], sum));
        const bool is_gated = row.gate != nullptr;
        row.out[d] = is_gated ? __float2bfloat16_rn(__bfloat162float(result) * sigmoid(__bfloat162float(row.gate[d]))) : result;
    }
}

// The length of a context, or 0 where it does not fit its pages: such a row is zeros.
__device__ __forceinline__ int checked_length(int length, const Cache& cache, int entries) {
    const bool fits = length > 0 && cache.pages > 0 && length <= (long long)entries * cache.page_size;
    return fits ? length : 0;
}

// Which row, key head and eight of its query heads a block works on, and in which team. Grid: sharing * rows * key_heads *
// ceil(per_key / 8), with SPREAD times RANKS; the first of every row first.
template <bool SPREAD>
struct BlockPlace {
    int row, key_head, head, heads, team, rank, index;

    __device__ __forceinline__ BlockPlace(int teams, int key_heads, int per_key) {
        const int groups = (per_key + HEADS - 1) / HEADS, ranks = SPREAD ? RANKS : 1, place = blockIdx.x / ranks;
        rank = blockIdx.x % ranks;
        index = place / teams;
        team = place % teams;
        const int group = team % groups;
        key_head = team / groups % key_heads;
        row = team / groups / key_heads;
        head = key_head * per_key + group * HEADS;
        heads = min(HEADS, per_key - group * HEADS);
    }

    // The first token of this block.
    __device__ __forceinline__ int first_token() const { return (index * RANKS + rank) * TOKENS; }

    // This block's team; where several share a row it has scratch memory for ``most`` pieces, and counters.
    template <int C>
    __device__ __forceinline__ Team team_of(int sharing, int most, float* slices, int* counts) const {
        const int groups = (most + RANKS - 1) / RANKS;
        return {rank, index, sharing, most, slices + (size_t)team * groups * Slice<C>::FLOATS, counts + team * RANKS};
    }
};
