// Grouped GEMM of NVFP4 experts on mma.sync: the rows of each expert, adjacent in sorted order, times its weights. Used
// by grouped.cu and atomic.cu; launched by launch.py. sm_80 and newer.
//
// Weights come from HBM once a launch. For more than eight rows of an expert they come again from L2.
//
// moe_sort_by_expert writes a work list of the experts with rows, so that the host needs no counts. Two tile
// schedulers:
//   persistent  up to 1024 slots: as many blocks as fit the device, an equal range of tiles each. One prologue a block,
//               and no partial last wave. Grid: (blocks, 1)
//   by expert   more slots: ``repeats`` tiles of one entry of the list for each team of a block, because experts may
//               have very different numbers of rows. Grid: (ceil(tiles / TEAMS / repeats), min(E, S)); blocks of an
//               empty entry return
// Blocks are small, so that some load weights during the prologue of others. With K known at compile time, the rows of
// x go to shared memory once for all tiles of an expert, together with the rows of the next expert if both fit.
//
// The list is clamped to the E experts and S rows. A slot outside 0 .. S - 1 reads a row of zeros.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "../experts/experts.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

// Occupancy of 16 warps a multiprocessor: two blocks of gate and up, four of down. Five blocks of four warps were
// slower on an H200, by 13% at 8 tokens and 7% at 64.
constexpr int GATE_UP_WARPS = 8, DOWN_WARPS = 4, GATE_UP_BLOCKS = 2, DOWN_BLOCKS = 4;
#define GATE_UP_BOUNDS __launch_bounds__(GATE_UP_WARPS * 32, GATE_UP_BLOCKS)
#define DOWN_BOUNDS __launch_bounds__(DOWN_WARPS * 32, DOWN_BLOCKS)

// The rows of one expert, [begin, end) in sorted order.
struct Group {
    int expert, begin, end;  // expert -1 if there is none

    __device__ __forceinline__ bool operator==(const Group& other) const {
        return expert == other.expert && begin == other.begin && end == other.end;
    }
};

// Copy of work list and slots in shared memory. A block needs the number of experts to find its first entry, the entry
// to find its slots, and the slots to find its rows of x. One load of everything replaces three dependent loads.
struct SharedWorkList {
    static constexpr int EXPERTS = 256, SLOTS = 1024;
    static constexpr u32 EMPTY = 0xffffffffu;
    u32 groups[EXPERTS];  // end (11 bits), begin (11 bits), expert (8 bits)
    int slots[SLOTS], count;
};

// The work list [E][4]: expert, first row, end of its rows, and the number of entries, which is the same in all
// entries. ``shared_list`` is a copy of it, or null.
//
// All blocks read the list at the same time. Each value is loaded by one thread, 16 bytes at a time, because an L2
// slice serves few requests a cycle.
struct WorkList {
    const int* list;
    int E, S;
    SharedWorkList* shared_list = nullptr;

