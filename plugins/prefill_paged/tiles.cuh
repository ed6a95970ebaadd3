// Causal attention of many new tokens a sequence over a paged cache, in tiles of rows, by the tensor cores.
//
//   out[r, h, :] = sum_t softmax_t(scale * q[r, h, :] . k[t, :]) * v[t, :]     t: the context up to row r
//
// A block has one sequence, one key head and 64 of the pairs (row, query head of that key head), which lie one after the
// other: pair i is row i / per_key, query head i % per_key. It walks over the context in tiles of 64 tokens, from the first
// token on; each of its four warps has 16 pairs. Scores are A = q, B = k, both in shared memory; the result is A = weights,
// which the scores' accumulators become without an exchange, B = v. A tile of v loads while scores are multiplied, the next
// tile of k while the result is. tiles_hopper.cuh has the same for wgmma.
//
// Numerics: scores, largest score, weights and sums in FP32; a weight is rounded to BF16 for its product, after the sum
// took it; the sum is divided out at the end, with one rounding. All that a row sees is its own context in tiles from the
// first token on, and a tile in which it sees nothing multiplies by 1 and adds 0: its bits depend on no other row, nor on
// where its prompt was cut. (Of numbers, that is: infinities and NaN in v reach rows before them in a tile, as 0 * v.)
// What lies beyond the context is not read. A length outside its pages, a page outside the cache, or a context shorter
// than the rows of its sequence gives rows of zeros; a row that no sequence has is not written.
#pragma once
#include "async_copy.cuh"
#include "mma.cuh"
#include "parts.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

// Sizes of a block, and its shared memory: q [ROWS][D], k and v [TOKENS][D], and what is kept for the end.
template <int D_>
struct Shape {
    static constexpr int D = D_, PIECES = D / 8, ROW_BYTES = 2 * D;
    static constexpr int K = ROWS * ROW_BYTES, V = K + TOKENS * ROW_BYTES, KEPT = V + TOKENS * ROW_BYTES;
    static constexpr int SHARED_BYTES = KEPT + sizeof(Kept);
    static_assert(D % 64 == 0);

    // Where 16 bytes of a row lie: twisted so that the eight rows that an ldmatrix reads lie in different banks.
    template <int COUNT>
    static __device__ __forceinline__ u32 piece_at(int row, int piece) {
        return row * ROW_BYTES + ((piece ^ (row & 7)) << 4);
    }
};

// --- device functions ---

// s = q k^T: 16 pairs whose rows of q begin at ``q``, the tokens of the tile of k at ``k``.
template <class T>
__device__ __forceinline__ void score(float (&s)[TOKENS / 2], u32 q, u32 k, int lane) {
    const u32 q_row = q + (lane & 15) * T::ROW_BYTES, k_row = k + ((lane >> 4) * 8 + (lane & 7)) * T::ROW_BYTES;
    const int q_half = lane >> 4, k_half = lane >> 3 & 1;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) s[i] = 0.0f;
#pragma unroll
    for (int step = 0; step < T::D / 16; ++step) {
        u32 a[4];
        ldmatrix_x4(a, q_row + (((2 * step + q_half) ^ (lane & 7)) << 4));
#pragma unroll
        for (int t = 0; t < TOKENS / 8; t += 2) {
            u32 b[4];
            ldmatrix_x4(b, k_row + t * 8 * T::ROW_BYTES + (((2 * step + k_half) ^ (lane & 7)) << 4));
            mma_16x8x16(s + 4 * t, a, b[0], b[1]);
            mma_16x8x16(s + 4 * t + 4, a, b[2], b[3]);
        }
    }
}

