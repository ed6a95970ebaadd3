// The prefill of prefill_mma.cuh with wgmma, for sm_90a. Used by prefill_hopper.cu. The loop is the same, and so is the
// independence of a row's bits, but the bits differ. A block is one warpgroup.
//
//   scores    A = q, B = k, both in shared memory               wgmma m64n64k16
//   result    A = weights in registers, B = v, transposed       wgmma m64nDk16
//
// The result product of one tile runs during the softmax of the next. With two stages, the next tile of k and the last
// of v load during the products. With one stage, each loads as soon as its buffer is free.
//
// Alternatives on an H200 (heads 16/2 of 256; 2048 rows, 8192 rows, 2048 after 8192; us):
//   this                                                       78, 1027, 581
//   two warpgroups a block, two stages                         82, 1117, 602
//   two warpgroups a block, one stage                          88, 1112, 651
//   the same, ping-pong with named barriers                    84, 1132, 607
//   result product before the next scores                      86, 1208, 654
//   mma.sync (prefill_mma.cuh)                                 127, 1838, 1025
// In another run:
//   this                                                       74, 1006, 558
//   separate waits for k and v, one more barrier               76, 1067, 572 (with few blocks 7% faster)
// In another run (2048 rows, 8192 rows):
//   this                                                       76, 994
//   scale multiplied in the exponent                           76, 1014
//
// In shared memory, rows are divided into panels of 64 values (128 bytes), each [rows][64] with the 128-byte swizzle.
// Copies are cp.async, because pages have any size. A proxy fence makes them visible to wgmma.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "split_kv.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

// The sizes of a block and its shared memory: q, k of each stage, v of each stage, and the state of the epilogue.
template <int D_, int STAGES_>
struct WgmmaConfig {
    static constexpr int D = D_, VECS = D / 8, STAGES = STAGES_, PANEL_ROW_BYTES = 128, TILE_BYTES = TOKENS * 2 * D;
    static constexpr int K = ROWS * 2 * D, V = K + STAGES * TILE_BYTES, EPILOGUE = V + STAGES * TILE_BYTES;
    static constexpr int SHARED_BYTES = EPILOGUE + sizeof(EpilogueState);
    static_assert(D % 64 == 0 && (STAGES == 1 || STAGES == 2));

    // The offset of 16 bytes of a row in a tile of COUNT rows.
    template <int COUNT>
    static __device__ __forceinline__ u32 swizzled(int row, int vec) {
        return (vec >> 3) * COUNT * PANEL_ROW_BYTES + row * PANEL_ROW_BYTES + (((vec & 7) ^ (row & 7)) << 4);
    }
};

// s = q k^T, and o += weights v, each as one wgmma group.
template <class T>
__device__ __forceinline__ void start_scores(float (&s)[TOKENS / 2], u32 q, u32 k) {
    constexpr int Q_PANEL = ROWS * T::PANEL_ROW_BYTES, K_PANEL = TOKENS * T::PANEL_ROW_BYTES;
#pragma unroll
    for (int step = 0; step < T::D / 16; ++step) {
        const int panel = step / 4, bytes = step % 4 * 32;
        wgmma_m64n64k16(s, wgmma_descriptor(q) + ((panel * Q_PANEL + bytes) >> 4),
                        wgmma_descriptor(k) + ((panel * K_PANEL + bytes) >> 4), step > 0);
    }
    wgmma_commit();
}
template <class T>
__device__ __forceinline__ void start_result(float (&o)[T::D / 2], const u32 (&weights)[TOKENS / 16][4], u32 v) {
    const u64 first = wgmma_descriptor_transposed(v, TOKENS * T::PANEL_ROW_BYTES);
#pragma unroll
    for (int step = 0; step < TOKENS / 16; ++step)
        wgmma_b_transposed(o, weights[step], first + (step * 16 * T::PANEL_ROW_BYTES >> 4));
    wgmma_commit();
}