    __device__ __forceinline__ Group at(int entry) const {
        entry = min(entry, E - 1);
        int count;
        if (!shared_list) return load_entry(entry, count);
        const u32 word = shared_list->groups[entry];
        return word == SharedWorkList::EMPTY ? Group{-1, 0, 0}
                                             : Group{(int)(word & 255), (int)(word >> 8 & 2047), (int)(word >> 19)};
    }
    __device__ __forceinline__ Group load_entry(int entry, int& count) const {
        const int4 v = load_relaxed(reinterpret_cast<const int4*>(list) + min(entry, E - 1));
        const int begin = min(max(v.y, 0), S), end = min(max(v.z, 0), S);
        count = min(max(v.w, 0), min(E, S));
        return {(u32)v.x < (u32)E && begin < end ? v.x : -1, begin, end};
    }
    __device__ __forceinline__ int count() const {
        return shared_list ? shared_list->count : min(max(load_relaxed(list + 3), 0), min(E, S));
    }
    // Copies the list to shared memory if it fits. For all threads of a block.
    template <int THREADS>
    __device__ __forceinline__ void load_to_shared(SharedWorkList& to, const int* slots) {
        if (E > SharedWorkList::EXPERTS || S > SharedWorkList::SLOTS) return;
        constexpr int EACH = SharedWorkList::SLOTS / THREADS;
        static_assert(THREADS >= SharedWorkList::EXPERTS);
        int values[EACH], count;
#pragma unroll
        for (int j = 0; j < EACH; ++j) values[j] = 0;
        Group group;
        if (threadIdx.x < E) group = load_entry(threadIdx.x, count);
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            if ((int)threadIdx.x + j * THREADS < S) values[j] = load_relaxed(slots + threadIdx.x + j * THREADS);
        if (threadIdx.x < E)
            to.groups[threadIdx.x] =
                group.expert < 0 ? SharedWorkList::EMPTY
                                 : (u32)group.end << 19 | (u32)group.begin << 8 | (u32)group.expert;
#pragma unroll
        for (int j = 0; j < EACH; ++j) to.slots[threadIdx.x + j * THREADS] = values[j];
        if (threadIdx.x == 0) to.count = count;
        __syncthreads();
        shared_list = &to;
    }
};

// The tiles of a block: ``count`` tiles from ``tile`` of the group at ``entry`` on, over the groups that follow.
struct TileRange {
    int entry, tile, count;

    template <class F>
    __device__ __forceinline__ static TileRange of(int groups, int repeats, const WarpPosition<F>& at) {
        if (repeats > 0) {
            const int tile = blockIdx.x * F::TEAMS * repeats;
            return {(int)blockIdx.y, tile, (int)blockIdx.y < groups ? min(F::TEAMS * repeats, at.tiles - tile) : 0};
        }
        // In units of one tile for each team, if an expert has a whole number of them.
        const u32 unit = at.tiles % F::TEAMS == 0 ? F::TEAMS : 1, tiles = at.tiles / unit;
        const u32 items = groups * tiles, each = items / gridDim.x, more = items - each * gridDim.x;
        const u32 first = each * blockIdx.x + min(blockIdx.x, more), count = each + (blockIdx.x < more);
        const u32 entry = first / tiles;
        return {(int)entry, (int)((first - entry * tiles) * unit), (int)(count * unit)};
    }
};

// The block's rows of x in shared memory, padded by 16 bytes a row against bank conflicts.
template <class F>
struct SharedRows {
    static constexpr int STRIDE = F::STATIC_K * (int)sizeof(bf16) + 16;
    uint4 at[F::STATIC_K > 0 ? GROUP_ROWS * STRIDE / 16 : 1];

    static constexpr int CHUNKS = F::STATIC_K / 8;  // of 16 bytes in a row
    // Whether a warp reads the same supertile of K in every tile. It then copies only that, and only for itself.
    static constexpr bool IS_PER_WARP = F::STATIC_K > 0 && F::STATIC_K == F::SLICES * TILE_K && F::WARPS_K == F::SLICES;

    __device__ __forceinline__ void put(int i, int chunk, const bf16* from) {
        uint4* to = &at[i * (STRIDE / 16) + chunk];
        if (from) cp_async_16(shared_address(to), from + chunk * 8);
        else *to = make_uint4(0, 0, 0, 0);
    }
    // Issues the copies of rows ``first`` .. ``end``, for all threads of a block. ``row(i)`` is the address of row i,
    // null for zeros.
    template <class Source>
    __device__ __forceinline__ void fetch(int first, int end, Source row) {
        if constexpr (IS_PER_WARP) {
            static_assert(CHUNKS == F::THREADS);
#pragma unroll 1
            for (int i = first; i < end; ++i) put(i, threadIdx.x, row(i));
        } else if constexpr (F::STATIC_K > 0) {
#pragma unroll 1
            for (int i = first * CHUNKS + threadIdx.x; i < end * CHUNKS; i += F::THREADS)
                put(i / CHUNKS, i % CHUNKS, row(i / CHUNKS));
        }
    }
};

