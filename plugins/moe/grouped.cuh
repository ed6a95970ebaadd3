// Grouped experts: the rows of each expert, which stand together in sorted order, by its weights, which are read from memory
// once a launch: for more than eight rows of one expert they come again from L2.
//
// The sort makes a list of the experts that have rows, so that the host needs no counts. All tiles of all of them, expert by
// expert, are shared out in one of two ways:
//   few rows   as many blocks as fit the device, equal shares: beginning once a launch, and no last wave. Grid: (blocks, 1)
//   many rows  ``repeats`` tiles of one place of the list for each team of a block: experts may have very different numbers of
//              rows. Grid: (ceil(tiles / TEAMS / repeats), min(E, S)); blocks whose place is empty end at once
// Blocks are small, so that some stream while others begin. Where K is known, the rows of x go to shared memory once for all
// tiles that a block has of an expert.
//
// The list is clamped to the E experts and S rows. A slot outside 0 .. S - 1 reads a row of zeros.
#pragma once
#include "experts.cuh"

constexpr int GROUPED_WARPS = 4;
// Four blocks of four warps on a multiprocessor. Five were slower on an H200, by 13% at 8 tokens and 7% at 64; without
// overlap of launches by 6% and 2%.
#define GROUPED_BOUNDS __launch_bounds__(GROUPED_WARPS * 32, 4)

struct Group {
    int expert, begin, end;  // expert -1 if there is none

    __device__ __forceinline__ bool operator==(const Group& other) const {
        return expert == other.expert && begin == other.begin && end == other.end;
    }
};

// The work list [E][4]: expert, first row, end of its rows, and how many places are taken.
struct Work {
    const int* list;
    int E, S;

    __device__ __forceinline__ Group at(int place) const {
        const int* p = list + 4 * min(place, E - 1);
        const int expert = load_fresh(p), begin = clamped(load_fresh(p + 1)), end = clamped(load_fresh(p + 2));
        return {(u32)expert < (u32)E && begin < end ? expert : -1, begin, end};
    }
    __device__ __forceinline__ int count() const { return min(max(load_fresh(list + 3), 0), min(E, S)); }
    __device__ __forceinline__ int clamped(int row) const { return min(max(row, 0), S); }
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
        const u32 items = (u32)groups * at.tiles, each = items / gridDim.x, more = items % gridDim.x;
        const u32 first = each * blockIdx.x + min(blockIdx.x, more), count = each + (blockIdx.x < more);
        return {(int)(first / at.tiles), (int)(first % at.tiles), (int)count};
    }
};

// The rows of x of a block in shared memory, a little apart, so that lanes of different rows read different banks.
template <class F>
struct Rows {
    static constexpr int STRIDE = F::STATIC_K * (int)sizeof(bf16) + 16;
    uint4 at[F::STATIC_K > 0 ? GROUP_ROWS * STRIDE / 16 : 1];

    // ``row(i)`` is row i in global memory, null for zeros. All threads of the block come here.
    template <class Source>
    __device__ __forceinline__ void fill(int rows, Source row) {
        constexpr int PIECES = F::STATIC_K / 8;  // of 16 bytes, a row
        __syncthreads();                         // rows before have been read
        for (int i = 0; i < rows; ++i) {
            const bf16* from = row(i);
#pragma unroll
            for (int piece = threadIdx.x; piece < PIECES; piece += F::THREADS) {
                uint4* to = &at[i * (STRIDE / 16) + piece];
                if (from) copy_to_shared((u32)__cvta_generic_to_shared(to), from + piece * 8);
                else *to = make_uint4(0, 0, 0, 0);
            }
        }
        wait_for_copies();
        __syncthreads();
    }
};

