// One row of attention over a paged cache, by the tensor cores: the same function for decode and for prefill, so that a
// row of a prompt has the bits of a decode step.
//
//   out[h, :] = sum_t softmax_t(scale * q[h, :] . k[t, :]) * v[t, :]        h: up to 8 query heads of one key head
//
// A step is 64 tokens, a tile of 16 for each of the block's 4 warps. Keys and values of a warp's tiles come through shared
// memory of its own, SLOTS of them on their way at any time; so no warp waits for another before a piece of the context is
// done, and then they combine their results. The cache is read once for all heads of a key head.
//
// Pieces of a context may have several owners: pieces.cuh.
//
//   scores    A = k (16 tokens x 16 d), B = q (16 d x 8 heads)
//   result    A = v transposed (16 d x 16 tokens), B = the weights (16 tokens x 8 heads), which are scores transposed
//
// Numerics: scores, softmax and sums in FP32; a weight goes to the tensor core as two BF16, which hold it to 2^-17; one
// rounding at the end, and one more with a gate. What lies beyond the context is not read. A length outside its pages, or
// a page outside the cache, gives a row of zeros.
#pragma once
#include "any_size.cuh"
#include "async_copy.cuh"
#include "bf16.cuh"
#include "fast_math.cuh"
#include "global_memory.cuh"
#include "mma.cuh"
#include "named_barrier.cuh"
#include "opaque.cuh"
#include "pieces.cuh"
#include "shared_memory.cuh"

constexpr int NO_PIECE = 0x7fffffff;
#define ATTENTION_BOUNDS __launch_bounds__(THREADS, 2)
#define SPREAD_BOUNDS(D) __launch_bounds__(Spread<D>::THREADS, 2)

// Tiles of keys or values of a warp, in shared memory: two blocks of 96 KB on a multiprocessor; where one has 100 KB, one of
// 64 (launch.py has the numbers too).
#if (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100)
constexpr int MAX_SLOTS = 3;
#else
constexpr int MAX_SLOTS = 2;
#endif
// What a block has in shared memory beside them, at most (launch.py).
constexpr int BESIDE_BYTES = 12 * 1024;

// --- device functions ---

// Rows of D values of tokens or heads in shared memory: pieces of 16 bytes, twisted so that the same piece of eight rows,
// which an ldmatrix reads, lies in different banks.
template <int D>
struct Rows {
    static constexpr int BYTES = 2 * D, PIECES = D / 8, TILE_BYTES = TILE * BYTES;
    static constexpr int SLOTS = MAX_SLOTS * 256 / D, RING_BYTES = SLOTS * TILE_BYTES;  // of a warp

    __device__ __forceinline__ static int at(int row, int piece) { return row * BYTES + ((piece ^ (row & 7)) << 4); }

    // Where this lane's copies of a tile go, and where they come from in a row: of the tile or of the ``part``-th of PARTS of its
    // columns, 128 bytes of four rows at a time.
    template <int PARTS>
    __device__ __forceinline__ static u32 target(int part) {
        const int lane = threadIdx.x & 31;
        return part * (BYTES / PARTS) + at(lane / 8, lane & 7);
    }
    template <int PARTS>
    __device__ __forceinline__ static const uint4* columns(const uint4* rows, int part) {
        return rows + part * (PIECES / PARTS) + (threadIdx.x & 7);
    }
    // Sends a tile on its way, or a part of it. Lane i knows where token i % 16 stands, in pieces, and all of them which tokens
    // are there.
    template <int PARTS>
    __device__ __forceinline__ static void fetch(u32 to, const uint4* from, u32 place, u32 there) {
        there >>= threadIdx.x >> 3 & 3;
#pragma unroll
        for (int i = 0; i < TILE / 4; ++i) {
            const uint4* const own = from + __shfl_sync(0xffffffffu, place, (threadIdx.x >> 3 & 3) + 4 * i);
            const u32 is_there = there >> 4 * i & 1;
#pragma unroll
            for (int c = 0; c < PIECES / PARTS; c += 8)  // the twist of four rows further
                cp_async_16((i & 1 ? to ^ 64 : to) + 4 * i * BYTES + 16 * c, own + c, is_there * 16);
        }
    }
    // Puts a row in the place of one of a tile's, or one of ``parts`` of its columns; by one warp.
    __device__ __forceinline__ static void replace(u32 tile, int row, const __nv_bfloat16* by, int part, int parts) {
        const int lane = threadIdx.x & 31;
        if (lane < PIECES && lane / (PIECES / parts) == part)
            store_shared_16(tile + at(row, lane), reinterpret_cast<const uint4*>(by)[lane]);
        __syncwarp();
    }
};

