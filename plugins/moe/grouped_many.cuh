// Grouped experts where experts have many rows: MANY_ROWS rows of the sorted order at a time lie in shared memory, and a warp
// multiplies whole tiles of 16 outputs by all of them that are one expert's, so that weights are decoded once for them and
// come from L2 once for them. The bits are those of grouped.cuh: the same chains of K, on the same accumulators, added in the
// same order.
//
// Grid: (slices of the tiles, MANY_ROWS rows each). Rows that no expert has are zeros. K is 2048 for gate and up, 512 for down.
#pragma once
#include "grouped.cuh"

constexpr int MANY_WARPS = 8, MANY_THREADS = MANY_WARPS * 32;
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
    static constexpr int STRIDE = K * (int)sizeof(bf16) + 16;  // of a row in bytes: lanes of different rows read different banks
    static constexpr size_t TILE_BYTES = (size_t)SUPERTILES * SUPERTILE_BYTES;
    static_assert(K % TILE_K == 0 && (CHAINS == 1 || CHAINS == SUPERTILES));  // chains follow each other in memory
};

// The first expert whose rows end behind ``row``: E if there is none.
__device__ __forceinline__ int expert_of(const int* offsets, int E, int row) {
    int low = 0, high = E;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (load_fresh(offsets + middle + 1) > row) high = middle;
        else low = middle + 1;
    }
    return low;
}

