// Grouped experts: the rows of each expert, which stand together in sorted order, by its weights, which are read from
// memory once a launch: for more than eight rows of one expert they come again from L2.
//
// The sort makes a list of the experts that have rows, so that the host needs no counts. All tiles of all of them,
// expert by expert, are shared out in one of two ways:
//   few rows   as many blocks as fit the device, equal shares: beginning once a launch, and no last wave.
//              Grid: (blocks, 1)
//   many rows  ``repeats`` tiles of one place of the list for each team of a block: experts may have very different
//              numbers of rows. Grid: (ceil(tiles / TEAMS / repeats), min(E, S)); blocks with an empty place return
// Blocks are small, so that some stream while others begin. Where K is known, the rows of x go to shared memory once
// for all tiles that a block has of an expert, and with them those of the expert behind it, if there is room for both.
//
// The list is clamped to the E experts and S rows. A slot outside 0 .. S - 1 reads a row of zeros.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "../experts/experts.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

// Blocks that fill a multiprocessor with 16 warps: of gate and up two, whose shared memory leaves room for others'
// blocks beside them; of down four. Five blocks of four warps were slower on an H200, by 13% at 8 tokens and 7% at 64.
constexpr int GATE_UP_WARPS = 8, DOWN_WARPS = 4;
#define GATE_UP_BOUNDS __launch_bounds__(GATE_UP_WARPS * 32, 2)
#define DOWN_BOUNDS __launch_bounds__(DOWN_WARPS * 32, 4)

struct Group {
    int expert, begin, end;  // expert -1 if there is none

    __device__ __forceinline__ bool operator==(const Group& other) const {
        return expert == other.expert && begin == other.begin && end == other.end;
    }
};

// List and slots in shared memory, all read at once. How many experts there are says where a block begins, what is
// there which slots it needs, and those which rows of x: each would be a read of its own.
struct Near {
    static constexpr int EXPERTS = 256, SLOTS = 1024;
    static constexpr u32 NOTHING = 0xffffffffu;
    u32 groups[EXPERTS];  // end and first row in eleven bits each, above the expert's eight
    int slots[SLOTS], taken;
};

// The work list [E][4]: expert, first row, end of its rows, and how many places are taken, the same in all places.
// ``near`` has it too; null if not.
//
// All blocks read it at the same moment. A thread a value, and 16 bytes a thread: one L2 slice has few requests a
// cycle.
struct Work {
    const int* list;
    int E, S;
    Near* near = nullptr;

    __device__ __forceinline__ Group at(int place) const {
        place = min(place, E - 1);
        int taken;
        if (!near) return in_memory(place, taken);
        const u32 word = near->groups[place];
        return word == Near::NOTHING ? Group{-1, 0, 0}
                                     : Group{(int)(word & 255), (int)(word >> 8 & 2047), (int)(word >> 19)};
    }
    __device__ __forceinline__ Group in_memory(int place, int& taken) const {
        const int4 v = load_relaxed(reinterpret_cast<const int4*>(list) + min(place, E - 1));
        const int begin = min(max(v.y, 0), S), end = min(max(v.z, 0), S);
        taken = min(max(v.w, 0), min(E, S));
        return {(u32)v.x < (u32)E && begin < end ? v.x : -1, begin, end};
    }
    __device__ __forceinline__ int taken() const {
        return near ? near->taken : min(max(load_relaxed(list + 3), 0), min(E, S));
    }
    // For all threads of a block, if all of it fits.
    template <int THREADS>
    __device__ __forceinline__ void bring(Near& to, const int* slots) {
        if (E > Near::EXPERTS || S > Near::SLOTS) return;
        constexpr int EACH = Near::SLOTS / THREADS;
        static_assert(THREADS >= Near::EXPERTS);
        int own[EACH], taken;
#pragma unroll
        for (int j = 0; j < EACH; ++j) own[j] = 0;
        Group group;
        if (threadIdx.x < E) group = in_memory(threadIdx.x, taken);
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            if ((int)threadIdx.x + j * THREADS < S) own[j] = load_relaxed(slots + threadIdx.x + j * THREADS);
        if (threadIdx.x < E)
            to.groups[threadIdx.x] =
                group.expert < 0 ? Near::NOTHING : (u32)group.end << 19 | (u32)group.begin << 8 | (u32)group.expert;
#pragma unroll
        for (int j = 0; j < EACH; ++j) to.slots[threadIdx.x + j * THREADS] = own[j];
        if (threadIdx.x == 0) to.taken = taken;
        __syncthreads();
        near = &to;
    }
};

