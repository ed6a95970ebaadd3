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
// Pieces of a context may have several owners: pieces.cuh.
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
#include "any_size.cuh"
#include "pieces.cuh"

constexpr int NO_PIECE = 0x7fffffff;
#define ATTENTION_BOUNDS __launch_bounds__(THREADS, 2)

// --- instruction wrappers (PTX ISA 8.0) ---

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// --- device functions ---

__device__ __forceinline__ float low_part(float p) { return __fsub_rn(p, __bfloat162float(__float2bfloat16_rn(p))); }

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
        const u32 high[2] = {bf16_pair(p[0], p[1]), bf16_pair(p[2], p[3])};
        const u32 low[2] = {bf16_pair(low_part(p[0]), low_part(p[1])), bf16_pair(low_part(p[2]), low_part(p[3]))};
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

// Where a lane's two tokens begin, and whether they do.
struct KeyPointers {
    const __nv_bfloat16* at[2];
    bool exist[2];

    __device__ __forceinline__ KeyPointers(const __nv_bfloat16* keys, int stride, const Places& places, int warp, int g) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int lane = (warp & 1) * TILE + g + 8 * h;
            const int place = __shfl_sync(0xffffffffu, warp & 2 ? places.at[1] : places.at[0], lane);
            exist[h] = place != NOWHERE;
            at[h] = keys + (long long)max(place, 0) * stride;
        }
    }
};

// A step as a lane reads it: k of tokens g and g + 8 of its warp's tile at d = 64 c + 8 t and 32 more; v of every tile as
// Softmax::add. What no token has stays zero, or is not looked at.
template <int C>
struct Step {
    Words<4> k[C][2][2] = {};
    Words<C> v[WARPS][4] = {};

    __device__ __forceinline__ void load_k(const KeyPointers& from, int c) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                load_words_if(from.exist[h], k[c][h][half], from.at[h] + c * CHUNK + half * (CHUNK / 2));
    }
    __device__ __forceinline__ void load_v(const __nv_bfloat16* values, int stride, const Places& places, bool is_whole,
                                           int tile, int t) {
        int place[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) place[i] = places.of(tile, 2 * t + (i & 1) + 8 * (i >> 1));
        if (!is_whole)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[tile][i] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            load_words_if(place[i] != NOWHERE, v[tile][i], values + (long long)max(place[i], 0) * stride);
    }
    // Replaces token ``newest`` of the step by what stands in shared memory.
    __device__ __forceinline__ void replace(int newest, const __nv_bfloat16* key, const __nv_bfloat16* value, int warp,
                                            int g, int t) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (TILE * warp + g + 8 * h == newest)
#pragma unroll
                for (int c = 0; c < C; ++c)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        k[c][h][half] = *reinterpret_cast<const Words<4>*>(key + c * CHUNK + half * (CHUNK / 2) + 8 * t);
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (TILE * w + 2 * t + (i & 1) + 8 * (i >> 1) == newest)
                    v[w][i] = *reinterpret_cast<const Words<C>*>(value + first_column<C>());
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
__device__ __forceinline__ void score(float (&s)[2][C][4], const Queries<C>& q, const Step<C>& step, int c, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 a = q[c][half][lane];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Words<4>& k = step.k[c][h][half];
            mma_16x8x16(s[h][c], a.x, 0, a.y, 0, k.at[0], k.at[1]);
            mma_16x8x16(s[h][c], a.z, 0, a.w, 0, k.at[2], k.at[3]);
        }
    }
}

