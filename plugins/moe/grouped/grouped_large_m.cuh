// Grouped GEMM of NVFP4 experts for large M: a row tile, up to LARGE_M_ROWS rows of one expert, is in shared memory,
// and a warp multiplies whole tiles of 16 outputs by all of them. Weights are decoded, and read from L2, once for a row
// tile. The bits are those of grouped.cuh: the same split-K slices on the same accumulators, added in the same order.
//
// Grid: (parts of the output tiles, at least the number of row tiles). A block counts the row tiles of all experts to
// find its own. K is 2048 for gate and up, 512 for down. Launched by launch.py. sm_80 and newer.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "global_memory.cuh"
#include "grouped.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

// 16 warps with half the registers were faster on an H200, by 2 to 9% of a prompt's time, in spite of register spills.
#if __CUDA_ARCH__ == 900
constexpr int LARGE_M_WARPS = 16;
#else
constexpr int LARGE_M_WARPS = 8;
#endif
constexpr int LARGE_M_THREADS = LARGE_M_WARPS * 32;
// Limited by shared memory at K = 2048: 163 KiB a block on sm_80 and sm_90 to sm_110, 99 KiB on the others.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 880 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int LARGE_M_GROUPS = 2;
#else
constexpr int LARGE_M_GROUPS = 4;  // of eight rows
#endif
constexpr int LARGE_M_ROWS = LARGE_M_GROUPS * GROUP_ROWS;

template <int SLICES_, int K_>
struct LargeMConfig {
    static constexpr int SLICES = SLICES_, K = K_, SUPERTILES = K / TILE_K, LENGTH = SUPERTILES / SLICES;
    // Bytes of a row, padded against bank conflicts.
    static constexpr int STRIDE = K * (int)sizeof(bf16) + 16;
    static constexpr size_t TILE_BYTES = (size_t)SUPERTILES * SUPERTILE_BYTES;
    static_assert(K % TILE_K == 0 && (SLICES == 1 || SLICES == SUPERTILES));  // a slice is contiguous in memory
};

// Rows of one expert in sorted order; expert -1 for no tile.
struct RowTile {
    int expert, begin, rows;
};

// The row tile of an index. For all threads of a block.
__device__ __forceinline__ RowTile row_tile_of(const int* offsets, int E, int S, int index) {
    __shared__ int sums[LARGE_M_WARPS];
    __shared__ RowTile found;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31,
              per_thread = (E + LARGE_M_THREADS - 1) / LARGE_M_THREADS;
    const int first = min((int)threadIdx.x * per_thread, E), last = min(first + per_thread, E);
    auto rows_from = [&](int e, int& begin) {
        begin = min(max(load_relaxed(offsets + e), 0), S);
        return max(min(load_relaxed(offsets + e + 1), S) - begin, 0);
    };
    int count = 0, begin;
    for (int e = first; e < last; ++e) count += (rows_from(e, begin) + LARGE_M_ROWS - 1) / LARGE_M_ROWS;
    int before = count;  // inclusive prefix sum, made exclusive below
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) sums[warp] = before;
    if (threadIdx.x == 0) found.expert = -1;
    __syncthreads();
    before -= count;
    for (int w = 0; w < warp; ++w) before += sums[w];
    if (before <= index && index < before + count) {
        int left = index - before;
        for (int e = first; e < last; ++e) {
            const int rows = rows_from(e, begin), row_tiles = (rows + LARGE_M_ROWS - 1) / LARGE_M_ROWS;
            if (left < row_tiles) {
                found = {e, begin + left * LARGE_M_ROWS, min(rows - left * LARGE_M_ROWS, LARGE_M_ROWS)};
                break;
            }
            left -= row_tiles;
        }
    }
    __syncthreads();
    return found;
}