// The tiles of a block: from one of the place-th group on, so many, on over the groups behind.
struct Share {
    int place, tile, count;

    template <class F>
    __device__ __forceinline__ static Share of(int groups, int repeats, const Place<F>& at) {
        if (repeats > 0) {
            const int tile = blockIdx.x * F::TEAMS * repeats;
            return {(int)blockIdx.y, tile, (int)blockIdx.y < groups ? min(F::TEAMS * repeats, at.tiles - tile) : 0};
        }
        // In whole rounds of the teams, if an expert has such.
        const u32 unit = at.tiles % F::TEAMS == 0 ? F::TEAMS : 1, tiles = at.tiles / unit;
        const u32 items = groups * tiles, each = items / gridDim.x, more = items - each * gridDim.x;
        const u32 first = each * blockIdx.x + min(blockIdx.x, more), count = each + (blockIdx.x < more);
        const u32 place = first / tiles;
        return {(int)place, (int)((first - place * tiles) * unit), (int)(count * unit)};
    }
};

// The rows of x of a block in shared memory, a little apart, so that lanes of different rows read different banks.
template <class F>
struct Rows {
    static constexpr int STRIDE = F::STATIC_K * (int)sizeof(bf16) + 16;
    uint4 at[F::STATIC_K > 0 ? GROUP_ROWS * STRIDE / 16 : 1];

    static constexpr int PIECES = F::STATIC_K / 8;  // of 16 bytes, a row
    // Whether a warp multiplies by the same supertile of K in every tile: then it fetches that alone, for nobody else.
    static constexpr bool IS_OWN = F::STATIC_K > 0 && F::STATIC_K == F::CHAINS * TILE_K && F::WARPS_K == F::CHAINS;

    __device__ __forceinline__ void put(int i, int piece, const bf16* from) {
        uint4* to = &at[i * (STRIDE / 16) + piece];
        if (from) cp_async_16(shared_address(to), from + piece * 8);
        else *to = make_uint4(0, 0, 0, 0);
    }
    // Begins to fetch rows ``first`` .. ``end`` of the block, for all its threads; ``row(i)`` is where row i is, null
    // for zeros.
    template <class Source>
    __device__ __forceinline__ void fetch(int first, int end, Source row) {
        if constexpr (IS_OWN) {
            static_assert(PIECES == F::THREADS);
#pragma unroll 1
            for (int i = first; i < end; ++i) put(i, threadIdx.x, row(i));
        } else if constexpr (F::STATIC_K > 0) {
#pragma unroll 1
            for (int i = first * PIECES + threadIdx.x; i < end * PIECES; i += F::THREADS)
                put(i / PIECES, i % PIECES, row(i / PIECES));
        }
    }
};

// What a warp has on its way: a supertile of each matrix, or all of a tile of one matrix whose K is one chain.
template <class F, int MATRICES, int SLOTS = MATRICES>
struct TileStream {
    static constexpr bool IS_WHOLE = MATRICES == 1 && F::CHAINS == 1 && F::STATIC_K == SLOTS * TILE_K;
    static constexpr bool IS_SINGLE = F::STATIC_K > 0 && F::STATIC_K == TILE_K* F::CHAINS;  // a supertile a chain
    static_assert(SLOTS == MATRICES || IS_WHOLE);
    Supertile ring[SLOTS];

    // The i-th that a warp begins a tile with.
    static __device__ __forceinline__ const u8* first(const Experts (&experts)[MATRICES], size_t tile, int i) {
        return IS_WHOLE ? experts[0].data + tile + i * SUPERTILE_BYTES : experts[IS_WHOLE ? 0 : i].data + tile;
    }
    // Begins with a tile.
    __device__ __forceinline__ void start(const Experts (&experts)[MATRICES], size_t tile, const Place<F>& at) {
        if (at.warp_k >= at.chains) return;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) ring[i].load(first(experts, tile, i), at.lane);
    }
    // The same ahead of the wait for the launch before.
    __device__ __forceinline__ void start_early(const Experts (&experts)[MATRICES], size_t tile, const Place<F>& at) {
        if (at.warp_k >= at.chains) return;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) load_early(ring[i], first(experts, tile, i), at.lane);
    }
    // A supertile of each of COUNT matrices, from ``own`` on, by the same rows; loads those at ``next`` in their
    // places, if any. Codes, then scales, as they lie: scales first were 10% slower on an H200.
    template <int COUNT, int A, class Row>
    __device__ __forceinline__ void multiply(float (&c)[COUNT][A][1][4], Supertile* own, Row& x, int s,
                                             const Experts* experts, size_t next, bool has_next, const Place<F>& at) {
        x.begin(s, at);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const auto& xs = x.block(b, at);
#pragma unroll
            for (int m = 0; m < COUNT; ++m) {
                const u32 word = b < 2 ? own[m].scales.x : own[m].scales.y;
                multiply_block<1>(
                    c[m], own[m].codes[b], scale_pair(word, 2 * (b & 1)), scale_pair(word, 2 * (b & 1) + 1), xs);
                if (has_next) own[m].load_block(experts[m].data + next, b, at.lane);
            }
        }