// Adds the four accumulators of a slice, in a fixed order.
template <class Finish>
__device__ __forceinline__ void finish_slice(const float (&c)[4][1][4], int m, int slice, Finish finish) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = (c[0][0][i] + c[1][0][i]) + (c[2][0][i] + c[3][0][i]);
    finish(m, slice, sums);
}

// The register pipeline of a warp's weights: one supertile for each matrix, or a whole tile of one matrix with one
// slice.
template <class F, int MATRICES, int SLOTS = MATRICES>
struct TilePipeline {
    static constexpr bool IS_WHOLE = MATRICES == 1 && F::SLICES == 1 && F::STATIC_K == SLOTS * TILE_K;
    static constexpr bool IS_SINGLE = F::STATIC_K > 0 && F::STATIC_K == TILE_K* F::SLICES;  // one supertile in a slice
    static_assert(SLOTS == MATRICES || IS_WHOLE);
    Supertile ring[SLOTS];

    // The i-th supertile that a warp loads of a tile.
    static __device__ __forceinline__ const u8* first(const Experts (&experts)[MATRICES], size_t tile, int i) {
        return IS_WHOLE ? experts[0].data + tile + i * SUPERTILE_BYTES : experts[IS_WHOLE ? 0 : i].data + tile;
    }
    // Loads the first supertiles of a tile.
    __device__ __forceinline__ void start(const Experts (&experts)[MATRICES], size_t tile, const WarpPosition<F>& at) {
        if (at.warp_k >= at.slices) return;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) ring[i].load(first(experts, tile, i), at.lane);
    }
    // The same, before pdl_wait.
    __device__ __forceinline__ void start_before_wait(const Experts (&experts)[MATRICES], size_t tile,
                                                      const WarpPosition<F>& at) {
        if (at.warp_k >= at.slices) return;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) ring[i].load_before_wait(first(experts, tile, i), at.lane);
    }
    // Multiplies one supertile of each of COUNT matrices by the same rows, and loads those at ``next`` in their place
    // if has_next. Codes are loaded before scales, in memory order: scales first were 10% slower on an H200.
    template <int COUNT, int A, class Row>
    __device__ __forceinline__ void multiply(float (&c)[COUNT][A][1][4], Supertile* weights, Row& x, int s,
                                             const Experts* experts, size_t next, bool has_next,
                                             const WarpPosition<F>& at) {
        x.begin(s, at);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const auto& xs = x.block(b, at);
#pragma unroll
            for (int m = 0; m < COUNT; ++m) {
                const u32 word = b < 2 ? weights[m].scales.x : weights[m].scales.y;
                multiply_block<1>(
                    c[m], weights[m].codes[b], scale_pair(word, 2 * (b & 1)), scale_pair(word, 2 * (b & 1) + 1), xs);
                if (has_next) weights[m].load_block(experts[m].data + next, b, at.lane);
            }
        }