template <class T, bool SPLIT_KV>
__device__ __forceinline__ void attend_wgmma(const PrefillParams& params) {
    extern __shared__ __align__(1024) char memory[];
    EpilogueState& epilogue = *reinterpret_cast<EpilogueState*>(memory + T::EPILOGUE);
    const TileCoord tile_coord(params);
    if (tile_coord.is_empty()) return;  // the whole block
    const KvSplit<SPLIT_KV> split(tile_coord);
    if (!split.exists) return;  // the whole block

    // Stage 1, prologue: queries, and the first tile of k.
    const u32 shared = shared_address(memory), k = shared + T::K, v = shared + T::V;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, lane_pair = warp * 16 + (lane >> 2);
    const int tiles = (split.end - split.from + TOKENS - 1) / TOKENS;
    if (threadIdx.x == 0) epilogue = {tile_coord.room(), split.from, split.is_whole};
    const uint4* const k_head = reinterpret_cast<const uint4*>(params.k_cache) + tile_coord.key_head * T::VECS;
    const uint4* const v_head = reinterpret_cast<const uint4*>(params.v_cache) + tile_coord.key_head * T::VECS;
    const RowOffsets pairs = tile_coord.pair_offsets(warp, lane, T::VECS);
    fetch<T, ROWS>(shared, reinterpret_cast<const uint4*>(params.q), pairs, warp, lane);
    PagedTokens<T> pages(tile_coord, split.from, split.end);
    RowOffsets offsets = pages.of_tile(0, warp, lane);
    fetch<T, TOKENS>(k, k_head, offsets, warp, lane);
    cp_async_commit();
    RowOffsets next = pages.of_tile(TOKENS, warp, lane);
    const int length[2] = {tile_coord.length(lane_pair) - split.from, tile_coord.length(lane_pair + 8) - split.from};
    const int shortest = tile_coord.length(warp * 16) - split.from;
    Softmax softmax;
    u32 weights[TOKENS / 16][4] = {};
    float o[T::D / 2] = {};

    // Stage 2, mainloop: tile after tile.
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = T::STAGES == 2 ? (tile & 1) * T::TILE_BYTES : 0,
                  other = T::STAGES == 2 ? T::TILE_BYTES - stage : 0;
        cp_async_wait<0>();
        fence_proxy_async();
        __syncthreads();  // this k and the last v have arrived; those before them have been read
        if (T::STAGES == 2) {
            fetch<T, TOKENS>(v + stage, v_head, offsets, warp, lane);
            fetch<T, TOKENS>(k + other, k_head, next, warp, lane);
            cp_async_commit();
        }
        float s[TOKENS / 2];
        wgmma_fence();
        start_scores<T>(s, shared, k + stage);
        if (tile > 0) {
            start_result<T>(o, weights, v + other);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        wgmma_fence_operand(s);
        if (T::STAGES == 1) {
            __syncthreads();  // k has been read
            fetch<T, TOKENS>(k, k_head, next, warp, lane);
        }
        scale_scores(s, params.scale);
        const int first = tile * TOKENS;
        if (first + TOKENS > shortest) apply_mask(s, first + 2 * (lane & 3), length);
#pragma unroll
        for (int i = 0; i < 2; ++i) softmax.weigh(s, i, Softmax::top(s, i));
        wgmma_wait<0>();
        wgmma_fence_operand(o);
        wgmma_fence_operand(weights);
        if (T::STAGES == 1) {
            __syncthreads();  // v has been read
            fetch<T, TOKENS>(v, v_head, offsets, warp, lane);
            cp_async_commit();
        }
        offsets = next;
        next = pages.of_tile(first + 2 * TOKENS, warp, lane);
#pragma unroll
        for (int step = 0; step < TOKENS / 16; ++step) as_a_operand(weights[step], s, step);
        if (!__all_sync(ALL_LANES, softmax.is_unscaled())) {
#pragma unroll
            for (int i = 0; i < T::D / 2; ++i) o[i] = __fmul_rn(o[i], softmax.alpha[i >> 1 & 1]);
        }
    }
    cp_async_wait<0>();
    fence_proxy_async();
    __syncthreads();
    if (tiles > 0) {
        wgmma_fence();
        start_result<T>(o, weights, v + (T::STAGES == 2 ? (tiles - 1 & 1) * T::TILE_BYTES : 0));
        wgmma_wait<0>();
        wgmma_fence_operand(o);
    }

    // Stage 3, epilogue: the results go to the place of q, and from there to global memory.
    pdl_launch_dependents();  // earlier, the next kernel's blocks would fill multiprocessors unevenly and wait
    softmax.finish();
    if (pages.bad < MAX_TOKENS) atomicMin(&epilogue.first_bad, pages.bad);
    __syncthreads();
    store_results<T, SPLIT_KV>(params, pairs, length, epilogue, shared, softmax, o);
}