#pragma unroll
        for (int m = 0; m < COUNT; ++m)
            if (has_next) own[m].scales = load_scales(experts[m].data + next + CODE_BYTES + at.lane * 8);
    }
    template <class Finish>
    static __device__ __forceinline__ void finish_chain(const float (&c)[4][1][4], int m, int chain, Finish finish) {
        float sums[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = (c[0][0][i] + c[1][0][i]) + (c[2][0][i] + c[3][0][i]);
        finish(m, chain, sums);
    }

    // Multiplies a tile. ``finish(m, chain, sums)`` takes the sums of a chain: of rows 2t, 2t + 1 and outputs g, g + 8,
    // as an mma has them. ``after`` is the tile that comes next, if any does.
    template <class Row, class Finish>
    __device__ __forceinline__ void multiply_tile(const Experts (&experts)[MATRICES], size_t tile, size_t after,
                                                  bool has_after, Row& x, const Place<F>& at, Finish finish) {
        if constexpr (IS_WHOLE) {
            float c[1][4][1][4] = {};
#pragma unroll
            for (int s = 0; s < SLOTS; ++s)
                multiply<1>(c, &ring[s], x, s, experts, after + s * SUPERTILE_BYTES, has_after, at);
            finish_chain(c[0], 0, 0, finish);
        } else {
            // Where rows are read again for each block of 64 k, matrices share them.
            constexpr int COUNT = IS_SINGLE && Row::IS_NEAR ? MATRICES : 1;
#pragma unroll 1
            for (int chain = at.warp_k; chain < at.chains; chain += F::WARPS_K)
#pragma unroll
                for (int m = 0; m < MATRICES; m += COUNT) {
                    float c[COUNT][4][1][4] = {};
#pragma unroll 1
                    for (int s = chain; s < at.supertiles; s += at.step) {
                        int in_tile = s + at.step;  // of this chain, else of the next one, else of the next tile
                        if (in_tile >= at.supertiles) in_tile = chain + F::WARPS_K < at.chains ? chain + F::WARPS_K : 0;
                        const size_t next = in_tile > 0 ? tile + (in_tile - at.warp_k) * SUPERTILE_BYTES : after;
                        multiply<COUNT>(c, &ring[m], x, s, &experts[m], next, in_tile > 0 || has_after, at);
                        if (IS_SINGLE) break;
                    }
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) finish_chain(c[i], m + i, chain, finish);
                }
        }
    }
};

// Where sums of chains meet: [TEAMS][8 rows][MATRICES][CHAINS][16 outputs], rows a little apart, so that their values
// lie in different banks.
template <class F, int MATRICES>
struct Sums {
    static constexpr int ROW = MATRICES * F::CHAINS * TILE_N + 16, SIZE = GROUP_ROWS * ROW;
    float at[F::CHAINS == 1 ? 1 : F::TEAMS][F::CHAINS == 1 ? 1 : SIZE];
};