#pragma unroll
        for (int m = 0; m < COUNT; ++m)
            if (has_next) weights[m].scales = load_scales(experts[m].data + next + CODE_BYTES + at.lane * 8);
    }
    // Multiplies a tile. ``finish(m, slice, sums)`` gets the partial sums of a slice in the layout of an mma
    // accumulator: rows 2t, 2t + 1 and outputs g, g + 8. ``after`` is the offset of the next tile, if has_after.
    template <class Row, class Finish>
    __device__ __forceinline__ void multiply_tile(const Experts (&experts)[MATRICES], size_t tile, size_t after,
                                                  bool has_after, Row& x, const WarpPosition<F>& at, Finish finish) {
        if constexpr (IS_WHOLE) {
            float c[1][4][1][4] = {};
#pragma unroll
            for (int s = 0; s < SLOTS; ++s)
                multiply<1>(c, &ring[s], x, s, experts, after + s * SUPERTILE_BYTES, has_after, at);
            finish_slice(c[0], 0, 0, finish);
        } else {
            // Rows in shared memory are read again for each block of 64 k: all matrices use one read.
            constexpr int COUNT = IS_SINGLE && Row::IS_SHARED ? MATRICES : 1;
#pragma unroll 1
            for (int slice = at.warp_k; slice < at.slices; slice += F::WARPS_K)
#pragma unroll
                for (int m = 0; m < MATRICES; m += COUNT) {
                    float c[COUNT][4][1][4] = {};
#pragma unroll 1
                    for (int s = slice; s < at.supertiles; s += at.step) {
                        int in_tile = s + at.step;  // in this slice, else in the next slice, else in the next tile
                        if (in_tile >= at.supertiles) in_tile = slice + F::WARPS_K < at.slices ? slice + F::WARPS_K : 0;
                        const size_t next = in_tile > 0 ? tile + (in_tile - at.warp_k) * SUPERTILE_BYTES : after;
                        multiply<COUNT>(c, &ring[m], x, s, &experts[m], next, in_tile > 0 || has_after, at);
                        if (IS_SINGLE) break;
                    }
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) finish_slice(c[i], m + i, slice, finish);
                }
        }
    }
};

// Split-K partials in shared memory: [TEAMS][8 rows][MATRICES][SLICES][16 outputs], rows padded against bank conflicts.
template <class F, int MATRICES>
struct PaddedPartials {
    static constexpr int ROW = MATRICES * F::SLICES * TILE_N + 16, SIZE = GROUP_ROWS * ROW;
    float at[F::SLICES == 1 ? 1 : F::TEAMS][F::SLICES == 1 ? 1 : SIZE];
};

// Multiplies one tile for up to eight rows. The epilogue ``store(i, output, sums)`` gets each output of row i, before
// the global scale.
template <class F, int MATRICES, int SLOTS, class Row, class Store>
__device__ __forceinline__ void multiply_group(
    TilePipeline<F, MATRICES, SLOTS>& pipeline, PaddedPartials<F, MATRICES>& partials,
    const Experts (&experts)[MATRICES], size_t offset, size_t after, bool has_after, Row& x, int rows, int tile,
    int& buffer, const WarpPosition<F>& at, Store store) {
    if constexpr (F::SLICES == 1) {
        multiply_single_slice(pipeline, experts, offset, after, has_after, x, rows, tile, at, store);
    } else {
        // Up to four rows need half of the partials: double-buffered, so that one barrier a tile is enough.
        constexpr int ROW = PaddedPartials<F, MATRICES>::ROW;
        const bool is_half = rows <= GROUP_ROWS / 2;
        buffer = is_half ? buffer ^ (GROUP_ROWS / 2 * ROW) : 0;
        float* const partial = partials.at[at.team] + buffer;
        pipeline.multiply_tile(
            experts, offset, after, has_after, x, at, [&](int m, int slice, const float (&slice_sums)[4]) {
                if (2 * at.t >= rows) return;
                float* const to = partial + 2 * at.t * ROW + (m * F::SLICES + slice) * TILE_N + at.g;
#pragma unroll
                for (int i = 0; i < 4; ++i) to[(i & 1) * ROW + 8 * (i >> 1)] = slice_sums[i];
            });
        team_barrier<F>(at.team);
        // Another warp for each tile: the others continue with the next tile.
        const int warp = (at.warp_k + tile) % F::WARPS_K;
        for (int i = warp * 32 + at.lane; i < rows * TILE_N; i += F::WARPS_K * 32) {
            const float* const from = partial + i / TILE_N * ROW + i % TILE_N;
            const int output = tile * TILE_N + i % TILE_N;
            float totals[MATRICES] = {};
#pragma unroll
            for (int c = 0; c < F::SLICES; ++c)
#pragma unroll
                for (int m = 0; m < MATRICES; ++m)
                    if (F::STATIC_K > 0 || c < at.slices) totals[m] += from[(m * F::SLICES + c) * TILE_N];
            if (output < at.N) store(i / TILE_N, output, totals);
        }
        if (!is_half) team_barrier<F>(at.team);  // before the partials of the next tile
    }
}

