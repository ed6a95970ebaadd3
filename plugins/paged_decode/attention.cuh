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
#include "matrices.cuh"
#include "pieces.cuh"

constexpr int NO_PIECE = 0x7fffffff;
#define ATTENTION_BOUNDS __launch_bounds__(THREADS, 2)

// Tiles of keys or values of a warp, in shared memory: two blocks of 96 KB on a multiprocessor; where one has 100 KB, one of
// 64 (launch.py has the numbers too).
#if (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100)
constexpr int LARGEST_SLOTS = 3;
#else
constexpr int LARGEST_SLOTS = 2;
#endif
// What a block has in shared memory beside them, at most (launch.py).
constexpr int BESIDE_BYTES = 8 * 1024;

// --- instruction wrappers (PTX ISA 8.0) ---

__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Zeros where there is nothing.
__device__ __forceinline__ void copy_16(u32 to, const void* from, u32 is_there) {  // 0 or 1
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there * 16) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// --- device functions ---

__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float low_part(float p) { return __fsub_rn(p, __bfloat162float(__float2bfloat16_rn(p))); }

// Rows of D values of tokens or heads in shared memory: pieces of 16 bytes, twisted so that the same piece of eight rows,
// which an ldmatrix reads, lies in different banks.
template <int D>
struct Rows {
    static constexpr int BYTES = 2 * D, PIECES = D / 8, TILE_BYTES = TILE * BYTES;
    static constexpr int SLOTS = LARGEST_SLOTS * 256 / D, RING_BYTES = SLOTS * TILE_BYTES;  // of a warp

    __device__ __forceinline__ static int at(int row, int piece) { return row * BYTES + ((piece ^ (row & 7)) << 4); }

