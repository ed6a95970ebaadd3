// Grouped experts: the rows of each expert, which stand together in sorted order, by its weights, which are read from memory
// once a launch: for more than eight rows of one expert they come again from L2.
//
// A block has some tiles of one expert: that of its place in the work list, which the sort makes, so that the host needs no
// counts. Grid: (tiles / tiles a block, min(E, S)); blocks whose place is empty end at once. Blocks are small, so that some
// stream while others begin. Where K is known, the rows of x go to shared memory once for all tiles of a block: read from L2
// as they are needed, they took a third of the time.
//
// The list is clamped to the E experts and S rows. A slot outside 0 .. S - 1 reads a row of zeros.
#pragma once
#include "experts.cuh"

constexpr int GROUPED_WARPS = 4;
// So many blocks of four warps that registers suffice.
#define GROUPED_BOUNDS(STATIC_K) __launch_bounds__(GROUPED_WARPS * 32, STATIC_K > 0 ? 5 : 4)

struct Group {
    int expert, begin, end;  // expert -1 if there is none

    __device__ __forceinline__ bool operator==(const Group& other) const {
        return expert == other.expert && begin == other.begin && end == other.end;
    }
};

// The group at a place of the work list [E][4]: expert, first row, end of its rows.
__device__ __forceinline__ Group group_at(const int* work, int place, int E, int S) {
    int expert, begin, end;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%3];\n\tld.relaxed.gpu.global.s32 %1, [%3+4];\n\tld.relaxed.gpu.global.s32 %2, [%3+8];"
                 : "=r"(expert), "=r"(begin), "=r"(end) : "l"(work + 4 * place) : "memory");
    begin = min(max(begin, 0), S), end = min(max(end, 0), S);
    return {(u32)expert < (u32)E && begin < end ? expert : -1, begin, end};
}

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

// Multiplies the rows of a group by a block's tiles: ``repeats`` for each of its teams, TEAMS apart. ``row(i)`` is row i of x in
// sorted order, ``store(i, output, sums)`` takes what comes of it. The first tile may have ``begun``.
template <class F, int MATRICES, class Source, class Store>
__device__ __forceinline__ void multiply_group(Stream<F, MATRICES, 1>& stream, bool has_begun,
                                               const Experts (&experts)[MATRICES], const Group& group, int repeats,
                                               const Place<F>& at, Source row, Store store) {
    __shared__ Exchange<F, MATRICES> exchange;
    __shared__ Rows<F> shared_rows;
    const int first = blockIdx.x * F::TEAMS * repeats + at.team, end = min(first + F::TEAMS * repeats, at.tiles);
    for (int begin = group.begin; begin < group.end; begin += GROUP_ROWS) {
        size_t offset = at.offset(group.expert, first);
        if (!has_begun && first < end) stream.start(experts, offset, at);
        has_begun = false;
        const int rows = min(GROUP_ROWS, group.end - begin);
        const auto multiply_tiles = [&](auto& x) {
#pragma unroll 1
            for (int tile = first; tile < end; tile += F::TEAMS, offset += at.stride())
                multiply_rows(stream, exchange, experts, offset, offset + at.stride(), tile + F::TEAMS < end, x, rows, tile,
                              at, [&](int i, int output, const float (&sums)[MATRICES]) { store(begin + i, output, sums); });
        };
        if constexpr (F::STATIC_K > 0) {
            shared_rows.fill(rows, [&](int i) { return row(begin + i); });
            SharedRow<F> x;
            x.row = (u32)__cvta_generic_to_shared(shared_rows.at) + at.g * Rows<F>::STRIDE;
            x.is_there = at.g < rows;
            multiply_tiles(x);
        } else {
            GlobalRow<F> x;
            x.row = at.g < rows ? row(begin + at.g) : nullptr;
            multiply_tiles(x);
        }
    }
}

// The down projections of a block's tiles; ``store(i, output, y)`` takes the results of row i in sorted order.
//
// The first ``early_blocks`` begin before the launch ahead of them has ended: they load the weights of the expert that the
// list names by then, and look again once it has ended. Only where it wrote the list itself was that in vain. Later blocks
// have no room before that launch has ended.
template <class F, class Store>
__device__ __forceinline__ void grouped_down(const Experts (&experts)[1], const bf16* h, const int* work, int E, int S, int H,
                                             int I, int repeats, int early_blocks, Store store) {
    allow_next_launch();
    const Place<F> at(H, I);
    const int first = blockIdx.x * F::TEAMS * repeats + at.team;
    Stream<F, 1, 1> stream;
    int early = -1;
    if (blockIdx.y * gridDim.x + blockIdx.x < early_blocks) {
        early = group_at(work, blockIdx.y, E, S).expert;
        if (early >= 0 && first < at.tiles) stream.start(experts, at.offset(early, first), at);
    }
    wait_for_previous_launch();
    const Group group = group_at(work, blockIdx.y, E, S);
    if (group.expert < 0) return;
    const float scale = experts[0].scale(group.expert);
    multiply_group(
        stream, group.expert == early, experts, group, repeats, at, [&](int i) { return h + (size_t)i * I; },
        [&](int i, int output, const float (&sums)[1]) { store(i, output, sums[0] * scale); });
}