// The main loop of a block: its tiles times the rows of their groups, the first of which is ``group``. ``row(i)`` is
// the address of row i of x in sorted order, ``store(i, output, sums, scales)`` the epilogue. With has_begun the first
// weights, and with has_rows the first rows, are already being loaded.
template <class F, int MATRICES, int SLOTS, class Source, class Store>
__device__ __forceinline__ void multiply_range(
    TilePipeline<F, MATRICES, SLOTS>& pipeline, bool has_begun, bool has_rows, SharedRows<F>& shared_rows,
    const Experts (&experts)[MATRICES], const WorkList& work, TileRange range, Group group, const WarpPosition<F>& at,
    Source row, Store store) {
    __shared__ PaddedPartials<F, MATRICES> partials;
    int buffer = 0, base = 0;  // the index of the group's first row in shared memory
    while (range.count > 0 && group.expert >= 0) {
        // The team's tiles of this group, and whether it has tiles of the next one.
        const int first = range.tile + at.team, end = min(range.tile + range.count, at.tiles);
        const int remaining = range.count - (end - range.tile);
        const Group following = remaining > 0 ? work.at(range.entry + 1) : Group{-1, 0, 0};
        const bool has_following = at.team < min(remaining, at.tiles) && following.expert >= 0;
        const int group_rows = group.end - group.begin, following_rows = following.end - following.begin;
        const bool has_following_rows = following.expert >= 0 && base == 0 && group_rows + following_rows <= GROUP_ROWS;
        float scales[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) scales[m] = experts[m].scale(group.expert);
        for (int begin = group.begin; begin < group.end; begin += GROUP_ROWS) {
            size_t offset = at.offset(group.expert, first);
            const bool is_last = begin + GROUP_ROWS >= group.end;
            const size_t following_offset = is_last ? at.offset(following.expert, at.team) : offset;
            const bool has_more = is_last ? has_following : first < end;
            // All warps load rows before weights: loads return in order, and the rows would wait for the weights.
            const int rows = min(GROUP_ROWS, group.end - begin);
            const auto start_pipeline = [&] {
                if (F::TEAMS == 1 && !has_begun) __syncthreads();
                if (!has_begun && (first < end || has_more))
                    pipeline.start(experts, first < end ? offset : following_offset, at);
                has_begun = has_more;
            };
            const auto multiply_tiles = [&](auto& x) {
#pragma unroll 1
                for (int tile = first; tile < end; tile += F::TEAMS) {
                    const bool is_last_tile = tile + F::TEAMS >= end;
                    const size_t after = is_last_tile ? following_offset : offset + at.stride();
                    multiply_group(pipeline, partials, experts, offset, after, !is_last_tile || has_more, x, rows, tile,
                                   buffer, at, [&](int i, int output, const float (&sums)[MATRICES]) {
                                       store(begin + i, output, sums, scales);
                                   });
                    offset = after;
                }
            };
            if constexpr (F::STATIC_K > 0) {
                if constexpr (SharedRows<F>::IS_PER_WARP) __syncwarp();
                else if (!has_rows) __syncthreads();  // the previous rows have been read
                shared_rows.fetch(has_rows ? rows : 0, has_following_rows ? rows + following_rows : rows,
                                  [&](int i) { return row(i < rows ? begin + i : following.begin + i - rows); });
                start_pipeline();
                cp_async_commit(), cp_async_wait<0>();
                if (SharedRows<F>::IS_PER_WARP && rows <= GROUP_ROWS / 2) __syncwarp();
                else __syncthreads();  // the previous partials have been read
                has_rows = false;
                SharedRow<F> x;
                x.row = shared_address(shared_rows.at) + min(base + at.g, GROUP_ROWS - 1) * SharedRows<F>::STRIDE;
                multiply_tiles(x);
            } else {
                start_pipeline();
                __syncthreads();  // the previous partials have been read
                GlobalRow<F> x;
                x.row = at.g < rows ? row(begin + at.g) : nullptr;
                multiply_tiles(x);
            }
        }
        base = has_following_rows ? group_rows : 0;
        has_rows = has_following_rows;
        range = {range.entry + 1, 0, remaining};
        group = following;
    }
}