// A row's queries in shared memory, zeros from row.heads on.
template <int D>
struct alignas(16) Queries {
    uint4 at[HEADS * Rows<D>::PIECES];

    __device__ __forceinline__ uint4& piece(int head, int i) { return at[head * Rows<D>::PIECES + (i ^ head)]; }
};

// Where a row's queries come from: memory, as they are. Another source may make them, and with them the newest token's key
// and value, which stand in memory later (fresh.cuh).
template <int D, int WARPS>
struct Stored {
    static constexpr bool IS_FRESH = false;
    static constexpr int THREADS = 32 * WARPS;
    struct Memory {};

    __device__ __forceinline__ static bool has_token() { return false; }
    __device__ __forceinline__ void begin(Queries<D>& q, const Row& row) {
        constexpr int ALL = HEADS * Rows<D>::PIECES;
#pragma unroll
        for (int first = 0; first < ALL; first += THREADS) {
            const u32 i = first + threadIdx.x, head = i / Rows<D>::PIECES, exists = head < row.heads;
            if (ALL % THREADS == 0 || i < ALL)
                cp_async_16(shared_address(&q.piece(head, i % Rows<D>::PIECES)), row.q + (exists ? 8 * i : 0), exists * 16);
        }
    }
    __device__ __forceinline__ void make(Queries<D>& q, Memory& memory, const Row& row, bool is_owner) {}
    // PENDING: copies that were sent after.
    template <int PENDING>
    __device__ __forceinline__ void end() {
        cp_async_wait<PENDING>();
        __syncthreads();
    }
};

// Running softmax of tiles. Lane (g, t) keeps largest and sum of heads 2t and 2t + 1, the sum over its own tokens.
struct Softmax {
    float largest[2] = {NO_TOP, NO_TOP}, sum[2] = {};

    // Takes a tile's scores in, s = {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)} as (token, head), and returns
    // weights: the high parts of tokens 2t, 2t + 1 and 2t + 8, 2t + 9 of head g, and the low parts. What was added before
    // counts ``keep``.
    __device__ __forceinline__ uint4 weigh(float (&s)[4], float2& kept) {
        float keep[2];
        u32 high[2], low[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = fmaxf(s[h], s[2 + h]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            top = fmaxf(largest[h], top);
            keep[h] = exp2_approx(__fsub_rn(largest[h], top));
            largest[h] = top;
            s[h] = exp2_approx(__fsub_rn(s[h], top));
            s[2 + h] = exp2_approx(__fsub_rn(s[2 + h], top));
            sum[h] = __fmaf_rn(sum[h], keep[h], __fadd_rn(s[h], s[2 + h]));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 pair = bf16_pair(s[2 * i], s[2 * i + 1]);
            high[i] = movmatrix_trans(pair);
            low[i] = movmatrix_trans(bf16_pair(__fsub_rn(s[2 * i], __uint_as_float(pair << 16)),
                                          __fsub_rn(s[2 * i + 1], __uint_as_float(pair & 0xffff0000u))));
        }
        kept = make_float2(keep[0], keep[1]);
        return make_uint4(high[0], high[1], low[0], low[1]);
    }

    __device__ __forceinline__ Stats stats(int h, bool is_bad) const {
        float total = sum[h];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, step));
        return make_float2(largest[h], is_bad ? -1.0f : total);
    }
    __device__ __forceinline__ void tell(Stats (&of_heads)[HEADS], bool is_bad) const {
        const Stats first = stats(0, is_bad), second = stats(1, is_bad);
        const int lane = threadIdx.x & 31;
        if (lane < 4)
            *reinterpret_cast<float4*>(&of_heads[2 * lane]) = make_float4(first.x, first.y, second.x, second.y);
    }
};

