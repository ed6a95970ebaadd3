// The tiles of tiles.cuh by wgmma, for sm_90a: the same walk, with the same promise about the bits of a row (they are others
// than those of tiles.cuh), a block being one warpgroup.
//
//   scores    A = q, B = k, both in shared memory               wgmma m64n64k16
//   result    A = weights in registers, B = v, read transposed  wgmma m64nDk16
//
// The weights of one tile are multiplied while the scores of the next become weights. With two stages a tile of k and the
// one of v before it load while those before them are multiplied; with one, each as soon as its place is free.
//
// Tried on an H200 (heads 16/2 of 256; 2048 rows, 8192 rows, 2048 after 8192; us): this 78, 1027, 581. Two warpgroups a
// block, with two stages: 82, 1117, 602; one stage: 88, 1112, 651. These in turns by named barriers: 84, 1132, 607. Weights
// multiplied before the next scores: 86, 1208, 654. By mma.sync (tiles.cuh): 127, 1838, 1025. In another run, this 74, 1006,
// 558: a wait for v apart from that for k, with one more barrier, 76, 1067, 572 (but 7% less where few blocks are there).
// The scale multiplied where the exponent is made: 76, 1014 against 76, 994.
//
// In shared memory rows are cut into panels of 64 values (128 bytes), one after the other, each [rows][64] and swizzled in
// 128 bytes. Copies are cp.async, as pages have any size; a fence hands them over to wgmma.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "parts.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

// Sizes of a block, and its shared memory: q; of each stage k, of each stage v; and what is kept for the end.
template <int D_, int STAGES_>
struct HopperShape {
    static constexpr int D = D_, PIECES = D / 8, STAGES = STAGES_, PANEL_ROW_BYTES = 128, TILE_BYTES = TOKENS * 2 * D;
    static constexpr int K = ROWS * 2 * D, V = K + STAGES * TILE_BYTES, KEPT = V + STAGES * TILE_BYTES;
    static constexpr int SHARED_BYTES = KEPT + sizeof(Kept);
    static_assert(D % 64 == 0 && (STAGES == 1 || STAGES == 2));

    // Where 16 bytes of a row lie in a tile of COUNT rows.
    template <int COUNT>
    static __device__ __forceinline__ u32 piece_at(int row, int piece) {
        return (piece >> 3) * COUNT * PANEL_ROW_BYTES + row * PANEL_ROW_BYTES + (((piece & 7) ^ (row & 7)) << 4);
    }
};

// --- instruction wrappers (PTX ISA 8.0) ---

// v as B operand: rows are tokens, so that what is contiguous is N. 8 tokens are 1024 bytes, 64 columns a panel.
__device__ __forceinline__ u64 transposed_operand(u32 address, u32 panel_bytes) {
    constexpr u64 SWIZZLE_128B = 1ull << 62, EIGHT_ROWS = (1024ull >> 4) << 32;
    return SWIZZLE_128B | EIGHT_ROWS | (u64)(panel_bytes >> 4) << 16 | (address >> 4);
}

