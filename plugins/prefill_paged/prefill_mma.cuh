// Causal attention of many new tokens a sequence over a paged cache, in tiles of rows, with the tensor cores. Used by
// prefill_mma.cu. sm_80 and newer.
//
//   out[r, h, :] = sum_t softmax_t(scale * q[r, h, :] . k[t, :]) * v[t, :]     t: the context up to row r
//
// A block has one sequence, one key head and 64 consecutive pairs (row, query head of that key head): pair i is row i /
// per_key, query head i % per_key. It goes over the context in tiles of 64 tokens, from the first token on. Each of its
// four warps has 16 pairs. Scores: A = q, B = k, both in shared memory. Result: A = weights, which the accumulators of
// the scores already are, B = v. A tile of v loads during the score products, the next tile of k during the result
// products. prefill_wgmma.cuh does the same with wgmma.
//
// Numerics: scores, maximum, weights and sums in FP32. A weight is rounded to BF16 for its product, after it has been
// added to the sum. The division by the sum comes last, with one rounding. A row sees only its own context, in tiles
// from the first token on. A tile that is masked for a row multiplies by 1 and adds 0. The bits of a row therefore
// depend neither on other rows nor on the division of its prompt. This holds for finite values: infinities and NaN in v
// reach earlier rows of a tile, as 0 * v. Nothing beyond the context is read. A length beyond its pages, a page outside
// the cache, or a context shorter than the rows of its sequence gives rows of zeros. Rows without a sequence are not
// written.
#pragma once
#include "async_copy.cuh"
#include "mma.cuh"
#include "split_kv.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

// The sizes of a block and its shared memory: q [ROWS][D], k and v [TOKENS][D], and the state of the epilogue.
template <int D_>
struct MmaConfig {
    static constexpr int D = D_, VECS = D / 8, ROW_BYTES = 2 * D;
    static constexpr int K = ROWS * ROW_BYTES, V = K + TOKENS * ROW_BYTES, EPILOGUE = V + TOKENS * ROW_BYTES;
    static constexpr int SHARED_BYTES = EPILOGUE + sizeof(EpilogueState);
    static_assert(D % 64 == 0);

    // The swizzle: the offset of 16 bytes of a row. The eight rows of an ldmatrix lie in different banks.
    template <int COUNT>
    static __device__ __forceinline__ u32 swizzled(int row, int vec) {
        return row * ROW_BYTES + ((vec ^ (row & 7)) << 4);
    }
};

// s = q k^T: 16 pairs, whose rows of q start at ``q``, times the tokens of the tile ``k``.
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

// o += weights v, for the tile ``v``.
template <class T>
__device__ __forceinline__ void add(float (&o)[T::D / 2], const float (&weights)[TOKENS / 2], u32 v, int lane) {
    const u32 v_row = v + (lane & 15) * T::ROW_BYTES;
#pragma unroll
    for (int step = 0; step < TOKENS / 16; ++step) {
        u32 a[4];
        as_a_operand(a, weights, step);
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
__device__ __forceinline__ void attend_mma(const PrefillParams& params) {
    extern __shared__ __align__(1024) char memory[];
    EpilogueState& epilogue = *reinterpret_cast<EpilogueState*>(memory + T::EPILOGUE);
    const TileCoord tile_coord(params);
    if (tile_coord.is_empty()) return;  // the whole block
    const KvSplit<true> split(tile_coord);
    if (!split.exists) return;  // the whole block

    // Stage 1, prologue: queries, and the first tile of k.
    const u32 shared = shared_address(memory), k = shared + T::K, v = shared + T::V;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, lane_pair = warp * 16 + (lane >> 2);
    if (threadIdx.x == 0) epilogue = {tile_coord.room(), split.from, split.is_whole};
    const uint4* const k_head = reinterpret_cast<const uint4*>(params.k_cache) + tile_coord.key_head * T::VECS;
    const uint4* const v_head = reinterpret_cast<const uint4*>(params.v_cache) + tile_coord.key_head * T::VECS;
    const RowOffsets pairs = tile_coord.pair_offsets(warp, lane, T::VECS);
    fetch<T, ROWS>(shared, reinterpret_cast<const uint4*>(params.q), pairs, warp, lane);
    PagedTokens<T> pages(tile_coord, split.from, split.end);
    RowOffsets offsets = pages.of_tile(0, warp, lane);
    fetch<T, TOKENS>(k, k_head, offsets, warp, lane);
    cp_async_commit();
    const int length[2] = {tile_coord.length(lane_pair) - split.from, tile_coord.length(lane_pair + 8) - split.from};
    const int shortest = tile_coord.length(warp * 16) - split.from;
    Softmax softmax;
    float o[T::D / 2] = {};

    // Stage 2, mainloop: tile after tile.
    const int tokens = split.end - split.from;
#pragma unroll 1
    for (int first = 0; first < tokens; first += TOKENS) {
        cp_async_wait<0>();
        __syncthreads();  // k has arrived; the v before it has been read
        fetch<T, TOKENS>(v, v_head, offsets, warp, lane);
        cp_async_commit();
        offsets = pages.of_tile(first + TOKENS, warp, lane);
        float s[TOKENS / 2];
        score<T>(s, shared + warp * 16 * T::ROW_BYTES, k, lane);
        scale_scores(s, params.scale);
        if (first + TOKENS > shortest) apply_mask(s, first + 2 * (lane & 3), length);
#pragma unroll
        for (int i = 0; i < 2; ++i) softmax.weigh(s, i, Softmax::top(s, i));
        cp_async_wait<0>();
        __syncthreads();  // v has arrived; k has been read
        fetch<T, TOKENS>(k, k_head, offsets, warp, lane);
        cp_async_commit();
        if (!__all_sync(ALL_LANES, softmax.is_unscaled())) {
#pragma unroll
            for (int i = 0; i < T::D / 2; ++i) o[i] = __fmul_rn(o[i], softmax.alpha[i >> 1 & 1]);
        }
        add<T>(o, s, v, lane);
    }

    // Stage 3, epilogue: the results go to the place of q, and from there to global memory.
    pdl_launch_dependents();  // earlier, the next kernel's blocks would fill multiprocessors unevenly and wait
    softmax.finish();
    cp_async_wait<0>();
    __syncthreads();
    if (pages.bad < MAX_TOKENS) atomicMin(&epilogue.first_bad, pages.bad);
    __syncthreads();
    store_results<T, true>(params, pairs, length, epilogue, shared, softmax, o);
}
