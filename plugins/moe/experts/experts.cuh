// Building blocks of the NVFP4 expert kernels: tiles of 16 outputs x 8 rows on mma.sync, sm_80 and newer. Included by
// grouped.cuh and pairwise.cuh.
//
// Weights are the A operand of the mma, rows are its N side (nvfp4_mma.cuh): eight rows cost as much as one.
//
// Split-K: K has SLICES slices. Slice c is the supertiles c, c + SLICES, ... A team of WARPS_K warps computes one tile.
// One warp sums a slice in order, and the partial sums of all slices are added in rising order. SLICES depends on K
// only: the bits of a row depend neither on other rows nor on the number of warps.
//
// Pipeline: a warp holds the next supertile in registers, one for each matrix or one for all. Each block of it is
// loaded again as soon as it has been decoded, also across the ends of slices, matrices and tiles. Numerics: exact
// products, FP32 sums, then the expert's global scale.
//
// Slower on an H200 (records/h200.md): weights through shared memory with cp.async, 7 to 20%; 24 warps with fewer
// registers each, 3 to 10%; decoded weights kept for more than eight rows, because of register spills.
#pragma once
#include "bf16.cuh"
#include "named_barrier.cuh"
#include "nvfp4_mma.cuh"
#include "shared_memory.cuh"
#include "silu.cuh"

constexpr int GROUP_ROWS = 8, TILE_VALUES = GROUP_ROWS * TILE_N;

// --- device functions ---

// The weights of all experts, [E][tiles][supertiles][2304 bytes], with their global scales [E].
struct Experts {
    const u8* data;
    const float* scales;

    __device__ __forceinline__ float scale(int expert) const { return scales[expert] * EXPONENT_GAP; }
};

// Tile configuration: WARPS warps of a block in teams of WARPS_K. A STATIC_K above 0 is K at compile time: it needs no
// bounds checks, and rows may be in shared memory.
template <int SLICES_, int STATIC_K_, int WARPS>
struct TileConfig {
    static constexpr int SLICES = SLICES_, STATIC_K = STATIC_K_, WARPS_K = SLICES < WARPS ? SLICES : WARPS;
    static constexpr int TEAMS = WARPS / WARPS_K, THREADS = WARPS * 32;
    static_assert(SLICES % WARPS_K == 0 && WARPS % WARPS_K == 0 && STATIC_K % TILE_K == 0);
};

// The number of split-K slices of a configuration for any K.
__device__ __forceinline__ int slices_of(int K) { return K <= 512 ? 1 : K <= 1024 ? 2 : 8; }

// The position of a warp and lane in the block's tiles, and the sizes of the problem.
template <class F>
struct WarpPosition {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int warp_k = (threadIdx.x >> 5) % F::WARPS_K, team = (threadIdx.x >> 5) / F::WARPS_K;
    int N, K, tiles, supertiles, step, slices;

    __device__ __forceinline__ WarpPosition(int N, int k)
        : N(N), K(F::STATIC_K > 0 ? F::STATIC_K : k), tiles((N + TILE_N - 1) / TILE_N),
          supertiles((K + TILE_K - 1) / TILE_K), step(F::STATIC_K > 0 ? F::SLICES : min(F::SLICES, slices_of(K))),
          slices(min(step, supertiles)) {}

    // The byte offset of this warp's first supertile of an expert's tile, the same in every matrix.
    __device__ __forceinline__ size_t offset(int expert, int tile) const {
        return (((size_t)expert * tiles + tile) * supertiles + warp_k) * SUPERTILE_BYTES;
    }
    __device__ __forceinline__ size_t stride() const { return (size_t)F::TEAMS * supertiles * SUPERTILE_BYTES; }
};

// A row of activations in global memory, for lane group g; a null pointer gives zeros. All values of a supertile are
// loaded at once, because they come from L2.
template <class F>
struct GlobalRow {
    static constexpr bool IS_SHARED = false;
    const bf16* row;
    uint4 xs[4][1][2];