template <int C>
__device__ __forceinline__ float sum_of(const float (&parts)[C][4], int i) {
    float sum = parts[0][i];
    if constexpr (C > 1) sum = __fadd_rn(sum, parts[1][i]);
    if constexpr (C > 2) sum = __fadd_rn(sum, __fadd_rn(parts[2][i], parts[3][i]));
    return sum;
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

// Shared memory of a block. WEIGHT_STRIDE keeps the lanes of a store in different banks.
constexpr int WEIGHT_STRIDE = TOKENS + 8;

template <int C, bool SPREAD>
struct Shared {
    Queries<C> q;
    float weights[2][HEADS][WEIGHT_STRIDE];
    alignas(16) float tops[2][HEADS][WARPS];
    Incoming<C, SPREAD> incoming;
    alignas(16) float whole[SPREAD ? 1 : THREADS][sizeof(Held<C>) / 4];  // a Held each: groups are seldom, registers few
};

// One row. Launch: THREADS threads; all of a block, and with SPREAD of a cluster, come here once their memory is there to
// be read. scale includes log2(e).
template <int C, bool SPREAD, class Source>
__device__ __forceinline__ void attend(const Cache& cache, const Row& row, const Pages& pages, float scale,
                                       const Team& team, Source& source) {
    constexpr int D = C * CHUNK;
    __shared__ Shared<C, SPREAD> shared;
    __shared__ typename Source::Memory fresh;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const Cut cut(row.length, team.most);
    if (team.index >= max(cut.groups, 1)) return;  // with SPREAD the whole cluster
    if (SPREAD && team.rank > 0 && cut.pieces <= 1) return;
    if (SPREAD && cut.pieces > 1) {  // a block may write another's shared memory once all of the cluster are here
        const int coming = min(RANKS, cut.pieces - team.index * RANKS);
        if (threadIdx.x == 0) expect_bytes(&shared.incoming.arrival, coming * Incoming<C, SPREAD>::PIECE_BYTES);
        cluster_arrive_relaxed();
    }

    // Stage 1: the first step, and the queries. What is needed first, and what is small, goes ahead.
    Walk<SPREAD> now(team.index * RANKS + (SPREAD ? team.rank : 0), cut), next = now;
    if (now.piece != NO_PIECE) next.advance(row, team, cut);
    bool is_bad = false;
    const int stride = cache.key_heads * D;
    const __nv_bfloat16* const k = cache.k + row.key_head * D + 8 * t;
    const __nv_bfloat16* const v = cache.v + row.key_head * D + first_column<C>();
    Step<C> step;
    source.begin(shared.q, row);
    Places places = pages.places(cache, row.length, now.token, lane, is_bad);
    // Of the context alone: its last entry stands for what lies beyond.
    const int entries = row.length > 0 ? cache.page_of(row.length - 1) + 1 : 0;
    auto pages_of = [&](int token) { return Pages(cache, row.table, entries, min(token, row.length), lane); };
    Pages next_pages = pages_of(next.token);
    if (now.piece != NO_PIECE) {
        const KeyPointers from(k, stride, places, warp, g);
#pragma unroll
        for (int c = 0; c < C; ++c) step.load_k(from, c);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) step.load_v(v, stride, places, true, w, t);
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
    const int replaced = Source::IS_FRESH && source.has_token() ? newest : -1;

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
                if ((u32)(replaced - now.token) < TOKENS)
                    step.replace(replaced - now.token, fresh.key, fresh.value, warp, g, t);
            }
            now = next;
            places = next_pages.places(cache, row.length, now.token, lane, is_bad);
            if (has_next) next.advance(row, team, cut);
            next_pages = pages_of(next.token);
            const bool is_whole = row.length - now.token >= TOKENS;

            // The warp's own tile: scores, and weights as if there were no others.
            const KeyPointers from(k, stride, places, warp, g);
            float parts[2][C][4] = {};  // each 64 d a sum of their own: products that wait for each other take long
#pragma unroll
            for (int c = 0; c < C; ++c) {
                score<C>(parts, shared.q, step, c, lane);
                if (has_next) step.load_k(from, c);
            }
            float s[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i >> 1, at_token = token + 8 * h + 2 * t + (i & 1);
                s[i] = at_token < row.length ? __fmul_rn(sum_of<C>(parts[h], i & 1), scale) : no_score();
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
                if (has_next) step.load_v(v, stride, places, is_whole, w, t);
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
            cluster_wait();
            push_piece<C, SPREAD>(shared.incoming, softmax.o, stats, team.rank);
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
        if (team.index * RANKS + team.rank >= cut.pieces) cluster_wait();
        await_bytes(&shared.incoming.arrival);
        combine_ranks<C, SPREAD>(shared.incoming, own, row, team, cut);
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
__device__ __forceinline__ void attend(const Cache& cache, const Row& row, const Pages& pages, float scale,
                                       const Team& team) {
    Stored<C> source;
    attend<C, SPREAD>(cache, row, pages, scale, team, source);
}
