// Grouped experts where experts have many rows: a part of an expert's rows, at most MANY_ROWS, lies in shared memory,
// and a warp multiplies whole tiles of 16 outputs by all of them, so that weights are decoded once for them and come
// from L2 once for them. The bits are those of grouped.cuh: the same chains of K, on the same accumulators, added in
// the same order.
//
// Grid: (slices of the tiles, at least as many as there are parts). A block counts the parts of all experts to find its
// own. K is 2048 for gate and up, 512 for down.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "global_memory.cuh"
#include "grouped.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

// 16 warps of half the registers were faster on an H200, by 2 to 9% of a prompt's time, though some values spill.
#if __CUDA_ARCH__ == 900
constexpr int MANY_WARPS = 16;
#else
constexpr int MANY_WARPS = 8;
#endif
constexpr int MANY_THREADS = MANY_WARPS * 32;
// What fits shared memory with K = 2048: 163 KiB a block on sm_80 and 9.0 to 11.0, 99 on the others.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 880 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int MANY_GROUPS = 2;
#else
constexpr int MANY_GROUPS = 4;  // of eight rows
#endif
constexpr int MANY_ROWS = MANY_GROUPS * GROUP_ROWS;

template <int CHAINS_, int K_>
struct ManyForm {
    static constexpr int CHAINS = CHAINS_, K = K_, SUPERTILES = K / TILE_K, LENGTH = SUPERTILES / CHAINS;
    // Bytes of a row: lanes of different rows read different banks.
    static constexpr int STRIDE = K * (int)sizeof(bf16) + 16;
    static constexpr size_t TILE_BYTES = (size_t)SUPERTILES * SUPERTILE_BYTES;
    static_assert(K % TILE_K == 0 && (CHAINS == 1 || CHAINS == SUPERTILES));  // chains follow each other in memory
};

// A part of the rows of an expert, in sorted order; expert -1 if there is none.
struct Part {
    int expert, begin, rows;
};

// The ``wanted``-th part. All threads of the block come here.
__device__ __forceinline__ Part part_of(const int* offsets, int E, int S, int wanted) {
    __shared__ int sums[MANY_WARPS];
    __shared__ Part found;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, each = (E + MANY_THREADS - 1) / MANY_THREADS;
    const int first = min((int)threadIdx.x * each, E), last = min(first + each, E);
    auto rows_from = [&](int e, int& begin) {
        begin = min(max(load_relaxed(offsets + e), 0), S);
        return max(min(load_relaxed(offsets + e + 1), S) - begin, 0);
    };
    int own = 0, begin;
    for (int e = first; e < last; ++e) own += (rows_from(e, begin) + MANY_ROWS - 1) / MANY_ROWS;
    int before = own;  // then, of the threads before this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) sums[warp] = before;
    if (threadIdx.x == 0) found.expert = -1;
    __syncthreads();
    before -= own;
    for (int w = 0; w < warp; ++w) before += sums[w];
    if (before <= wanted && wanted < before + own) {
        int left = wanted - before;
        for (int e = first; e < last; ++e) {
            const int rows = rows_from(e, begin), parts = (rows + MANY_ROWS - 1) / MANY_ROWS;
            if (left < parts) {
                found = {e, begin + left * MANY_ROWS, min(rows - left * MANY_ROWS, MANY_ROWS)};
                break;
            }
            left -= parts;
        }
    }
    __syncthreads();
    return found;
}

// Sums of one tile of one matrix for GROUPS groups of eight rows; ``own`` holds its first supertile, and the first of
// what is at ``after`` in the end.
template <class F, int GROUPS>
__device__ __forceinline__ void multiply_many(float (&total)[GROUPS][4], Supertile& own, const u8* tile,
                                              const u8* after, u32 rows, int lane) {
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[n][i] = 0.0f;
#pragma unroll 1
    for (int chain = 0; chain < F::CHAINS; ++chain) {
        float c[4][GROUPS][4] = {};
#pragma unroll 1
        for (int i = 0; i < F::LENGTH; ++i) {
            const int s = chain * F::LENGTH + i;
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
                const u32 word = b < 2 ? own.scales.x : own.scales.y;
                const u32 low = scale_pair(word, 2 * (b & 1)), high = scale_pair(word, 2 * (b & 1) + 1);
                u32 a[4][4];
                decode(own.codes[b].x, low, high, a[0]);
                decode(own.codes[b].y, low, high, a[1]);
                decode(own.codes[b].z, low, high, a[2]);
                decode(own.codes[b].w, low, high, a[3]);
                own.load_block(next, b, lane);
#pragma unroll
                for (int n = 0; n < GROUPS; ++n) {
                    mma_16x8x16(c[0][n], a[0], xs[n][0].x, xs[n][0].y);
                    mma_16x8x16(c[1][n], a[1], xs[n][0].z, xs[n][0].w);
                    mma_16x8x16(c[2][n], a[2], xs[n][1].x, xs[n][1].y);
                    mma_16x8x16(c[3][n], a[3], xs[n][1].z, xs[n][1].w);
                }
            }
            own.scales = load_scales(next + CODE_BYTES + lane * 8);
        }
#pragma unroll
        for (int n = 0; n < GROUPS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float sum = (c[0][n][i] + c[1][n][i]) + (c[2][n][i] + c[3][n][i]);
                total[n][i] = F::CHAINS == 1 ? sum : total[n][i] + sum;
            }
    }
}