    __device__ __forceinline__ void begin(int s, const WarpPosition<F>& at) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int k = s * TILE_K + b * 64 + at.t * 16;
            xs[b][0][0] = xs[b][0][1] = make_uint4(0, 0, 0, 0);
            if (row && (F::STATIC_K > 0 || k < at.K)) {  // K is a multiple of 16
                const uint4* p = reinterpret_cast<const uint4*>(row + k);
                xs[b][0][0] = p[0];
                xs[b][0][1] = p[1];
            }
        }
    }
    __device__ __forceinline__ const uint4 (&block(int b, const WarpPosition<F>&))[1][2] { return xs[b]; }
};

// A row in shared memory, aligned to 16 bytes. 64 k are read at a time, right before their weights are decoded. A lane
// without a row may read any row: its results are not stored. A branch would separate the loads from the decode.
template <class F>
struct SharedRow {
    static constexpr bool IS_SHARED = true;
    u32 row;
    uint4 xs[1][2];

    __device__ __forceinline__ void begin(int supertile, const WarpPosition<F>& at) {
        at_k = row + (supertile * TILE_K + at.t * 16) * (u32)sizeof(bf16);
    }
    __device__ __forceinline__ const uint4 (&block(int b, const WarpPosition<F>&))[1][2] {
        const u32 p = at_k + b * 64 * (u32)sizeof(bf16);
        xs[0][0] = load_shared_16(p);
        xs[0][1] = load_shared_16(p + 16);
        return xs;
    }

private:
    u32 at_k;
};

// The register pipeline of a warp's weights: one supertile for each matrix, or with SLOTS = 1 one for all of them.
template <class F, int MATRICES, int SLOTS>
struct WeightPipeline {
    static_assert(SLOTS == 1 || SLOTS == MATRICES);
    Supertile ring[SLOTS];

    // Loads the first supertile of a tile.
    __device__ __forceinline__ void start(const Experts (&experts)[MATRICES], size_t tile, const WarpPosition<F>& at) {
        if (at.warp_k >= at.slices) return;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) ring[i].load(experts[i].data + tile, at.lane);
    }

    // The same, from the lane's pointers to codes and to scales of each matrix.
    __device__ __forceinline__ void start_at(const u8* (&codes)[MATRICES], const u8* (&scales)[MATRICES],
                                             const WarpPosition<F>& at) {
        static_assert(SLOTS == MATRICES);
        if (at.warp_k >= at.slices) return;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
#pragma unroll
            for (int b = 0; b < 4; ++b) ring[i].codes[b] = load_codes(codes[i] + b * 512);
            ring[i].scales = load_scales(scales[i]);
        }
    }

    // Multiplies one supertile, and loads ``next`` in its place unless that is null.
    template <int A, class Row>
    __device__ __forceinline__ void multiply(float (&c)[A][1][4], Supertile& weights, Row& x, int s, const u8* next,
                                             const WarpPosition<F>& at) {
        x.begin(s, at);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const auto& xs = x.block(b, at);
            const u32 word = b < 2 ? weights.scales.x : weights.scales.y;
            multiply_block<1>(
                c, weights.codes[b], scale_pair(word, 2 * (b & 1)), scale_pair(word, 2 * (b & 1) + 1), xs);
            if (next) weights.load_block(next, b, at.lane);
        }
        if (next) weights.scales = load_scales(next + CODE_BYTES + at.lane * 8);
    }

    // Multiplies a tile. ``finish(m, slice, sums)`` gets the partial sums of a slice in the layout of an mma
    // accumulator: rows 2t, 2t + 1 and outputs g, g + 8. ``after`` is the offset of the next tile, if has_after.
    template <class Row, class Finish>
    __device__ __forceinline__ void multiply_tile(const Experts (&experts)[MATRICES], size_t tile, size_t after,
                                                  bool has_after, Row& x, const WarpPosition<F>& at, Finish finish) {
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            // After this matrix comes its next tile, or the next matrix of this tile.
            constexpr bool HAS_OWN_SLOT = SLOTS == MATRICES;
            const bool is_last = HAS_OWN_SLOT || m + 1 == MATRICES;
#pragma unroll 1
            for (int slice = at.warp_k; slice < at.slices; slice += F::WARPS_K) {
                float c[4][1][4] = {};
#pragma unroll 1
                for (int s = slice; s < at.supertiles; s += at.step) {
                    int in_tile = s + at.step;
                    if (in_tile >= at.supertiles) in_tile = slice + F::WARPS_K < at.slices ? slice + F::WARPS_K : 0;
                    const u8* next = experts[m].data + tile + (in_tile - at.warp_k) * SUPERTILE_BYTES;
                    bool has_next = true;
                    if (in_tile == 0) {
                        next = is_last ? experts[HAS_OWN_SLOT ? m : 0].data + after
                                       : experts[(m + 1) % MATRICES].data + tile;
                        has_next = !is_last || has_after;
                    }
                    multiply(c, ring[HAS_OWN_SLOT ? m : 0], x, s, has_next ? next : nullptr, at);
                }
                float sums[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = (c[0][0][i] + c[1][0][i]) + (c[2][0][i] + c[3][0][i]);
                finish(m, slice, sums);
            }
        }
    }
};