// The down projections of a block's tiles. The epilogue ``store(i, output, y)`` gets the results of row i in sorted
// order. Returns the number of rows of all experts, read from ``offsets`` unless that is null.
//
// With ``is_early`` the prologue is speculative: before pdl_wait it loads the weights of the expert that the work list
// then names, and after it compares the entry. The load is wasted only if the previous kernel has written the list.
template <class F, class Store>
__device__ __forceinline__ int grouped_down(const Experts (&experts)[1], const bf16* h, const int* offsets,
                                            const WorkList& work, int H, int I, int repeats, int is_early,
                                            Store store) {
    __shared__ SharedRows<F> rows;
    __shared__ int all_rows;
    pdl_launch_dependents();
    const WarpPosition<F> at(H, I);
    constexpr int SLOTS = F::SLICES == 1 && F::STATIC_K > 0 ? F::STATIC_K / TILE_K : 1;
    TilePipeline<F, 1, SLOTS> pipeline;
    TileRange range{0, 0, 0};
    Group group{-1, 0, 0};
    int count = -1;
    if (is_early) {
        range = TileRange::of(work.count(), repeats, at);
        group = work.load_entry(range.entry, count);
        if (group.expert >= 0 && at.team < min(range.count, at.tiles - range.tile)) {
            pipeline.start_before_wait(experts, at.offset(group.expert, range.tile + at.team), at);
            if (at.lane == 0) prefetch_l2(experts[0].scales + group.expert);
        }
    }
    pdl_wait();
    // Both loads at once: the entry has rarely changed.
    int count_now, rest = 0;
    Group group_now = work.load_entry(range.entry, count_now);
    if (offsets && threadIdx.x == 0) rest = load_relaxed(offsets + work.E);
    const auto row = [&](int i) { return h + (size_t)i * I; };
    if (group.expert >= 0 && range.count > 0)
        rows.fetch(0, min(GROUP_ROWS, group.end - group.begin), [&](int i) { return row(group.begin + i); });
    const bool is_same = count_now == count && group_now == group;
    if (!is_same) {
        cp_async_commit(), cp_async_wait<0>();
        range = TileRange::of(count_now, repeats, at);
        group_now = work.load_entry(range.entry, count_now);
    }
    if (threadIdx.x == 0) all_rows = rest;
    const bool has_begun = is_same && group.expert >= 0 && at.team < min(range.count, at.tiles - range.tile);
    multiply_range(pipeline, has_begun, is_same, rows, experts, work, range, group_now, at, row,
                   [&](int i, int output, const float (&sums)[1], const float (&scales)[1]) {
                       store(i, output, sums[0] * scales[0]);
                   });
    __syncthreads();
    return all_rows;
}

// Writes zeros to the rows without an expert, from ``first`` to the end.
__device__ __forceinline__ void clear_from(bf16* out, int first, int S, int N) {
    const int block = blockIdx.y * gridDim.x + blockIdx.x;
    for (int row = min(max(first, 0), S) + block; row < S; row += gridDim.x * gridDim.y)
        for (int i = threadIdx.x; i < N; i += blockDim.x) out[(size_t)row * N + i] = rounded(0.0f);
}
__device__ __forceinline__ void clear_rest(bf16* out, const int* offsets, int E, int S, int N) {
    clear_from(out, load_relaxed(offsets + E), S, N);
}
