// One row of BF16 logits for a team of blocks: 8 that form a cluster from sm_90 on, one block below.
//
// A single block reads a row of a large vocabulary (half a megabyte) at the rate of one multiprocessor. The blocks of a
// cluster read an eighth each and meet in shared memory; four fit on a multiprocessor, or 16 rows would not run at once.
#pragma once
#include "bf16.cuh"
#include "cluster.cuh"

#if __CUDA_ARCH__ >= 900
constexpr int TEAM = 8;
#define TEAM_BOUNDS(THREADS) __cluster_dims__(TEAM, 1, 1) __launch_bounds__(THREADS, 4)
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

// A row is read in pieces of 8 logits, or of one where its length is no multiple of 8: then it begins at any even address.
// One code serves both.
__device__ __forceinline__ int piece_width(int V) { return V % 8 == 0 ? 8 : 1; }

// What is no logit is NaN.
__device__ __forceinline__ uint4 load_piece(const bf16* row, int width, int piece, bool exists) {
    uint4 raw = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (exists && width == 8) raw = reinterpret_cast<const uint4*>(row)[piece];
    if (exists && width == 1) raw.x = 0xFFFF0000u | reinterpret_cast<const unsigned short*>(row)[piece];
    return raw;
}

constexpr int PARALLEL = 4;  // loads of a thread that are on their way together

// Calls ``visit(index, bits)`` for this block's share of a row, each thread in rising order of index. The visit is in the
// code once: what is long would be eight times as much to compile, and to fetch.
template <int THREADS, class Visit>
__device__ __forceinline__ void for_each_logit(const bf16* row, int V, u32 rank, Visit visit) {
    const int width = piece_width(V), pieces = V / width, share = (pieces + TEAM - 1) / TEAM;
    const int begin = min((int)rank * share, pieces), end = min(begin + share, pieces);
#pragma unroll 1
    for (int first = begin + threadIdx.x; first < end; first += PARALLEL * THREADS) {
        uint4 raw[PARALLEL];
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) raw[i] = load_piece(row, width, first + i * THREADS, first + i * THREADS < end);
#pragma unroll 1
        for (int at = first; at < min(end, first + PARALLEL * THREADS); at += THREADS) {
            uint4 rest = raw[0];
#pragma unroll 1
            for (int e = 0; e < width; ++e) {
                visit(at * width + e, rest.x & 0xFFFFu);
                rest.x = __funnelshift_r(rest.x, rest.y, 16), rest.y = __funnelshift_r(rest.y, rest.z, 16);
                rest.z = __funnelshift_r(rest.z, rest.w, 16), rest.w >>= 16;
            }
#pragma unroll
            for (int i = 1; i < PARALLEL; ++i) raw[i - 1] = raw[i];
        }
    }
}
