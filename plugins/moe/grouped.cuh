// Grouped experts: the rows of each expert, which stand together in sorted order, by its weights, which are read from memory
// once a launch: for more than eight rows of one expert they come again from L2.
//
// The sort makes a list of the experts that have rows, so that the host needs no counts. All tiles of all of them, expert by
// expert, are shared out in one of two ways:
//   few rows   as many blocks as fit the device, equal shares: beginning once a launch, and no last wave. Grid: (blocks, 1)
//   many rows  ``repeats`` tiles of one place of the list for each team of a block: experts may have very different numbers of
//              rows. Grid: (ceil(tiles / TEAMS / repeats), min(E, S)); blocks whose place is empty end at once
// Blocks are small, so that some stream while others begin. Where K is known, the rows of x go to shared memory once for all
// tiles that a block has of an expert, and with them those of the expert behind it, if there is room for both.
//
// The list is clamped to the E experts and S rows. A slot outside 0 .. S - 1 reads a row of zeros.
#pragma once
#include "ahead.cuh"
#include "experts.cuh"

// Blocks that fill a multiprocessor with 16 warps: of gate and up two, whose shared memory leaves room for others' blocks beside
// them; of down four. Five blocks of four warps were slower on an H200, by 13% at 8 tokens and 7% at 64.
constexpr int GATE_UP_WARPS = 8, DOWN_WARPS = 4;
#define GATE_UP_BOUNDS __launch_bounds__(GATE_UP_WARPS * 32, 2)
#define DOWN_BOUNDS __launch_bounds__(DOWN_WARPS * 32, 4)

struct Group {
    int expert, begin, end;  // expert -1 if there is none

    __device__ __forceinline__ bool operator==(const Group& other) const {
        return expert == other.expert && begin == other.begin && end == other.end;
    }
};

// List and slots in shared memory, all read at once. How many experts there are says where a block begins, what is there which
// slots it needs, and those which rows of x: each would be a read of its own.
struct Near {
    static constexpr int EXPERTS = 256, SLOTS = 1024;
    static constexpr u32 NOTHING = 0xffffffffu;
    u32 groups[EXPERTS];  // end and first row in eleven bits each, above the expert's eight
    int slots[SLOTS], taken;
};

// The work list [E][4]: expert, first row, end of its rows, and how many places are taken, the same in all places. ``near`` has
// it too; null if not.
//
// All blocks read it at the same moment. A thread a value, and 16 bytes a thread: one L2 slice has few requests a cycle.
struct Work {
    const int* list;
    int E, S;
    Near* near = nullptr;

