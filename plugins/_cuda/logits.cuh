// One row of BF16 logits for a team of blocks: 8 that form a cluster from sm_90 on, one block below.
//
// A single block reads a row of a large vocabulary (half a megabyte) at the rate of one multiprocessor. The blocks of a
// cluster read an eighth each and meet in shared memory; two fit on a multiprocessor, or 16 rows would not run at once.
#pragma once
#include "bf16.cuh"
#include "cluster.cuh"

#if __CUDA_ARCH__ >= 900
constexpr int TEAM = 8;
#define TEAM_BOUNDS(THREADS) __cluster_dims__(TEAM, 1, 1) __launch_bounds__(THREADS, 2)
#else
constexpr int TEAM = 1;
#define TEAM_BOUNDS(THREADS) __launch_bounds__(THREADS, 1)
#endif

__device__ __forceinline__ u32 team_rank() {
#if __CUDA_ARCH__ >= 900
    return cluster_rank();
#else
    return 0;
#endif
}

// A word of another block's shared memory: bits travel as a float.
__device__ __forceinline__ u32 word_of_rank(const u32* p, u32 rank) {
    return __float_as_uint(load_from_rank(reinterpret_cast<const float*>(p), rank));
}

// As for_each_logit, for rows of so many pieces of WIDTH. PARALLEL loads are in flight. AT_ONCE of them are visited in code
// of their own, then the others move up: what is long would be four times as much to compile, and to fetch.
template <int WIDTH, int AT_ONCE, int THREADS, class Visit>
__device__ __forceinline__ void for_each_of_pieces(const bf16* row, int pieces, u32 rank, Visit visit) {
    constexpr int PARALLEL = 4;
    const int share = (pieces + TEAM - 1) / TEAM;
    const int begin = min((int)rank * share, pieces), end = min(begin + share, pieces);
    for (int first = begin + threadIdx.x; first < end; first += PARALLEL * THREADS) {
        Raw<WIDTH> raw[PARALLEL];
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i)
            if (first + i * THREADS < end) raw[i] = load_raw<WIDTH>(row, first + i * THREADS);
#pragma unroll 1
        for (int at = first; at < min(end, first + PARALLEL * THREADS); at += AT_ONCE * THREADS) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (i > 0 && at + i * THREADS >= end) continue;
                const unsigned short* bits = reinterpret_cast<const unsigned short*>(&raw[i]);
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) visit((at + i * THREADS) * WIDTH + e, (u32)bits[e]);
            }
#pragma unroll
            for (int i = AT_ONCE; i < PARALLEL; ++i) raw[i - AT_ONCE] = raw[i];
        }
    }
}

// Calls ``visit(index, bits)`` for this block's share of a row, each thread in rising order of index. A row whose length
// is a multiple of 8 begins at a multiple of 16 bytes. A short visit may be in the code 4 times as often, AT_ONCE.
template <int THREADS, int AT_ONCE = 1, class Visit>
__device__ __forceinline__ void for_each_logit(const bf16* row, int V, u32 rank, Visit visit) {
    if (V % 8 == 0)
        for_each_of_pieces<8, AT_ONCE, THREADS>(row, V / 8, rank, visit);
    else
        for_each_of_pieces<1, AT_ONCE, THREADS>(row, V, rank, visit);
}

// The largest logit, of equal ones that of the lowest index. NaN is no number: it is passed over.
struct Best {
    float value;
    int index;
};
constexpr int NOWHERE = 0x7FFFFFFF;
__device__ __forceinline__ Best no_best() { return {__int_as_float(0xFF800000), NOWHERE}; }

// The best of a warp's, in all of its lanes. Both zeros are one value.
__device__ __forceinline__ Best best_of_warp(const Best& own) {
    const u32 bits = __float_as_uint(own.value + 0.0f), order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    const u32 top = __reduce_max_sync(0xFFFFFFFFu, order);
    const u32 index = __reduce_min_sync(0xFFFFFFFFu, order == top ? (u32)own.index : (u32)NOWHERE);
    return {__uint_as_float(top & 0x80000000u ? top & 0x7FFFFFFFu : ~top), (int)index};
}

// The best of the whole row, in every thread of every block. ``shared`` is for this alone, and stays in use until the
// next cluster barrier; it then holds the best of every warp, and the block's last. A row without a number above -infinity
// has its best at index 0.
template <int THREADS>
__device__ __forceinline__ Best best_of_row(const bf16* row, int V, u32 rank, Best (&shared)[THREADS / 32 + 1]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Best best = no_best();
    for_each_logit<THREADS, 4>(row, V, rank, [&](int index, u32 bits) {
        const float value = __uint_as_float(bits << 16);
        if (value > best.value) best = {value, index};
    });
    best = best_of_warp(best);
    if (lane == 0) shared[warp] = best;
    __syncthreads();
    if (warp == 0) {
        best = best_of_warp(lane < THREADS / 32 ? shared[lane] : no_best());
        if (lane == 0) shared[THREADS / 32] = best;
    }
    cluster_barrier();
    const Best& place = shared[THREADS / 32];
    best = no_best();
    if (lane < TEAM)  // a lane for each block
        best = {load_from_rank(&place.value, lane), (int)word_of_rank(reinterpret_cast<const u32*>(&place.index), lane)};
    best = best_of_warp(best);
    return {best.value, best.index == NOWHERE ? 0 : best.index};
}