// What was added of COUNT tiles, of which a part is kept.
template <int COUNT, int J>
__device__ __forceinline__ void keep_less(Columns<J> (&o)[COUNT], const float2 (&keep)[COUNT]) {
    bool is_kept = true;
#pragma unroll
    for (int w = 0; w < COUNT; ++w) is_kept = is_kept && keep[w].x == 1.0f && keep[w].y == 1.0f;
    if (__any_sync(0xffffffffu, !is_kept)) {
#pragma unroll
        for (int w = 0; w < COUNT; ++w)
#pragma unroll
            for (int j = 0; j < J; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[w][j][i] = __fmul_rn(o[w][j][i], i & 1 ? keep[w].y : keep[w].x);
    }
}

// Adds weights times values of COUNT tiles, which lie ``stride`` bytes apart, J times 16 columns from 16 * ``first`` on.
template <int D, int COUNT, int J>
__device__ __forceinline__ void add_values(Columns<J> (&o)[COUNT], const uint4 (&weights)[COUNT], u32 tile, u32 stride,
                                           int first) {
    const int lane = threadIdx.x & 31;
    const u32 row = tile + Rows<D>::at((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
    // Products that wait for each other stand apart.
#pragma unroll
    for (int w = 0; w < COUNT; w += 2) {
        u32 a[COUNT > 1 ? 2 : 1][J][4];
#pragma unroll
        for (int n = 0; n < min(COUNT, 2); ++n)
#pragma unroll
            for (int j = 0; j < J; ++j) ldmatrix_x4_trans(a[n][j], row + (w + n) * stride ^ (first + j << 5));
#pragma unroll
        for (int n = 0; n < min(COUNT, 2); ++n)
#pragma unroll
            for (int j = 0; j < J; ++j) mma_16x8x16(o[w + n][j], a[n][j], weights[w + n].x, weights[w + n].y);
#pragma unroll
        for (int n = 0; n < min(COUNT, 2); ++n)
#pragma unroll
            for (int j = 0; j < J; ++j) mma_16x8x16(o[w + n][j], a[n][j], weights[w + n].z, weights[w + n].w);
    }
}

// A warp's queries: all of the columns, or one of HALVES.
template <int D, int HALVES>
struct OwnQueries {
    static constexpr int STEPS = D / 16 / HALVES;
    u32 at[STEPS / 2][4];

    __device__ __forceinline__ void load(Queries<D>& q, int half) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int j = 0; j < STEPS / 2; ++j)
            ldmatrix_x4(at[j], shared_address(&q.piece(lane & 7, half * (STEPS * 2) + 4 * j + (lane >> 3))));
    }
};

// Scores of a tile of keys, or what one of HALVES of the columns adds to them; each fourth, 64 columns, is a sum of its own,
// since products that wait for each other take long.
template <int D, int HALVES>
__device__ __forceinline__ void score(float (&s)[4], const OwnQueries<D, HALVES>& q, u32 tile, int half) {
    constexpr int STEPS = OwnQueries<D, HALVES>::STEPS, SUMS = D / 64;
    const int lane = threadIdx.x & 31;
    const u32 row = tile + Rows<D>::at(lane & 15, lane >> 4);
    float parts[SUMS / HALVES][4] = {};
#pragma unroll
    for (int n = 0; n < STEPS; ++n) {
        const int part = n % (SUMS / HALVES), i = 4 * part + n / (SUMS / HALVES);
        u32 a[4];
        ldmatrix_x4(a, row ^ (half * STEPS + i << 5));
        mma_16x8x16(parts[part], a, q.at[i / 2][i % 2 * 2], q.at[i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        s[i] = parts[0][i];
        if constexpr (SUMS / HALVES > 1) s[i] = __fadd_rn(s[i], parts[1][i]);
        if constexpr (SUMS / HALVES > 2) s[i] = __fadd_rn(s[i], __fadd_rn(parts[2][i], parts[3][i]));
    }
}

// Where a block of many rows is in the context: at the step from ``token`` on, in ``piece``.
struct Walk {
    int piece, token;

    __device__ __forceinline__ Walk(int piece_, const Cut& cut) : piece(piece_), token(piece_ * TOKENS) {
        if (piece >= cut.pieces) piece = token = NO_PIECE;
    }
    __device__ __forceinline__ static int after(int piece, const Team& team) {
        return (piece + 1) % GROUP != 0 ? piece + 1 : piece + 1 + (team.sharing - 1) * GROUP;
    }
    __device__ __forceinline__ void advance(const Row& row, const Team& team, const Cut& cut) {
        token += cut.pieces * TOKENS;
        if (token >= row.length) *this = Walk(after(piece, team), cut);
    }
};

// Scores as the softmax wants them, of ``count`` tokens that are there.
__device__ __forceinline__ void mask(float (&s)[4], float scale, int count) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = g + 8 * (i >> 1) < count ? __fmul_rn(s[i], scale) : no_score();
}

// What a tile's warp has for all warps of a block with SPREAD.
struct Told {
    uint4 weights[WARPS][32];
    alignas(16) float keep[WARPS][HEADS];
    float4 half_scores[2 * WARPS][32];
};

// Shared memory of a block.
template <int D, class Memory>
struct Shared {
    float4 tiles[WARPS * Rows<D>::RING_BYTES / 16];  // [WARPS][SLOTS][TILE][D] of BF16
    Queries<D> q;
    alignas(16) Stats of_tile[WARPS][HEADS];
    Memory fresh;
    Told told;
};

// What tiles count, and all of them, of heads 2t and 2t + 1.
__device__ __forceinline__ void take_tiles(Tiles (&tiles)[2], Running (&all)[2], const Stats (&of_tile)[WARPS][HEADS]) {
    Stats even[WARPS], odd[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float4 both = *reinterpret_cast<const float4*>(&of_tile[w][2 * (threadIdx.x & 3)]);
        even[w] = make_float2(both.x, both.y), odd[w] = make_float2(both.z, both.w);
    }
    all[0] = tiles[0].take(even), all[1] = tiles[1].take(odd);
}

// A piece from the warps of a block, whose results lie in their tiles at ``slot``.
template <int D>
__device__ __forceinline__ void combine_warps(Held<D / 64>& piece, const Stats (&of_tile)[WARPS][HEADS], const float4* slot) {
    const int lane = threadIdx.x & 31, first = threadIdx.x / 32 * (D / 64);
    Tiles tiles[2];
    take_tiles(tiles, piece.of_head, of_tile);
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
#pragma unroll
        for (int j = 0; j < D / 64; ++j) {
            const float4 v = slot[w * (Rows<D>::RING_BYTES / 16) + (first + j) * 32 + lane];
            const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) piece.total[j][i] = tiles[i & 1].add(piece.total[j][i], values[i], w);
        }
}

// One row, of many. Launch: THREADS threads, and dynamic shared memory for Shared; all threads of a block come here once their
// memory is there to be read. ``entry`` is what the table says of this thread's first token; a length that does not fit its
// pages is none. scale includes log2(e).
template <int D, class Source>
__device__ __forceinline__ void attend_many(const Cache& cache, Row row, int entry, float scale, const Team& team,
                                            Source& source) {
    constexpr int SLOTS = Rows<D>::SLOTS, TILE_BYTES = Rows<D>::TILE_BYTES, RING_BYTES = Rows<D>::RING_BYTES;
    using Memory = Shared<D, typename Source::Memory>;
    static_assert(sizeof(Memory) <= WARPS * RING_BYTES + BESIDE_BYTES);
    extern __shared__ __align__(1024) unsigned char memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    source.begin(shared.q, row);  // before anybody waits for the length
    cp_async_commit();
    row.length = checked_length(row.length, cache, row.entries);
    const Cut cut(row.length, team.most);
    if (team.index >= max(cut.groups, 1)) {
        cp_async_wait<0>();
        return;
    }

    // Stage 1: the first tiles, and the queries.
    Walk now(team.index * GROUP, cut), next = now;
    const int own_token = TILE * warp + (lane & 15);
    const u32 ring = shared_address(shared.tiles) + warp * RING_BYTES, stride = cache.key_heads * Rows<D>::PIECES;
    const u32 target = ring + Rows<D>::template target<1>(0);
    const size_t of_head = row.key_head * Rows<D>::PIECES;
    const uint4* const keys = Rows<D>::template columns<1>(reinterpret_cast<const uint4*>(cache.k) + of_head, 0);
    const uint4* const values = Rows<D>::template columns<1>(reinterpret_cast<const uint4*>(cache.v) + of_head, 0);
    u32 place = 0, there = 0;  // where the next copy comes from
    bool is_bad = false, has_tile = false;
    // Sends keys of the next tile on their way, or values of the same, to a place in the ring. What the table says of the one
    // after is asked for before: behind these copies it would come when they have.
    auto fetch = [&](bool is_value, u32 to) {
        if (!is_value) {
            has_tile = next.piece != NO_PIECE;
            const int token = next.token + own_token;
            const int at = token < row.length && has_tile ? cache.place(entry, token, is_bad) : NOWHERE;
            place = (u32)max(at, 0) * stride;
            there = __ballot_sync(0xffffffffu, at != NOWHERE);
            if (has_tile) next.advance(row, team, cut);
            const int later = next.token + own_token;
            entry = load_now_if(next.piece != NO_PIECE && later < row.length, row.table + cache.page_of(later), NOWHERE);
        }
        if (has_tile) Rows<D>::template fetch<1>(target + to, is_value ? values : keys, place, there);
        cp_async_commit();
    };
    // The block that has the newest token.
    const int newest = row.length - 1, newest_piece = cut.pieces > 0 ? newest / TOKENS % cut.pieces : 0;
    const bool is_owner = newest_piece / GROUP % team.sharing == team.index;
    OwnQueries<D, 1> q;
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) fetch(i & 1, i * TILE_BYTES);
    source.make(shared.q, shared.fresh, row, is_owner);
    source.template end<SLOTS>();
    q.load(shared.q, 0);
    const int replaced = Source::IS_FRESH && source.has_token() ? newest : -1;

    // Stage 2: tile after tile.
    Softmax softmax;
    Columns<D / 16> o[1] = {};
    Held<D / 64> group, whole;
    u32 used = 0;  // where the next tile is
    int groups_done = 0;
#pragma unroll 1
    while (now.piece != NO_PIECE) {
        const int token = now.token + TILE * warp, piece = now.piece;
        const bool has_newest = Source::IS_FRESH && (u32)(replaced - token) < TILE;

        cp_async_wait<SLOTS - 1>();
        __syncwarp();
        if constexpr (Source::IS_FRESH)
            if (has_newest) Rows<D>::replace(ring + used, replaced - token, shared.fresh.key, 0, 1);
        float s[4];
        score<D, 1>(s, q, ring + used, 0);
        __syncwarp();
        fetch(SLOTS & 1, used);
        used = used + TILE_BYTES == RING_BYTES ? 0 : used + TILE_BYTES;
        mask(s, scale, row.length - token);
        float2 keep;
        const uint4 weights = softmax.weigh(s, keep);

        cp_async_wait<SLOTS - 1>();
        __syncwarp();
        if constexpr (Source::IS_FRESH)
            if (has_newest) Rows<D>::replace(ring + used, replaced - token, shared.fresh.value, 0, 1);
        keep_less<1, D / 16>(o, {keep});
        add_values<D, 1, D / 16>(o, {weights}, ring + used, 0, 0);
        __syncwarp();
        now.advance(row, team, cut);
        if (now.piece != piece) {  // the piece is done
            softmax.tell(shared.of_tile[warp], __any_sync(0xffffffffu, is_bad));
            float4* const slot = shared.tiles + used / 16;
#pragma unroll
            for (int j = 0; j < D / 16; ++j)
                slot[warp * (RING_BYTES / 16) + j * 32 + lane] = make_float4(o[0][j][0], o[0][j][1], o[0][j][2], o[0][j][3]);
            __syncthreads();
            Held<D / 64> result;
            combine_warps<D>(result, shared.of_tile, slot);
            if (cut.pieces == 1) {
                whole = result;
                break;
            }
            __syncthreads();
            const Stats stats[2] = {result.of_head[0].stats(), result.of_head[1].stats()};
            group.take(result.total, stats);
            if (now.piece >= cut.pieces || now.piece / GROUP != piece / GROUP) {  // the group is done
                if (cut.groups == 1) {
                    whole = group;
                    break;
                }
                const Stats of_group[2] = {group.of_head[0].stats(), group.of_head[1].stats()};
                if (team.sharing > 1) Slice<D>(team, piece / GROUP).write(group);
                else whole.take(group.total, of_group);
                group = Held<D / 64>();
                ++groups_done;
            }
            softmax = Softmax();
#pragma unroll
            for (int j = 0; j < D / 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[0][j][i] = 0.0f;
        }
        fetch((SLOTS + 1) & 1, used);
        used = used + TILE_BYTES == RING_BYTES ? 0 : used + TILE_BYTES;
    }

    // Stage 3: what several have to combine.
    if (cut.groups > 1 && team.sharing > 1) {
        if (!is_last(team.zeros, groups_done, cut.groups)) return;
#pragma unroll 4
        for (int of = 0; of < cut.groups; ++of) Slice<D>(team, of).take(whole);
    }
    whole.write(row, D);
}

// Meets one other warp.
__device__ __forceinline__ void meet_pair(int pair) { named_barrier_sync(1 + pair, 64); }

// A block without a piece: columns of all of them.
template <int D>
__device__ __forceinline__ void combine_pieces(const Cache& cache, const Row& row, const Team& team) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Cut cut(checked_length(row.length, cache, row.entries), team.most);
    if (cut.pieces > 1)
        combine_columns<D>(reinterpret_cast<Groups*>(memory), row.out, row.gate, row.heads, team.zeros, team.sharing, cut.pieces,
                           team.index - team.sharing);
}