// Multiplies the tiles of a block by the rows of their groups, of which ``group`` is the first. ``row(i)`` is row i of x in sorted
// order, ``store(expert, i, output, sums)`` takes what comes of it. The first tile may have begun already.
template <class F, int MATRICES, class Source, class Store>
__device__ __forceinline__ void multiply_share(Stream<F, MATRICES, 1>& stream, bool has_begun,
                                               const Experts (&experts)[MATRICES], const Work& work, Share share, Group group,
                                               const Place<F>& at, Source row, Store store) {
    __shared__ Exchange<F, MATRICES> exchange;
    __shared__ Rows<F> shared_rows;
    while (share.count > 0 && group.expert >= 0) {
        // This group's tiles, and what the team has of the next group's.
        const int first = share.tile + at.team, end = min(share.tile + share.count, at.tiles);
        const int left = share.count - (end - share.tile);
        const Group behind = left > 0 ? work.at(share.place + 1) : Group{-1, 0, 0};
        const bool has_behind = at.team < min(left, at.tiles) && behind.expert >= 0;
        for (int begin = group.begin; begin < group.end; begin += GROUP_ROWS) {
            size_t offset = at.offset(group.expert, first);
            if (!has_begun && first < end) stream.start(experts, offset, at);
            const bool is_last = begin + GROUP_ROWS >= group.end;
            has_begun = first < end && (!is_last || has_behind);
            const size_t then = is_last ? at.offset(behind.expert, at.team) : offset;
            const int rows = min(GROUP_ROWS, group.end - begin);
            const auto multiply_tiles = [&](auto& x) {
#pragma unroll 1
                for (int tile = first; tile < end; tile += F::TEAMS) {
                    const bool is_last_tile = tile + F::TEAMS >= end;
                    const size_t after = is_last_tile ? then : offset + at.stride();
                    multiply_rows(stream, exchange, experts, offset, after, !is_last_tile || has_begun, x, rows, tile, at,
                                  [&](int i, int output, const float (&sums)[MATRICES]) {
                                      store(group.expert, begin + i, output, sums);
                                  });
                    offset = after;
                }
            };
            if constexpr (F::STATIC_K > 0) {
                shared_rows.fill(rows, [&](int i) { return row(begin + i); });
                SharedRow<F> x;
                x.row = (u32)__cvta_generic_to_shared(shared_rows.at) + at.g * Rows<F>::STRIDE;
                multiply_tiles(x);
            } else {
                GlobalRow<F> x;
                x.row = at.g < rows ? row(begin + at.g) : nullptr;
                multiply_tiles(x);
            }
        }
        share = {share.place + 1, 0, left};
        group = behind;
    }
}

// The down projections of a block's tiles; ``store(i, output, y)`` takes the results of row i in sorted order.
//
// With ``is_early`` they begin before the launch ahead of them has ended: they load the weights of the expert that the list
// names by then, and look again once it has ended. Only where it wrote the list itself was that in vain.
template <class F, class Store>
__device__ __forceinline__ void grouped_down(const Experts (&experts)[1], const bf16* h, const Work& work, int H, int I,
                                             int repeats, int is_early, Store store) {
    allow_next_launch();
    const Place<F> at(H, I);
    Stream<F, 1, 1> stream;
    Share share{0, 0, 0};
    Group group{-1, 0, 0};
    int groups = -1;
    if (is_early) {
        groups = work.count();
        share = Share::of(groups, repeats, at);
        group = work.at(share.place);
        if (group.expert >= 0 && at.team < min(share.count, at.tiles - share.tile))
            stream.start(experts, at.offset(group.expert, share.tile + at.team), at);
    }
    wait_for_previous_launch();
    const int groups_now = work.count();
    Group group_now = work.at(share.place);  // both loads at once: nearly always the place is the same
    const bool is_same = groups_now == groups && group_now == group;
    if (!is_same) {
        share = Share::of(groups_now, repeats, at);
        group_now = work.at(share.place);
    }
    const bool has_begun = is_same && group.expert >= 0 && at.team < min(share.count, at.tiles - share.tile);
    multiply_share(
        stream, has_begun, experts, work, share, group_now, at, [&](int i) { return h + (size_t)i * I; },
        [&](int expert, int i, int output, const float (&sums)[1]) { store(i, output, sums[0] * experts[0].scale(expert)); });
}

// Zeros for the rows that no expert has, which are at the end.
__device__ __forceinline__ void clear_rest(bf16* out, const int* offsets, int E, int S, int N) {
    const int first = min(max(load_fresh(offsets + E), 0), S), block = blockIdx.y * gridDim.x + blockIdx.x;
    for (int row = first + block; row < S; row += gridDim.x * gridDim.y)
        for (int i = threadIdx.x; i < N; i += blockDim.x) out[(size_t)row * N + i] = rounded(0.0f);
}