// A warp's tiles of a slice, ``mine`` .. ``last``, for a part in shared memory. ``store(i, output, sums)`` takes what
// comes of row i.
template <class F, int GROUPS, int MATRICES, class Store>
__device__ __forceinline__ void multiply_tiles(const Experts (&experts)[MATRICES], const Part& part, u32 rows, int mine,
                                               int last, int tiles, int N, Store store) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const size_t first = ((size_t)part.expert * tiles + mine) * F::TILE_BYTES;
    Supertile own;
    if (mine < last) own.load(experts[0].data + first, lane);
    size_t at = first;
#pragma unroll 1
    for (int n = mine; n < last; n += MANY_WARPS) {
        const size_t then = n + MANY_WARPS < last ? at + MANY_WARPS * F::TILE_BYTES : first;
        float total[MATRICES][GROUPS][4];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            const u8* after = m + 1 < MATRICES ? experts[(m + 1) % MATRICES].data + at : experts[0].data + then;
            multiply_many<F, GROUPS>(total[m], own, experts[m].data + at, after, rows, lane);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = group * GROUP_ROWS + 2 * t + (i & 1), output = n * TILE_N + g + 8 * (i >> 1);
                float sums[MATRICES];
#pragma unroll
                for (int j = 0; j < MATRICES; ++j) sums[j] = total[j][group][i];
                if (m < part.rows && output < N) store(part.begin + m, output, sums);
            }
        at = then;
    }
}

// All tiles of a block's slice for its part. ``row(i)`` is row i of x in sorted order, null for zeros.
template <class F, int MATRICES, class Source, class Store>
__device__ __forceinline__ void multiply_part(const Experts (&experts)[MATRICES], const int* offsets, int E, int S,
                                              int N, Source row, Store store) {
    extern __shared__ __align__(16) u8 memory[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int tiles = (N + TILE_N - 1) / TILE_N, each = (tiles + gridDim.x - 1) / gridDim.x;
    const int first = blockIdx.x * each, last = min(first + each, tiles), mine = first + warp;
    const Part part = part_of(offsets, E, S, blockIdx.y);
    if (part.expert < 0) return;
    const u32 base = shared_address(memory);
    for (int i = warp; i < part.rows; i += MANY_WARPS) {
        const bf16* from = row(part.begin + i);
        for (int piece = lane; piece < F::K / 8; piece += 32) {
            if (from) cp_async_16(base + i * F::STRIDE + piece * 16, from + piece * 8);
            else *reinterpret_cast<uint4*>(memory + i * F::STRIDE + piece * 16) = make_uint4(0, 0, 0, 0);
        }
    }
    cp_async_commit(), cp_async_wait<0>();
    __syncthreads();
    const u32 rows = base + (lane >> 2) * F::STRIDE + (lane & 3) * 16 * (u32)sizeof(bf16);
    const auto put = [&](int i, int output, const float (&sums)[MATRICES]) { store(part.expert, i, output, sums); };
    constexpr int FEWER = 2;
    if (part.rows <= FEWER * GROUP_ROWS) multiply_tiles<F, FEWER>(experts, part, rows, mine, last, tiles, N, put);
    else multiply_tiles<F, MANY_GROUPS>(experts, part, rows, mine, last, tiles, N, put);
}

extern "C" __global__ void __launch_bounds__(MANY_THREADS, 1) grouped_many_gate_up_k2048(
    const u8* __restrict__ gate,           // [E][ceil(I/16)][8][2304]
    const u8* __restrict__ up,             // the same
    const float* __restrict__ gate_scale,  // [E]
    const float* __restrict__ up_scale,    // [E]
    const bf16* x,                         // [S / top_k, 2048]
    const int* slots,                      // [S]
    const int* offsets,                    // [E + 1]
    bf16* __restrict__ out,                // [S, I]
    int E, int S, int top_k, int I) {
    using F = ManyForm<8, 2048>;
    const Experts experts[2] = {{gate, gate_scale}, {up, up_scale}};
    pdl_launch_dependents();
    pdl_wait();
    multiply_part<F>(
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

extern "C" __global__ void __launch_bounds__(MANY_THREADS, 1) grouped_many_down_k512(
    const u8* __restrict__ down,           // [E][ceil(H/16)][2][2304]
    const float* __restrict__ down_scale,  // [E]
    const bf16* h,                         // [S, 512]
    const int* offsets,                    // [E + 1]
    bf16* __restrict__ out,                // [S, H]
    int E, int S, int H) {
    using F = ManyForm<1, 512>;
    const Experts experts[1] = {{down, down_scale}};
    pdl_launch_dependents();
    pdl_wait();
    multiply_part<F>(
        experts, offsets, E, S, H, [&](int i) { return h + (size_t)i * F::K; },
        [&](int expert, int i, int output, const float (&sums)[1]) {
            out[(size_t)i * H + output] = rounded(sums[0] * experts[0].scale(expert));
        });
    clear_rest(out, offsets, E, S, H);
}