    __device__ __forceinline__ Group at(int place) const {
        place = min(place, E - 1);
        int taken;
        if (!near) return in_memory(place, taken);
        const u32 word = near->groups[place];
        return word == Near::NOTHING ? Group{-1, 0, 0} : Group{(int)(word & 255), (int)(word >> 8 & 2047), (int)(word >> 19)};
    }
    __device__ __forceinline__ Group in_memory(int place, int& taken) const {
        const int4 v = load_fresh(reinterpret_cast<const int4*>(list) + min(place, E - 1));
        const int begin = min(max(v.y, 0), S), end = min(max(v.z, 0), S);
        taken = min(max(v.w, 0), min(E, S));
        return {(u32)v.x < (u32)E && begin < end ? v.x : -1, begin, end};
    }
    __device__ __forceinline__ int taken() const {
        return near ? near->taken : min(max(load_fresh(list + 3), 0), min(E, S));
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
            if ((int)threadIdx.x + j * THREADS < S) own[j] = load_fresh(slots + threadIdx.x + j * THREADS);
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

    // Begins to fetch rows ``first`` .. ``end`` of the block, for all its threads; ``row(i)`` is where row i is, null for zeros.
    template <class Source>
    __device__ __forceinline__ void fetch(int first, int end, Source row) {
        if constexpr (F::STATIC_K > 0) {
            constexpr int PIECES = F::STATIC_K / 8;  // of 16 bytes, a row
#pragma unroll 1
            for (int i = first * PIECES + threadIdx.x; i < end * PIECES; i += F::THREADS) {
                const bf16* from = row(i / PIECES);
                uint4* to = &at[i / PIECES * (STRIDE / 16) + i % PIECES];
                if (from) copy_to_shared((u32)__cvta_generic_to_shared(to), from + i % PIECES * 8);
                else *to = make_uint4(0, 0, 0, 0);
            }
        }
    }
};

// Multiplies the tiles of a block by the rows of their groups, of which ``group`` is the first. ``row(i)`` is row i of x in sorted
// order, ``store(i, output, sums, scales)`` takes what comes of it. The first tile, and the first group's first rows, may be on
// their way already.
template <class F, int MATRICES, int SLOTS, class Source, class Store>
__device__ __forceinline__ void multiply_share(Stream<F, MATRICES, SLOTS>& stream, bool has_begun, bool has_rows,
                                               Rows<F>& shared_rows, const Experts (&experts)[MATRICES], const Work& work,
                                               Share share, Group group, const Place<F>& at, Source row, Store store) {
    __shared__ Exchange<F, MATRICES> exchange;
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
            // Rows are asked for first, by all warps: they would come behind all weights that are asked for before them.
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
                    multiply_rows(stream, exchange, experts, offset, after, !is_last_tile || has_more, x, rows, tile, turn,
                                  at, [&](int i, int output, const float (&sums)[MATRICES]) {
                                      store(begin + i, output, sums, scales);
                                  });
                    offset = after;
                }
            };
            if constexpr (F::STATIC_K > 0) {
                if (!has_rows) __syncthreads();  // rows before have been read
                shared_rows.fetch(has_rows ? rows : 0, has_rows_behind ? rows + all_behind : rows, [&](int i) {
                    return row(i < rows ? begin + i : behind.begin + i - rows);
                });
                begin_stream();
                wait_for_copies();
                __syncthreads();
                has_rows = false;
                SharedRow<F> x;
                x.row = (u32)__cvta_generic_to_shared(shared_rows.at) + min(base + at.g, GROUP_ROWS - 1) * Rows<F>::STRIDE;
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

// The down projections of a block's tiles; ``store(i, output, y)`` takes the results of row i in sorted order. Returns how
// many rows experts have, as ``offsets`` says; null for nobody who asks.
//
// With ``is_early`` they begin before the launch ahead of them has ended: they load the weights of the expert that the list
// names by then, and look again once it has ended. Only where it wrote the list itself was that in vain.
template <class F, class Store>
__device__ __forceinline__ int grouped_down(const Experts (&experts)[1], const bf16* h, const int* offsets, const Work& work,
                                            int H, int I, int repeats, int is_early, Store store) {
    __shared__ Rows<F> rows;
    __shared__ int all_rows;
    allow_next_launch();
    const Place<F> at(H, I);
    constexpr int SLOTS = F::CHAINS == 1 && F::STATIC_K > 0 ? F::STATIC_K / TILE_K : 1;
    Stream<F, 1, SLOTS> stream;
    Share share{0, 0, 0};
    Group group{-1, 0, 0};
    int taken = -1;
    if (is_early) {
        share = Share::of(work.taken(), repeats, at);
        group = work.in_memory(share.place, taken);
        if (group.expert >= 0 && at.team < min(share.count, at.tiles - share.tile)) {
            stream.start_early(experts, at.offset(group.expert, share.tile + at.team), at);
            if (at.lane == 0) bring_into_l2(experts[0].scales + group.expert);
        }
    }
    wait_for_previous_launch();
    // Both at once: nearly always the place has what it had.
    int taken_now, rest = 0;
    Group group_now = work.in_memory(share.place, taken_now);
    if (offsets && threadIdx.x == 0) rest = load_fresh(offsets + work.E);
    const auto row = [&](int i) { return h + (size_t)i * I; };
    if (group.expert >= 0 && share.count > 0)
        rows.fetch(0, min(GROUP_ROWS, group.end - group.begin), [&](int i) { return row(group.begin + i); });
    const bool is_same = taken_now == taken && group_now == group;
    if (!is_same) {
        wait_for_copies();
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
    clear_from(out, load_fresh(offsets + E), S, N);
}