// Sums of one tile of one matrix for GROUPS groups of eight rows. ``weights`` holds its first supertile, and in the end
// the first one at ``after``.
template <class F, int GROUPS>
__device__ __forceinline__ void multiply_large_m(float (&total)[GROUPS][4], Supertile& weights, const u8* tile,
                                                 const u8* after, u32 rows, int lane) {
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[n][i] = 0.0f;
#pragma unroll 1
    for (int slice = 0; slice < F::SLICES; ++slice) {
        float c[4][GROUPS][4] = {};
#pragma unroll 1
        for (int i = 0; i < F::LENGTH; ++i) {
            const int s = slice * F::LENGTH + i;
            const u8* next = s + 1 < F::SUPERTILES ? tile + (s + 1) * SUPERTILE_BYTES : after;
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                uint4 xs[GROUPS][2];
#pragma unroll
                for (int n = 0; n < GROUPS; ++n) {
                    const u32 p = rows + n * GROUP_ROWS * F::STRIDE + (s * TILE_K + b * 64) * (int)sizeof(bf16);
                    xs[n][0] = load_shared_16(p);
                    xs[n][1] = load_shared_16(p + 16);
                }
                const u32 word = b < 2 ? weights.scales.x : weights.scales.y;
                const u32 low = scale_pair(word, 2 * (b & 1)), high = scale_pair(word, 2 * (b & 1) + 1);
                u32 a[4][4];
                decode(weights.codes[b].x, low, high, a[0]);
                decode(weights.codes[b].y, low, high, a[1]);
                decode(weights.codes[b].z, low, high, a[2]);
                decode(weights.codes[b].w, low, high, a[3]);
                weights.load_block(next, b, lane);
#pragma unroll
                for (int n = 0; n < GROUPS; ++n) {
                    mma_16x8x16(c[0][n], a[0], xs[n][0].x, xs[n][0].y);
                    mma_16x8x16(c[1][n], a[1], xs[n][0].z, xs[n][0].w);
                    mma_16x8x16(c[2][n], a[2], xs[n][1].x, xs[n][1].y);
                    mma_16x8x16(c[3][n], a[3], xs[n][1].z, xs[n][1].w);
                }
            }
            weights.scales = load_scales(next + CODE_BYTES + lane * 8);
        }
#pragma unroll
        for (int n = 0; n < GROUPS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float sum = (c[0][n][i] + c[1][n][i]) + (c[2][n][i] + c[3][n][i]);
                total[n][i] = F::SLICES == 1 ? sum : total[n][i] + sum;
            }
    }
}

// The output tiles of a warp, every LARGE_M_WARPS-th from ``warp_first`` to ``last``, for a row tile in shared memory.
// ``store(i, output, sums)`` is the epilogue of row i.
template <class F, int GROUPS, int MATRICES, class Store>
__device__ __forceinline__ void multiply_tiles(const Experts (&experts)[MATRICES], const RowTile& row_tile, u32 rows,
                                               int warp_first, int last, int tiles, int N, Store store) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const size_t first = ((size_t)row_tile.expert * tiles + warp_first) * F::TILE_BYTES;
    Supertile weights;
    if (warp_first < last) weights.load(experts[0].data + first, lane);
    size_t at = first;
#pragma unroll 1
    for (int n = warp_first; n < last; n += LARGE_M_WARPS) {
        const size_t next = n + LARGE_M_WARPS < last ? at + LARGE_M_WARPS * F::TILE_BYTES : first;
        float total[MATRICES][GROUPS][4];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            const u8* after = m + 1 < MATRICES ? experts[(m + 1) % MATRICES].data + at : experts[0].data + next;
            multiply_large_m<F, GROUPS>(total[m], weights, experts[m].data + at, after, rows, lane);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = group * GROUP_ROWS + 2 * t + (i & 1), output = n * TILE_N + g + 8 * (i >> 1);
                float sums[MATRICES];
#pragma unroll
                for (int j = 0; j < MATRICES; ++j) sums[j] = total[j][group][i];
                if (m < row_tile.rows && output < N) store(row_tile.begin + m, output, sums);
            }
        at = next;
    }
}