// Multiplies one tile for up to eight rows; ``store(i, output, sums)`` takes each output of row i, before the global
// scale.
template <class F, int MATRICES, int SLOTS, class Row, class Store>
__device__ __forceinline__ void multiply_group(
    TileStream<F, MATRICES, SLOTS>& stream, Sums<F, MATRICES>& exchange, const Experts (&experts)[MATRICES],
    size_t offset, size_t after, bool has_after, Row& x, int rows, int tile, int& turn, const Place<F>& at,
    Store store) {
    if constexpr (F::CHAINS == 1) {
        float sums[MATRICES][4] = {};
        stream.multiply_tile(experts, offset, after, has_after, x, at, [&](int m, int, const float (&own)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][i] = own[i];
        });
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = 2 * at.t + (i & 1), output = tile * TILE_N + at.g + 8 * (i >> 1);
            float values[MATRICES];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) values[m] = sums[m][i];
            if (own < rows && output < at.N) store(own, output, values);
        }
    } else {
        // Up to four rows fill half of the space: sums of two tiles take turns, so that one barrier a tile is enough.
        constexpr int ROW = Sums<F, MATRICES>::ROW;
        const bool is_half = rows <= GROUP_ROWS / 2;
        turn = is_half ? turn ^ (GROUP_ROWS / 2 * ROW) : 0;
        float* const partial = exchange.at[at.team] + turn;
        stream.multiply_tile(experts, offset, after, has_after, x, at, [&](int m, int chain, const float (&own)[4]) {
            if (2 * at.t >= rows) return;
            float* const to = partial + 2 * at.t * ROW + (m * F::CHAINS + chain) * TILE_N + at.g;
#pragma unroll
            for (int i = 0; i < 4; ++i) to[(i & 1) * ROW + 8 * (i >> 1)] = own[i];
        });
        team_barrier<F>(at.team);
        // Another warp each time: the others go on.
        const int warp = (at.warp_k + tile) % F::WARPS_K;
        for (int i = warp * 32 + at.lane; i < rows * TILE_N; i += F::WARPS_K * 32) {
            const float* const from = partial + i / TILE_N * ROW + i % TILE_N;
            const int output = tile * TILE_N + i % TILE_N;
            float totals[MATRICES] = {};
#pragma unroll
            for (int c = 0; c < F::CHAINS; ++c)
#pragma unroll
                for (int m = 0; m < MATRICES; ++m)
                    if (F::STATIC_K > 0 || c < at.chains) totals[m] += from[(m * F::CHAINS + c) * TILE_N];
            if (output < at.N) store(i / TILE_N, output, totals);
        }
        if (!is_half) team_barrier<F>(at.team);  // before the next tile's sums
    }
}

// Multiplies the tiles of a block by the rows of their groups, of which ``group`` is the first. ``row(i)`` is row i of
// x in sorted order, ``store(i, output, sums, scales)`` takes what comes of it. The first tile, and the first group's
// first rows, may be on their way already.
template <class F, int MATRICES, int SLOTS, class Source, class Store>
__device__ __forceinline__ void multiply_share(
    TileStream<F, MATRICES, SLOTS>& stream, bool has_begun, bool has_rows, Rows<F>& shared_rows,
    const Experts (&experts)[MATRICES], const Work& work, Share share, Group group, const Place<F>& at, Source row,
    Store store) {
    __shared__ Sums<F, MATRICES> exchange;
    int turn = 0, base = 0;  // the place of the group's first row
    while (share.count > 0 && group.expert >= 0) {
        // This group's tiles, and what the team has of the next group's.
        const int first = share.tile + at.team, end = min(share.tile + share.count, at.tiles);
        const int left = share.count - (end - share.tile);
        const Group behind = left > 0 ? work.at(share.place + 1) : Group{-1, 0, 0};
        const bool has_behind = at.team < min(left, at.tiles) && behind.expert >= 0;
        const int all = group.end - group.begin, all_behind = behind.end - behind.begin;
        const bool has_rows_behind = behind.expert >= 0 && base == 0 && all + all_behind <= GROUP_ROWS;
        float scales[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) scales[m] = experts[m].scale(group.expert);
        for (int begin = group.begin; begin < group.end; begin += GROUP_ROWS) {
            size_t offset = at.offset(group.expert, first);
            const bool is_last = begin + GROUP_ROWS >= group.end;
            const size_t then = is_last ? at.offset(behind.expert, at.team) : offset;
            const bool has_more = is_last ? has_behind : first < end;
            // Rows are asked for first, by all warps: they would come behind all weights that are asked for before
            // them.
            const int rows = min(GROUP_ROWS, group.end - begin);
            const auto begin_stream = [&] {
                if (F::TEAMS == 1 && !has_begun) __syncthreads();
                if (!has_begun && (first < end || has_more)) stream.start(experts, first < end ? offset : then, at);
                has_begun = has_more;
            };
            const auto multiply_tiles = [&](auto& x) {
#pragma unroll 1
                for (int tile = first; tile < end; tile += F::TEAMS) {
                    const bool is_last_tile = tile + F::TEAMS >= end;
                    const size_t after = is_last_tile ? then : offset + at.stride();
                    multiply_group(stream, exchange, experts, offset, after, !is_last_tile || has_more, x, rows, tile,
                                   turn, at, [&](int i, int output, const float (&sums)[MATRICES]) {
                                       store(begin + i, output, sums, scales);
                                   });
                    offset = after;
                }
            };
            if constexpr (F::STATIC_K > 0) {
                if constexpr (Rows<F>::IS_OWN) __syncwarp();
                else if (!has_rows) __syncthreads();  // rows before have been read
                shared_rows.fetch(has_rows ? rows : 0, has_rows_behind ? rows + all_behind : rows,
                                  [&](int i) { return row(i < rows ? begin + i : behind.begin + i - rows); });
                begin_stream();
                cp_async_commit(), cp_async_wait<0>();
                if (Rows<F>::IS_OWN && rows <= GROUP_ROWS / 2) __syncwarp();
                else __syncthreads();  // sums before have been read
                has_rows = false;
                SharedRow<F> x;
                x.row = shared_address(shared_rows.at) + min(base + at.g, GROUP_ROWS - 1) * Rows<F>::STRIDE;
                multiply_tiles(x);
            } else {
                begin_stream();
                __syncthreads();  // sums before have been read
                GlobalRow<F> x;
                x.row = at.g < rows ? row(begin + at.g) : nullptr;
                multiply_tiles(x);
            }
        }
        base = has_rows_behind ? all : 0;
        has_rows = has_rows_behind;
        share = {share.place + 1, 0, left};
        group = behind;
    }
}