// Split-K partials in shared memory: [TEAMS][MATRICES][SLICES][8 rows][16 outputs].
template <class F, int MATRICES>
struct SplitKPartials {
    float at[F::SLICES == 1 ? 1 : F::TEAMS][MATRICES][F::SLICES][F::SLICES == 1 ? 1 : TILE_VALUES];
};

template <class F>
__device__ __forceinline__ void team_barrier(int team) {
    if constexpr (F::TEAMS == 1) __syncthreads();
    else named_barrier_sync(team + 1, F::WARPS_K * 32);
}

// Multiplies one tile without split-K, for up to eight rows: the accumulators go to the epilogue without shared memory.
template <class Pipeline, class F, int MATRICES, class Row, class Store>
__device__ __forceinline__ void multiply_single_slice(Pipeline& pipeline, const Experts (&experts)[MATRICES],
                                                      size_t offset, size_t after, bool has_after, Row& x, int rows,
                                                      int tile, const WarpPosition<F>& at, Store store) {
    float sums[MATRICES][4] = {};
    pipeline.multiply_tile(experts, offset, after, has_after, x, at, [&](int m, int, const float (&slice_sums)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][i] = slice_sums[i];
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 2 * at.t + (i & 1), output = tile * TILE_N + at.g + 8 * (i >> 1);
        float values[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) values[m] = sums[m][i];
        if (row < rows && output < at.N) store(row, output, values);
    }
}

// Multiplies one tile for up to eight rows. The epilogue ``store(i, output, sums)`` gets each output of row i, before
// the global scale.
template <class F, int MATRICES, int SLOTS, class Row, class Store>
__device__ __forceinline__ void multiply_rows(
    WeightPipeline<F, MATRICES, SLOTS>& pipeline, SplitKPartials<F, MATRICES>& partials,
    const Experts (&experts)[MATRICES], size_t offset, size_t after, bool has_after, Row& x, int rows, int tile,
    const WarpPosition<F>& at, Store store) {
    if constexpr (F::SLICES == 1) {
        multiply_single_slice(pipeline, experts, offset, after, has_after, x, rows, tile, at, store);
    } else {
        auto& partial = partials.at[at.team];
        pipeline.multiply_tile(
            experts, offset, after, has_after, x, at, [&](int m, int slice, const float (&slice_sums)[4]) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    partial[m][slice][(2 * at.t + (i & 1)) * TILE_N + at.g + 8 * (i >> 1)] = slice_sums[i];
            });
        team_barrier<F>(at.team);
        for (int i = at.warp_k * 32 + at.lane; i < rows * TILE_N; i += F::WARPS_K * 32) {
            const int output = tile * TILE_N + i % TILE_N;
            float totals[MATRICES] = {};
#pragma unroll
            for (int c = 0; c < F::SLICES; ++c)
#pragma unroll
                for (int m = 0; m < MATRICES; ++m)
                    if (F::STATIC_K > 0 || c < at.slices) totals[m] += partial[m][c][i];
            if (output < at.N) store(i / TILE_N, output, totals);
        }
        team_barrier<F>(at.team);  // before the partials of the next tile
    }
}

// Entry points: name, SLICES and STATIC_K. SLICES is 1 up to K = 512, 2 up to 1024, else 8 (splits.py).
#define FOR_EACH_GATE_UP(ENTRY) ENTRY(k2048, 8, 2048) ENTRY(any, 8, 0)
#define FOR_EACH_DOWN(ENTRY) ENTRY(k512, 1, 512) ENTRY(to_512, 1, 0) ENTRY(to_1024, 2, 0) ENTRY(any, 8, 0)