// The main loop of a block. ``row(i)`` is the address of row i of x in sorted order, null for zeros.
template <class F, int MATRICES, class Source, class Store>
__device__ __forceinline__ void multiply_row_tile(const Experts (&experts)[MATRICES], const int* offsets, int E, int S,
                                                  int N, Source row, Store store) {
    extern __shared__ __align__(16) u8 memory[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int tiles = (N + TILE_N - 1) / TILE_N, per_block = (tiles + gridDim.x - 1) / gridDim.x;
    const int first = blockIdx.x * per_block, last = min(first + per_block, tiles), warp_first = first + warp;
    const RowTile row_tile = row_tile_of(offsets, E, S, blockIdx.y);
    if (row_tile.expert < 0) return;
    const u32 base = shared_address(memory);
    for (int i = warp; i < row_tile.rows; i += LARGE_M_WARPS) {
        const bf16* from = row(row_tile.begin + i);
        for (int chunk = lane; chunk < F::K / 8; chunk += 32) {
            if (from) cp_async_16(base + i * F::STRIDE + chunk * 16, from + chunk * 8);
            else *reinterpret_cast<uint4*>(memory + i * F::STRIDE + chunk * 16) = make_uint4(0, 0, 0, 0);
        }
    }
    cp_async_commit(), cp_async_wait<0>();
    __syncthreads();
    const u32 rows = base + (lane >> 2) * F::STRIDE + (lane & 3) * 16 * (u32)sizeof(bf16);
    const auto put = [&](int i, int output, const float (&sums)[MATRICES]) { store(row_tile.expert, i, output, sums); };
    constexpr int FEWER = 2;
    if (row_tile.rows <= FEWER * GROUP_ROWS)
        multiply_tiles<F, FEWER>(experts, row_tile, rows, warp_first, last, tiles, N, put);
    else multiply_tiles<F, LARGE_M_GROUPS>(experts, row_tile, rows, warp_first, last, tiles, N, put);
}

extern "C" __global__ void __launch_bounds__(LARGE_M_THREADS, 1) grouped_many_gate_up_k2048(
    const u8* __restrict__ gate,           // [E][ceil(I/16)][8][2304]
    const u8* __restrict__ up,             // the same
    const float* __restrict__ gate_scale,  // [E]
    const float* __restrict__ up_scale,    // [E]
    const bf16* x,                         // [S / top_k, 2048]
    const int* slots,                      // [S]
    const int* offsets,                    // [E + 1]
    bf16* __restrict__ out,                // [S, I]
    int E, int S, int top_k, int I) {
    using F = LargeMConfig<8, 2048>;
    const Experts experts[2] = {{gate, gate_scale}, {up, up_scale}};
    pdl_launch_dependents();
    pdl_wait();
    multiply_row_tile<F>(
        experts, offsets, E, S, I,
        [&](int i) {
            const int slot = load_relaxed(slots + i);
            return (u32)slot < (u32)S ? x + (size_t)(slot / top_k) * F::K : nullptr;
        },
        [&](int expert, int i, int output, const float (&sums)[2]) {
            out[(size_t)i * I + output] =
                activated(sums[0] * experts[0].scale(expert), sums[1] * experts[1].scale(expert));
        });
    clear_rest(out, offsets, E, S, I);
}

extern "C" __global__ void __launch_bounds__(LARGE_M_THREADS, 1) grouped_many_down_k512(
    const u8* __restrict__ down,           // [E][ceil(H/16)][2][2304]
    const float* __restrict__ down_scale,  // [E]
    const bf16* h,                         // [S, 512]
    const int* offsets,                    // [E + 1]
    bf16* __restrict__ out,                // [S, H]
    int E, int S, int H) {
    using F = LargeMConfig<1, 512>;
    const Experts experts[1] = {{down, down_scale}};
    pdl_launch_dependents();
    pdl_wait();
    multiply_row_tile<F>(
        experts, offsets, E, S, H, [&](int i) { return h + (size_t)i * F::K; },
        [&](int expert, int i, int output, const float (&sums)[1]) {
            out[(size_t)i * H + output] = rounded(sums[0] * experts[0].scale(expert));
        });
    clear_rest(out, offsets, E, S, H);
}