    // Sends a tile on its way, 128 bytes of four rows at a time. Lane i knows where token i % 16 stands, in pieces, and all of
    // them which tokens are there.
    __device__ __forceinline__ static void fetch(u32 to, const uint4* from, u32 place, u32 there) {
        const int lane = threadIdx.x & 31, piece = lane & 7;
#pragma unroll
        for (int i = 0; i < TILE / 4; ++i) {
            const int row = lane / 8 + 4 * i;
            const uint4* const own = from + piece + __shfl_sync(0xffffffffu, place, row);
            const u32 is_there = there >> row & 1;
#pragma unroll
            for (int c = 0; c < PIECES; c += 8) copy_16(to + at(row, piece) + 16 * c, own + c, is_there);
        }
    }
    // Puts a row in the place of one of a tile's; by one warp.
    __device__ __forceinline__ static void replace(u32 tile, int row, const __nv_bfloat16* by) {
        const int lane = threadIdx.x & 31;
        if (lane < PIECES) store_shared(tile + at(row, lane), reinterpret_cast<const uint4*>(by)[lane]);
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
template <int D>
struct Stored {
    static constexpr bool IS_FRESH = false;
    struct Memory {};

    __device__ __forceinline__ static bool has_token() { return false; }
    __device__ __forceinline__ void begin(Queries<D>& q, const Row& row) {
        constexpr int ALL = HEADS * Rows<D>::PIECES;
#pragma unroll
        for (int first = 0; first < ALL; first += THREADS) {
            const u32 i = first + threadIdx.x, head = i / Rows<D>::PIECES, exists = head < row.heads;
            if (ALL % THREADS == 0 || i < ALL)
                copy_16(shared_at(&q.piece(head, i % Rows<D>::PIECES)), row.q + (exists ? 8 * i : 0), exists);
        }
    }
    // PENDING: copies that were sent after.
    template <int PENDING>
    __device__ __forceinline__ void end(Queries<D>& q, Memory& memory, const Row& row, bool is_owner) {
        wait_for_copies<PENDING>();
        __syncthreads();
    }
};

// Running softmax of a warp's tiles. Lane (g, t) keeps largest and sum of heads 2t and 2t + 1, the sum over its own tokens.
template <int D>
struct Softmax {
    float o[D / 16][4] = {};
    float largest[2] = {NO_TOP, NO_TOP}, sum[2] = {};

    // Takes a tile's scores in, s = {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)} as (token, head), and makes them
    // weights: the high and low parts of tokens 2t, 2t + 1 and 2t + 8, 2t + 9 of head g.
    __device__ __forceinline__ void weigh(float (&s)[4], u32 (&high)[2], u32 (&low)[2]) {
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = fmaxf(s[h], s[2 + h]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            top = fmaxf(largest[h], top);
            keep[h] = power(__fsub_rn(largest[h], top));
            largest[h] = top;
            s[h] = power(__fsub_rn(s[h], top));
            s[2 + h] = power(__fsub_rn(s[2 + h], top));
            sum[h] = __fmaf_rn(sum[h], keep[h], __fadd_rn(s[h], s[2 + h]));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            high[i] = transposed(bf16_pair(s[2 * i], s[2 * i + 1]));
            low[i] = transposed(bf16_pair(low_part(s[2 * i]), low_part(s[2 * i + 1])));
        }
        if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
            for (int j = 0; j < D / 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[j][i] = __fmul_rn(o[j][i], keep[i & 1]);
        }
    }

    // Adds weights times a tile of values.
    __device__ __forceinline__ void add(const u32 (&high)[2], const u32 (&low)[2], u32 tile, int lane) {
        const u32 row = tile + Rows<D>::at((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
#pragma unroll
        for (int j = 0; j < D / 16; ++j) {
            u32 a[4];
            load_transposed(a, row ^ (j << 5));
            mma_16x8x16(o[j], a, high[0], high[1]);
            mma_16x8x16(o[j], a, low[0], low[1]);
        }
    }

    __device__ __forceinline__ Stats stats(int h, bool is_bad) const {
        float total = sum[h];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, step));
        return make_float2(largest[h], is_bad ? -1.0f : total);
    }
};

// Scores of a tile of keys; each 64 d a sum of their own, since products that wait for each other take long.
template <int D>
__device__ __forceinline__ void score(float (&s)[4], const u32 (&q)[D / 32][4], u32 tile, int lane) {
    const u32 row = tile + Rows<D>::at(lane & 15, lane >> 4);
    float parts[D / 64][4] = {};
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        u32 a[4];
        load_matrices(a, row ^ (i << 5));
        mma_16x8x16(parts[i % (D / 64)], a, q[i / 2][i % 2 * 2], q[i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        s[i] = parts[0][i];
        if constexpr (D > 64) s[i] = __fadd_rn(s[i], parts[1][i]);
        if constexpr (D > 128) s[i] = __fadd_rn(s[i], __fadd_rn(parts[2][i], parts[3][i]));
    }
}

// Where a block is in the context: at the step from ``token`` on, in ``piece``. With SPREAD a block has one piece.
template <bool SPREAD>
struct Walk {
    int piece, token;

    __device__ __forceinline__ Walk(int piece_, const Cut& cut) : piece(piece_), token(piece_ * TOKENS) {
        if (piece >= cut.pieces) piece = token = NO_PIECE;
    }
    __device__ __forceinline__ static int after(int piece, const Team& team) {
        if (SPREAD) return NO_PIECE;
        return (piece + 1) % GROUP != 0 ? piece + 1 : piece + 1 + (team.sharing - 1) * GROUP;
    }
    __device__ __forceinline__ void advance(const Row& row, const Team& team, const Cut& cut) {
        token += cut.pieces * TOKENS;
        if (token >= row.length) *this = Walk(after(piece, team), cut);
    }
};

// Shared memory of a block.
template <int D, class Memory>
struct Shared {
    float4 tiles[WARPS * Rows<D>::RING_BYTES / 16];  // [WARPS][SLOTS][TILE][D] of BF16
    Queries<D> q;
    alignas(16) Stats of_warp[WARPS][HEADS];
    Memory fresh;
};

// A piece from the warps of a block, whose results lie in their tiles at ``slot``.
template <int D>
__device__ __forceinline__ void combine_warps(Held<D>& piece, const Stats (&of_warp)[WARPS][HEADS], const float4* slot) {
    const int lane = threadIdx.x & 31, t = lane & 3, first = threadIdx.x / 32 * (D / 64);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float4 both = *reinterpret_cast<const float4*>(&of_warp[w][2 * t]);
        const Stats stats[2] = {make_float2(both.x, both.y), make_float2(both.z, both.w)};
        Columns<D> part;
#pragma unroll
        for (int j = 0; j < D / 64; ++j) {
            const float4 v = slot[w * (Rows<D>::RING_BYTES / 16) + (first + j) * 32 + lane];
            part[j][0] = v.x, part[j][1] = v.y, part[j][2] = v.z, part[j][3] = v.w;
        }
        piece.take(part, stats);
    }
}

// One row. Launch: THREADS threads, and dynamic shared memory for Shared; all threads of a block
// come here once their memory is there to be read. ``entry`` is what the table says of this thread's
// first token; a length that does not fit its pages is none. scale includes log2(e).
template <int D, bool SPREAD, class Source>
__device__ __forceinline__ void attend(const Cache& cache, Row row, int entry, float scale, const Team& team,
                                       Source& source) {
    constexpr int SLOTS = Rows<D>::SLOTS, TILE_BYTES = Rows<D>::TILE_BYTES, RING_BYTES = Rows<D>::RING_BYTES;
    using Memory = Shared<D, typename Source::Memory>;
    static_assert(sizeof(Memory) <= WARPS * RING_BYTES + BESIDE_BYTES);
    extern __shared__ __align__(1024) unsigned char memory[];
    Memory& shared = *reinterpret_cast<Memory*>(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    source.begin(shared.q, row);  // before anybody waits for the length
    commit_copies();
    row.length = checked_length(row.length, cache, row.entries);
    const Cut cut(row.length, team.most);
    if (SPREAD ? team.index > 0 && (team.index >= cut.pieces || cut.pieces <= 1) : team.index >= max(cut.groups, 1)) {
        wait_for_copies<0>();
        if (SPREAD && team.index >= team.sharing && cut.pieces > 1)
            combine_columns(reinterpret_cast<Groups*>(shared.tiles), row.out, row.gate, row.heads, team.zeros, team.sharing, cut.pieces, D,
                            team.index - team.sharing);
        return;
    }

    // Stage 1: the first tiles, and the queries.
    Walk<SPREAD> now(SPREAD ? team.index : team.index * GROUP, cut), next = now;
    const int own_token = TILE * warp + (lane & 15);
    const u32 ring = shared_at(shared.tiles) + warp * RING_BYTES, stride = cache.key_heads * Rows<D>::PIECES;
    const uint4* const keys = reinterpret_cast<const uint4*>(cache.k) + row.key_head * Rows<D>::PIECES;
    const uint4* const values = reinterpret_cast<const uint4*>(cache.v) + row.key_head * Rows<D>::PIECES;
    u32 filled = 0, place = 0, there = 0;  // where the next copy goes, in bytes; where it comes from
    bool is_bad = false, has_tile = false;
    // Sends keys of the next tile on their way, or values of the same; what the table says of the one after is asked for long
    // before it is needed.
    auto fetch = [&](bool is_value) {
        if (!is_value) {
            has_tile = next.piece != NO_PIECE;
            const int token = next.token + own_token;
            const int at = token < row.length && has_tile ? cache.place(entry, token, is_bad) : NOWHERE;
            place = (u32)max(at, 0) * stride;
            there = __ballot_sync(0xffffffffu, at != NOWHERE);
        }
        if (has_tile) Rows<D>::fetch(ring + filled, is_value ? values : keys, place, there);
        commit_copies();
        filled = filled + TILE_BYTES == RING_BYTES ? 0 : filled + TILE_BYTES;
        if (!is_value && has_tile) {
            next.advance(row, team, cut);
            if (next.piece != NO_PIECE && next.token + own_token < row.length)
                entry = load_entry(row.table + cache.page_of(next.token + own_token));
        }
    };
    // The block that has the newest token.
    const int newest = row.length - 1, newest_piece = cut.pieces > 0 ? newest / TOKENS % cut.pieces : 0;
    const bool is_owner = SPREAD ? newest_piece == team.index
                                 : newest_piece / GROUP % team.sharing == team.index;
    u32 q[D / 32][4];
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) {
        fetch(i & 1);
        if (i != 1) continue;
        source.template end<2>(shared.q, shared.fresh, row, is_owner);
#pragma unroll
        for (int j = 0; j < D / 32; ++j) load_matrices(q[j], shared_at(&shared.q.piece(lane & 7, 4 * j + (lane >> 3))));
    }
    const int replaced = Source::IS_FRESH && source.has_token() ? newest : -1;

    // Stage 2: tile after tile.
    Softmax<D> softmax;
    Held<D> group, whole;
    u32 used = 0;  // where the next tile is
    int groups_done = 0;
#pragma unroll 1
    while (now.piece != NO_PIECE) {
        const int token = now.token + TILE * warp, piece = now.piece;
        const bool has_newest = Source::IS_FRESH && (u32)(replaced - token) < TILE;

        wait_for_copies<SLOTS - 1>();
        __syncwarp();
        if constexpr (Source::IS_FRESH)
            if (has_newest) Rows<D>::replace(ring + used, replaced - token, shared.fresh.key);
        float s[4];
        score<D>(s, q, ring + used, lane);
        __syncwarp();
        fetch(SLOTS & 1);
        used = used + TILE_BYTES == RING_BYTES ? 0 : used + TILE_BYTES;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            s[i] = token + (lane >> 2) + 8 * (i >> 1) < row.length ? __fmul_rn(s[i], scale) : no_score();
        u32 high[2], low[2];
        softmax.weigh(s, high, low);

        wait_for_copies<SLOTS - 1>();
        __syncwarp();
        if constexpr (Source::IS_FRESH)
            if (has_newest) Rows<D>::replace(ring + used, replaced - token, shared.fresh.value);
        softmax.add(high, low, ring + used, lane);
        __syncwarp();
        now.advance(row, team, cut);
        if (now.piece != piece) {  // the piece is done
            const bool any_bad = __any_sync(0xffffffffu, is_bad);
            const Stats first = softmax.stats(0, any_bad), second = softmax.stats(1, any_bad);
            if (lane < 4)
                *reinterpret_cast<float4*>(&shared.of_warp[warp][2 * lane]) =
                    make_float4(first.x, first.y, second.x, second.y);
            float4* const slot = shared.tiles + used / 16;
#pragma unroll
            for (int j = 0; j < D / 16; ++j)
                slot[warp * (RING_BYTES / 16) + j * 32 + lane] =
                    make_float4(softmax.o[j][0], softmax.o[j][1], softmax.o[j][2], softmax.o[j][3]);
            __syncthreads();
            Held<D> result;
            combine_warps<D>(result, shared.of_warp, slot);
            if (cut.pieces == 1) {
                whole = result;
                break;
            }
            if constexpr (SPREAD) {
                send_piece<D>(result, team);
                return;
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
                group = Held<D>();
                ++groups_done;
            }
            softmax = Softmax<D>();
        }
        fetch((SLOTS + 1) & 1);
        used = used + TILE_BYTES == RING_BYTES ? 0 : used + TILE_BYTES;
    }

    // Stage 3: what several have to combine.
    if (!SPREAD && cut.groups > 1 && team.sharing > 1) {
        if (!is_last(team.zeros, groups_done, cut.groups)) return;
#pragma unroll 4
        for (int of = 0; of < cut.groups; ++of) Slice<D>(team, of).take(whole);
    }
    whole.write(row);
}

template <int D, bool SPREAD>
__device__ __forceinline__ void attend(const Cache& cache, const Row& row, int entry, float scale, const Team& team) {
    Stored<D> source;
    attend<D, SPREAD>(cache, row, entry, scale, team, source);
}