// The down projections of a block's tiles; ``store(i, output, y)`` takes the results of row i in sorted order. Returns
// how many rows experts have, as ``offsets`` says; null for nobody who asks.
//
// With ``is_early`` they begin before the launch ahead of them has ended: they load the weights of the expert that the
// list names by then, and look again once it has ended. Only where it wrote the list itself was that in vain.
template <class F, class Store>
__device__ __forceinline__ int grouped_down(const Experts (&experts)[1], const bf16* h, const int* offsets,
                                            const Work& work, int H, int I, int repeats, int is_early, Store store) {
    __shared__ Rows<F> rows;
    __shared__ int all_rows;
    pdl_launch_dependents();
    const Place<F> at(H, I);
    constexpr int SLOTS = F::CHAINS == 1 && F::STATIC_K > 0 ? F::STATIC_K / TILE_K : 1;
    TileStream<F, 1, SLOTS> stream;
    Share share{0, 0, 0};
    Group group{-1, 0, 0};
    int taken = -1;
    if (is_early) {
        share = Share::of(work.taken(), repeats, at);
        group = work.in_memory(share.place, taken);
        if (group.expert >= 0 && at.team < min(share.count, at.tiles - share.tile)) {
            stream.start_early(experts, at.offset(group.expert, share.tile + at.team), at);
            if (at.lane == 0) prefetch_l2(experts[0].scales + group.expert);
        }
    }
    pdl_wait();
    // Both at once: nearly always the place has what it had.
    int taken_now, rest = 0;
    Group group_now = work.in_memory(share.place, taken_now);
    if (offsets && threadIdx.x == 0) rest = load_relaxed(offsets + work.E);
    const auto row = [&](int i) { return h + (size_t)i * I; };
    if (group.expert >= 0 && share.count > 0)
        rows.fetch(0, min(GROUP_ROWS, group.end - group.begin), [&](int i) { return row(group.begin + i); });
    const bool is_same = taken_now == taken && group_now == group;
    if (!is_same) {
        cp_async_commit(), cp_async_wait<0>();
        share = Share::of(taken_now, repeats, at);
        group_now = work.in_memory(share.place, taken_now);
    }
    if (threadIdx.x == 0) all_rows = rest;
    const bool has_begun = is_same && group.expert >= 0 && at.team < min(share.count, at.tiles - share.tile);
    multiply_share(stream, has_begun, is_same, rows, experts, work, share, group_now, at, row,
                   [&](int i, int output, const float (&sums)[1], const float (&scales)[1]) {
                       store(i, output, sums[0] * scales[0]);
                   });
    __syncthreads();
    return all_rows;
}

// Zeros for the rows that no expert has, from ``first`` to the end.
__device__ __forceinline__ void clear_from(bf16* out, int first, int S, int N) {
    const int block = blockIdx.y * gridDim.x + blockIdx.x;
    for (int row = min(max(first, 0), S) + block; row < S; row += gridDim.x * gridDim.y)
        for (int i = threadIdx.x; i < N; i += blockDim.x) out[(size_t)row * N + i] = rounded(0.0f);
}
__device__ __forceinline__ void clear_rest(bf16* out, const int* offsets, int E, int S, int N) {
    clear_from(out, load_relaxed(offsets + E), S, N);
}