// Sums of one tile of one matrix for the groups ``from`` .. ``to`` of eight rows; ``own`` holds its first supertile, and the
// first of what is at ``after`` in the end.
template <class F>
__device__ __forceinline__ void multiply_many(float (&total)[MANY_GROUPS][4], Supertile& own, const u8* tile,
                                              const u8* after, u32 rows, int from, int to, int lane) {
#pragma unroll
    for (int n = 0; n < MANY_GROUPS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[n][i] = 0.0f;
#pragma unroll 1
    for (int chain = 0; chain < F::CHAINS; ++chain) {
        float c[4][MANY_GROUPS][4] = {};
#pragma unroll 1
        for (int i = 0; i < F::LENGTH; ++i) {
            const int s = chain * F::LENGTH + i;
            const u8* next = s + 1 < F::SUPERTILES ? tile + (s + 1) * SUPERTILE_BYTES : after;
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                uint4 xs[MANY_GROUPS][2];
#pragma unroll
                for (int n = 0; n < MANY_GROUPS; ++n) {
                    const u32 p = rows + n * GROUP_ROWS * F::STRIDE + (s * TILE_K + b * 64) * (int)sizeof(bf16);
                    xs[n][0] = load_shared(p);
                    xs[n][1] = load_shared(p + 16);
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
                for (int n = 0; n < MANY_GROUPS; ++n) {
                    if (n < from || n >= to) continue;
                    mma_16x8x16(c[0][n], a[0], xs[n][0].x, xs[n][0].y);
                    mma_16x8x16(c[1][n], a[1], xs[n][0].z, xs[n][0].w);
                    mma_16x8x16(c[2][n], a[2], xs[n][1].x, xs[n][1].y);
                    mma_16x8x16(c[3][n], a[3], xs[n][1].z, xs[n][1].w);
                }
            }
            own.scales = load_scales(next + CODE_BYTES + lane * 8);
        }
#pragma unroll
        for (int n = 0; n < MANY_GROUPS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float sum = (c[0][n][i] + c[1][n][i]) + (c[2][n][i] + c[3][n][i]);
                total[n][i] = F::CHAINS == 1 ? sum : total[n][i] + sum;
            }
    }
}

// All tiles of a block's slice for its rows. ``row(i)`` is row i of x in sorted order, null for zeros; ``store(expert, i,
// output, sums)`` takes what comes of it, ``clear(i, output)`` zeros for a row that no expert has.
template <class F, int MATRICES, class Source, class Store, class Clear>
__device__ __forceinline__ void multiply_all(const Experts (&experts)[MATRICES], const int* offsets, int E, int S, int N,
                                             Source row, Store store, Clear clear) {
    extern __shared__ __align__(16) u8 memory[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int begin = blockIdx.y * MANY_ROWS, end = min(begin + MANY_ROWS, S);
    const int tiles = (N + TILE_N - 1) / TILE_N, each = (tiles + gridDim.x - 1) / gridDim.x;
    const int first = blockIdx.x * each, last = min(first + each, tiles), mine = first + warp;
    const u32 base = (u32)__cvta_generic_to_shared(memory);

    // Stage 1: the rows go to shared memory.
    for (int i = warp; i < MANY_ROWS; i += MANY_WARPS) {
        const bf16* from = begin + i < end ? row(begin + i) : nullptr;
        for (int piece = lane; piece < F::K / 8; piece += 32) {
            u8* to = memory + i * F::STRIDE + piece * 16;
            if (from) copy_to_shared(base + i * F::STRIDE + piece * 16, from + piece * 8);
            else *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
    int expert = expert_of(offsets, E, begin);
    wait_for_copies();
    __syncthreads();

    // Stage 2: expert by expert, a warp's tiles.
    const u32 rows = base + g * F::STRIDE + t * 16 * (u32)sizeof(bf16);
    int at = begin;
    for (; expert < E && at < end; ++expert) {
        const int until = min(max(load_fresh(offsets + expert + 1), at), end);
        if (until == at) continue;
        const int from = (at - begin) / GROUP_ROWS, to = (until - begin + GROUP_ROWS - 1) / GROUP_ROWS;
        const u8* tile[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) tile[m] = experts[m].data + ((size_t)expert * tiles + mine) * F::TILE_BYTES;
        Supertile own;
        if (mine < last) own.load(tile[0], lane);
#pragma unroll 1
        for (int n = mine; n < last; n += MANY_WARPS) {
            float total[MATRICES][MANY_GROUPS][4];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) {
                const u8* then = n + MANY_WARPS < last ? tile[0] + MANY_WARPS * F::TILE_BYTES : tile[0];
                multiply_many<F>(total[m], own, tile[m], m + 1 < MATRICES ? tile[(m + 1) % MATRICES] : then, rows, from, to, lane);
            }
#pragma unroll
            for (int group = 0; group < MANY_GROUPS; ++group)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int m = begin + group * GROUP_ROWS + 2 * t + (i & 1), output = n * TILE_N + g + 8 * (i >> 1);
                    float sums[MATRICES];
#pragma unroll
                    for (int j = 0; j < MATRICES; ++j) sums[j] = total[j][group][i];
                    if (at <= m && m < until && output < N) store(expert, m, output, sums);
                }
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) tile[m] += MANY_WARPS * F::TILE_BYTES;
        }
        at = until;
    }

    // Stage 3: rows that no expert has.
    for (; at < end; ++at)
        for (int n = first * TILE_N + threadIdx.x; n < min(last * TILE_N, N); n += MANY_THREADS) clear(at, n);
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
    allow_next_launch();
    wait_for_previous_launch();
    multiply_all<F>(
        experts, offsets, E, S, I,
        [&](int i) {
            const int slot = load_fresh(slots + i);
            return (u32)slot < (u32)S ? x + (size_t)(slot / top_k) * F::K : nullptr;
        },
        [&](int expert, int i, int output, const float (&sums)[2]) {
            out[(size_t)i * I + output] = activated(sums[0] * experts[0].scale(expert), sums[1] * experts[1].scale(expert));
        },
        [&](int i, int output) { out[(size_t)i * I + output] = rounded(0.0f); });
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
    allow_next_launch();
    wait_for_previous_launch();
    multiply_all<F>(
        experts, offsets, E, S, H, [&](int i) { return h + (size_t)i * F::K; },
        [&](int expert, int i, int output, const float (&sums)[1]) {
            out[(size_t)i * H + output] = rounded(sums[0] * experts[0].scale(expert));
        },
        [&](int i, int output) { out[(size_t)i * H + output] = rounded(0.0f); });
}