// One row, of few: like attend_many, but this block has one piece; Spread<D>::THREADS threads. Warps share tiles: a warp has
// scores of one of them, or half of what makes them, and then some columns of all of them. ``entries``: the steps after the
// first are those of a context of as many pieces as there may be, which has them; so nobody waits for its length.
template <int D, class Source>
__device__ __forceinline__ void attend_few(const Cache& cache, Row row, Entries entries, float scale, const Team& team,
                                           Source& source) {
    constexpr int SLOTS = Rows<D>::SLOTS, TILE_BYTES = Rows<D>::TILE_BYTES, RING_BYTES = Rows<D>::RING_BYTES;
    constexpr int HALVES = Spread<D>::HALVES, J = Spread<D>::J;
    using Memory = Shared<D, typename Source::Memory>;
    static_assert(sizeof(Memory) <= WARPS * RING_BYTES + BESIDE_BYTES);
    extern __shared__ __align__(1024) unsigned char memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = warp / HALVES, half = warp % HALVES;
    const int own_token = TILE * tile + (lane & 15);
    int now = team.index * TOKENS;  // where a step begins
    source.begin(shared.q, row);  // before anybody waits for the length
    cp_async_commit();
    __syncwarp();  // loads stay ahead of the copies that follow, behind which they would come when these have

    // Stage 1: the first tiles, and the queries. No branch stands before the copies: what does not need the length is done
    // while it comes.
    const u32 tiles = shared_address(shared.tiles), ring = tiles + tile * RING_BYTES, stride = cache.key_heads * Rows<D>::PIECES;
    const u32 target = ring + Rows<D>::template target<HALVES>(half);
    const size_t of_head = row.key_head * Rows<D>::PIECES;
    const uint4* const keys = Rows<D>::template columns<HALVES>(reinterpret_cast<const uint4*>(cache.k) + of_head, half);
    const uint4* const values = Rows<D>::template columns<HALVES>(reinterpret_cast<const uint4*>(cache.v) + of_head, half);
    u32 place = 0, there = 0;  // where the next copy comes from
    int entry = entries.first;
    bool is_bad = false, has_tile = true;
    make_opaque(row.length);
    make_opaque(entry);
    auto find = [&](int first) {
        const int token = first + own_token;
        const bool exists = token < row.length, is_there = (u32)entry < (u32)cache.pages;
        is_bad |= exists & !is_there;
        place = exists & is_there ? (u32)cache.place_in(entry, token) * stride : 0;
        there = __ballot_sync(0xffffffffu, exists & is_there);
    };
    auto copy = [&](const uint4* from, u32 to) {
        if (has_tile) Rows<D>::template fetch<HALVES>(target + to, from, place, there);
        cp_async_commit();
    };
    row.length = checked_length(row.length, cache, row.entries);
    find(now);
    copy(keys, 0);
    // Copies come in the order they are asked for: keys of all warps first, so that scores are made before values come.
    __syncthreads();
    copy(values, TILE_BYTES);
    if (team.index > 0 && now >= row.length) {  // no piece
        cp_async_wait<0>();
        return;
    }
    const Cut cut(row.length, team.most);
    const int step = cut.pieces * TOKENS;
    // Sends keys of the step that begins there, or the same step's values, to a place in the ring. What the table says of the step
    // after is asked for before: behind these copies it would come when they have. Who makes queries would wait for that of the
    // third step with what these are made of, and so with the copies: it is there.
    auto fetch = [&](bool is_value, u32 to, int first, bool is_second) {
        if (is_value) {
            copy(values, to);
            return;
        }
        has_tile = first < row.length;
        if (has_tile) find(first);
        const int later = first + step + own_token;
        if (Source::IS_FRESH && is_second) entry = entries.third;
        else entry = load_now_if(later < row.length, row.table + cache.page_of(later), NOWHERE);
        copy(keys, to);
    };
    entry = entries.second;
    // The block that has the newest token.
    const int newest = row.length - 1;
    const bool is_owner = cut.pieces == 0 || newest / TOKENS % cut.pieces == team.index;
    OwnQueries<D, HALVES> q;
#pragma unroll 1
    for (int i = 2; i < SLOTS; ++i) fetch(i & 1, i * TILE_BYTES, now + i / 2 * step, i == 2);
    source.make(shared.q, shared.fresh, row, is_owner);
    source.template end<SLOTS>();
    const bool replaces = Source::IS_FRESH && source.has_token();

    // Stage 2: step after step.
    Softmax softmax;
    Columns<J> of_tile[WARPS] = {};
    Held<J> result;
    const Sending<D> sending(team);
    u32 used = 0;  // where the next tile is
#pragma unroll 1
    while (now < row.length) {
        q.load(shared.q, half);  // of 128 registers none are left for them from step to step
        const int token = now + TILE * tile;
        const bool has_newest = replaces && (u32)(row.length - 1 - token) < TILE, is_last_step = now + step >= row.length;
        const bool is_first_step = now == team.index * TOKENS;

        cp_async_wait<SLOTS - 1>();
        __syncwarp();
        if constexpr (Source::IS_FRESH)
            if (has_newest) Rows<D>::replace(ring + used, row.length - 1 - token, shared.fresh.key, half, HALVES);
        float s[4];
        score<D, HALVES>(s, q, ring + used, half);
        __syncwarp();
        if (HALVES > 1) shared.told.half_scores[warp][lane] = make_float4(s[0], s[1], s[2], s[3]);
        fetch(SLOTS & 1, used, now + SLOTS / 2 * step, false);
        used = used + TILE_BYTES == RING_BYTES ? 0 : used + TILE_BYTES;
        if (HALVES > 1) {
            meet_pair(tile);
            const float4 other = shared.told.half_scores[warp ^ 1][lane];
            s[0] = __fadd_rn(s[0], other.x), s[1] = __fadd_rn(s[1], other.y);
            s[2] = __fadd_rn(s[2], other.z), s[3] = __fadd_rn(s[3], other.w);
        }
        mask(s, scale, row.length - token);
        float2 keep;
        const uint4 weights = softmax.weigh(s, keep);
        if (half == 0) {
            shared.told.weights[tile][lane] = weights;
            if (lane < 4) *reinterpret_cast<float2*>(&shared.told.keep[tile][2 * lane]) = keep;
            if (is_last_step) softmax.tell(shared.of_tile[tile], __any_sync(0xffffffffu, is_bad));
        }
        Held<J> whole;  // of the last step only, so that nothing of it stays in registers meanwhile
        Tiles shares[2];
        if (is_last_step) {
            __syncthreads();
            take_tiles(shares, whole.of_head, shared.of_tile);
            if (cut.pieces > 1) sending.send(whole.of_head);
        }

        cp_async_wait<SLOTS - 1>();
        __syncwarp();
        if constexpr (Source::IS_FRESH)
            if (has_newest) Rows<D>::replace(ring + used, row.length - 1 - token, shared.fresh.value, half, HALVES);
        __syncthreads();
        uint4 all_weights[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) all_weights[w] = shared.told.weights[w][lane];
        if (!is_first_step) {
            float2 all_keep[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
                all_keep[w] = *reinterpret_cast<const float2*>(&shared.told.keep[w][2 * (lane & 3)]);
            keep_less<WARPS, J>(of_tile, all_keep);
        }
        add_values<D, WARPS, J>(of_tile, all_weights, tiles + used, RING_BYTES, warp * J);
        if (is_last_step) {
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
#pragma unroll
                for (int j = 0; j < J; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        whole.total[j][i] = shares[i & 1].add(whole.total[j][i], of_tile[w][j][i], w);
            if (cut.pieces == 1) {
                result = whole;
                break;
            }
            sending.send(whole.total);
            return;
        }
        now += step;
        __syncthreads();
        fetch((SLOTS + 1) & 1, used, now + SLOTS / 2 * step, false);
        used = used + TILE_BYTES == RING_BYTES ? 0 : used + TILE_BYTES;
    }
    result.write(row, D);
}

template <int D, bool SPREAD>
__device__ __forceinline__ void attend(const Cache& cache, const Row& row, const Entries& entries, float scale,
                                       const Team& team) {
    if constexpr (SPREAD) {
        Stored<D, Spread<D>::WARPS> source;
        attend_few<D>(cache, row, entries, scale, team, source);
    } else {
        Stored<D, WARPS> source;
        attend_many<D>(cache, row, entries.first, scale, team, source);
    }
}