__device__ __forceinline__ void wgmma_scores(float (&d)[32], u64 a, u64 b, u32 accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" D0 ", " D1 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                 : R32(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void wgmma_result(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" D0 ", " D1 ", " D2 ", " D3
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : R64(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_result(float (&d)[128], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" D0 ", " D1 ", " D2 ", " D3 ", " D4 ", " D5
                 ", " D6 ", " D7 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : R64(d, 0), R64(d, 64) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// --- device functions ---

// s = q k^T, and o += weights v, as one group of wgmma each.
template <class T>
__device__ __forceinline__ void start_scores(float (&s)[TOKENS / 2], u32 q, u32 k) {
    constexpr int Q_PANEL = ROWS * T::PANEL_ROW_BYTES, K_PANEL = TOKENS * T::PANEL_ROW_BYTES;
#pragma unroll
    for (int step = 0; step < T::D / 16; ++step) {
        const int panel = step / 4, bytes = step % 4 * 32;
        wgmma_scores(s, wgmma_descriptor(q) + ((panel * Q_PANEL + bytes) >> 4), wgmma_descriptor(k) + ((panel * K_PANEL + bytes) >> 4), step > 0);
    }
    wgmma_commit();
}
template <class T>
__device__ __forceinline__ void start_result(float (&o)[T::D / 2], const u32 (&weights)[TOKENS / 16][4], u32 v) {
    const u64 first = transposed_operand(v, TOKENS * T::PANEL_ROW_BYTES);
#pragma unroll
    for (int step = 0; step < TOKENS / 16; ++step)
        wgmma_result(o, weights[step], first + (step * 16 * T::PANEL_ROW_BYTES >> 4));
    wgmma_commit();
}

template <class T, bool IN_PARTS>
__device__ __forceinline__ void attend_hopper(const Prompts& given) {
    extern __shared__ __align__(1024) char memory[];
    Kept& kept = *reinterpret_cast<Kept*>(memory + T::KEPT);
    const Block block(given);
    if (block.is_empty()) return;  // the whole block
    const Part<IN_PARTS> part(block);
    if (!part.is_there) return;  // the whole block

    // Stage 1: queries, and the first tile of k.
    const u32 shared = shared_address(memory), k = shared + T::K, v = shared + T::V;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, own_pair = warp * 16 + (lane >> 2);
    const int tiles = (part.end - part.from + TOKENS - 1) / TOKENS;
    if (threadIdx.x == 0) kept = {block.room(), part.from, part.is_whole};
    const uint4* const k_head = reinterpret_cast<const uint4*>(given.k_cache) + block.key_head * T::PIECES;
    const uint4* const v_head = reinterpret_cast<const uint4*>(given.v_cache) + block.key_head * T::PIECES;
    const Places pairs = block.pair_places(warp, lane, T::PIECES);
    fetch<T, ROWS>(shared, reinterpret_cast<const uint4*>(given.q), pairs, warp, lane);
    Pages<T> pages(block, part.from, part.end);
    Places places = pages.of_tile(0, warp, lane);
    fetch<T, TOKENS>(k, k_head, places, warp, lane);
    cp_async_commit();
    Places next = pages.of_tile(TOKENS, warp, lane);
    const int length[2] = {block.length(own_pair) - part.from, block.length(own_pair + 8) - part.from};
    const int shortest = block.length(warp * 16) - part.from;
    Softmax softmax;
    u32 weights[TOKENS / 16][4] = {};
    float o[T::D / 2] = {};

    // Stage 2: tile after tile.
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = T::STAGES == 2 ? (tile & 1) * T::TILE_BYTES : 0, other = T::STAGES == 2 ? T::TILE_BYTES - stage : 0;
        cp_async_wait<0>();
        fence_proxy_async();
        __syncthreads();  // this tile of k and the last one of v are there; those before them have been read
        if (T::STAGES == 2) {
            fetch<T, TOKENS>(v + stage, v_head, places, warp, lane);
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
            __syncthreads();  // the tile of k has been read
            fetch<T, TOKENS>(k, k_head, next, warp, lane);
        }
        scale_scores(s, given.scale);
        const int first = tile * TOKENS;
        if (first + TOKENS > shortest) hide(s, first + 2 * (lane & 3), length);
#pragma unroll
        for (int i = 0; i < 2; ++i) softmax.weigh(s, i, Softmax::top(s, i));
        wgmma_wait<0>();
        wgmma_fence_operand(o);
        wgmma_fence_operand(weights);
        if (T::STAGES == 1) {
            __syncthreads();  // the tile of v has been read
            fetch<T, TOKENS>(v, v_head, places, warp, lane);
            cp_async_commit();
        }
        places = next;
        next = pages.of_tile(first + 2 * TOKENS, warp, lane);
#pragma unroll
        for (int step = 0; step < TOKENS / 16; ++step) as_operand(weights[step], s, step);
        if (!__all_sync(ALL_LANES, softmax.keeps_all())) {
#pragma unroll
            for (int i = 0; i < T::D / 2; ++i) o[i] = __fmul_rn(o[i], softmax.keep[i >> 1 & 1]);
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

    // Stage 3: the results, to where q was, and from there.
    pdl_launch_dependents();  // no earlier: its blocks would stand beside those of this one unevenly, and wait
    softmax.finish();
    if (pages.bad < MAX_TOKENS) atomicMin(&kept.first_bad, pages.bad);
    __syncthreads();
    bring_out_results<T, IN_PARTS>(given, pairs, length, kept, shared, softmax, o);
}