// o += weights v, over the tile of v at ``v``.
template <class T>
__device__ __forceinline__ void add(float (&o)[T::D / 2], const float (&weights)[TOKENS / 2], u32 v, int lane) {
    const u32 v_row = v + (lane & 15) * T::ROW_BYTES;
#pragma unroll
    for (int step = 0; step < TOKENS / 16; ++step) {
        u32 a[4];
        as_operand(a, weights, step);
#pragma unroll
        for (int c = 0; c < T::D / 8; c += 2) {
            u32 b[4];
            ldmatrix_x4_trans(b, v_row + step * 16 * T::ROW_BYTES + (((c + (lane >> 4)) ^ (lane & 7)) << 4));
            mma_16x8x16(o + 4 * c, a, b[0], b[1]);
            mma_16x8x16(o + 4 * c + 4, a, b[2], b[3]);
        }
    }
}

template <class T>
__device__ __forceinline__ void attend(const Prompts& given) {
    extern __shared__ __align__(1024) char memory[];
    Kept& kept = *reinterpret_cast<Kept*>(memory + T::KEPT);
    const Block block(given);
    if (block.is_empty()) return;  // the whole block
    const Part<true> part(block);
    if (!part.is_there) return;  // the whole block

    // Stage 1: queries, and the first tile of k.
    const u32 shared = shared_address(memory), k = shared + T::K, v = shared + T::V;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, own_pair = warp * 16 + (lane >> 2);
    if (threadIdx.x == 0) kept = {block.room(), part.from, part.is_whole};
    const uint4* const k_head = reinterpret_cast<const uint4*>(given.k_cache) + block.key_head * T::PIECES;
    const uint4* const v_head = reinterpret_cast<const uint4*>(given.v_cache) + block.key_head * T::PIECES;
    const Places pairs = block.pair_places(warp, lane, T::PIECES);
    fetch<T, ROWS>(shared, reinterpret_cast<const uint4*>(given.q), pairs, warp, lane);
    Pages<T> pages(block, part.from, part.end);
    Places places = pages.of_tile(0, warp, lane);
    fetch<T, TOKENS>(k, k_head, places, warp, lane);
    cp_async_commit();
    const int length[2] = {block.length(own_pair) - part.from, block.length(own_pair + 8) - part.from};
    const int shortest = block.length(warp * 16) - part.from;
    Softmax softmax;
    float o[T::D / 2] = {};

    // Stage 2: tile after tile.
    const int tokens = part.end - part.from;
#pragma unroll 1
    for (int first = 0; first < tokens; first += TOKENS) {
        cp_async_wait<0>();
        __syncthreads();  // the tile of k is there; that of v before it has been read
        fetch<T, TOKENS>(v, v_head, places, warp, lane);
        cp_async_commit();
        places = pages.of_tile(first + TOKENS, warp, lane);
        float s[TOKENS / 2];
        score<T>(s, shared + warp * 16 * T::ROW_BYTES, k, lane);
        scale_scores(s, given.scale);
        if (first + TOKENS > shortest) hide(s, first + 2 * (lane & 3), length);
#pragma unroll
        for (int i = 0; i < 2; ++i) softmax.weigh(s, i, Softmax::top(s, i));
        cp_async_wait<0>();
        __syncthreads();  // the tile of v is there; that of k has been read
        fetch<T, TOKENS>(k, k_head, places, warp, lane);
        cp_async_commit();
        if (!__all_sync(ALL_LANES, softmax.keeps_all())) {
#pragma unroll
            for (int i = 0; i < T::D / 2; ++i) o[i] = __fmul_rn(o[i], softmax.keep[i >> 1 & 1]);
        }
        add<T>(o, s, v, lane);
    }

    // Stage 3: the results, to where q was, and from there.
    pdl_launch_dependents();  // no earlier: its blocks would stand beside those of this one unevenly, and wait
    softmax.finish();
    cp_async_wait<0>();
    __syncthreads();
    if (pages.bad < MAX_TOKENS) atomicMin(&kept.first_bad, pages.bad);
    __syncthreads();
    bring_out_results<T, true>(given, pairs, length, kept, shared, softmax, o);
}
