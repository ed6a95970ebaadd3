// A tile of 16 outputs of one expert, for all rows that chose it: the weights of a tile are read from memory once a
// launch, whatever the number of rows, and multiplied by the tensor cores with eight rows as the mma's N side
// (nvfp4_mma.cuh).
//
// WARPS_K warps split K, supertile by supertile; a block of 8 warps has 8 / WARPS_K tiles. For more than eight rows the
// weights come again from L2. (Kept in registers over the groups of rows, the assembler decodes all of them ahead of the
// loop and spills 400 bytes a thread.) The split depends on K only: a row's bits depend neither on other rows nor on its
// place among them.
//
// Numerics: products exact, FP32 sums over WARPS_K warps in rising order, then the expert's global scale.
#pragma once
#include "bf16.cuh"
#include "launch.cuh"
#include "nvfp4_mma.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32, GROUP_ROWS = 8;

// Experts [E][tiles][supertiles][2304] with their global scales [E].
struct Experts {
    const u8* data;
    const float* scales;

    __device__ __forceinline__ const u8* tile(int expert, int tile, int N, int supertiles) const {
        const size_t tiles = (N + TILE_N - 1) / TILE_N;
        return data + (expert * tiles + tile) * supertiles * SUPERTILE_BYTES;
    }
    __device__ __forceinline__ float scale(int expert) const { return scales[expert] * EXPONENT_GAP; }
};

// One warp's share of a tile of one or two matrices.
template <int WARPS_K, int MATRICES>
struct Share {
    const u8* tiles[MATRICES];
    int first, supertiles, lane;

    // sums[m] are those of rows 2t, 2t + 1 and outputs g, g + 8, as an mma has them. ``x`` is the row of lane group g, null
    // for none.
    __device__ __forceinline__ void multiply(float (&sums)[MATRICES][4], const bf16* x, int K) const {
        float c[MATRICES][4][1][4] = {};
#pragma unroll 1
        for (int s = first; s < supertiles; s += WARPS_K) {
            Supertile weights[MATRICES];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) weights[m].load(tiles[m] + (size_t)s * SUPERTILE_BYTES, lane);
            uint4 xs[4][1][2];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int k = s * TILE_K + b * 64 + (lane & 3) * 16;
                xs[b][0][0] = xs[b][0][1] = make_uint4(0, 0, 0, 0);
                if (x && k < K) {  // K is a multiple of 16
                    const uint4* at = reinterpret_cast<const uint4*>(x + k);
                    xs[b][0][0] = at[0];
                    xs[b][0][1] = at[1];
                }
            }
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const u32 scales = b < 2 ? weights[m].scales.x : weights[m].scales.y;
                    multiply_block<1>(c[m], weights[m].codes[b], scale_pair(scales, 2 * (b & 1)),
                                      scale_pair(scales, 2 * (b & 1) + 1), xs[b]);
                }
        }
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][i] = (c[m][0][0][i] + c[m][1][0][i]) + (c[m][2][0][i] + c[m][3][0][i]);
    }
};

// Where the warps of a block stand.
template <int WARPS_K>
struct BlockTiles {
    static constexpr int COUNT = WARPS / WARPS_K;
    int in_block = (threadIdx.x >> 5) / WARPS_K, tile = blockIdx.x * COUNT + in_block;
    int warp_k = (threadIdx.x >> 5) % WARPS_K, lane = threadIdx.x & 31;
};

// Multiplies the tiles of a block by groups of eight rows and hands every sum on.
//
// ``count`` rows, the same for all threads; ``row(i)`` is row i of x; ``store(i, output, sums)`` takes the sums of the
// matrices, before the global scale. All threads of the block come here.
template <int WARPS_K, int MATRICES, class Row, class Store>
__device__ __forceinline__ void multiply_rows(const Share<WARPS_K, MATRICES>& share, const BlockTiles<WARPS_K>& at,
                                              int N, int K, int count, Row row, Store store) {
    constexpr int TILES = BlockTiles<WARPS_K>::COUNT, VALUES = TILES * GROUP_ROWS * TILE_N;
    __shared__ float partial[WARPS_K][MATRICES][VALUES];
    const int g = at.lane >> 2, t = at.lane & 3;
    for (int first = 0; first < count; first += GROUP_ROWS) {
        float sums[MATRICES][4];
        share.multiply(sums, first + g < count ? row(first + g) : nullptr, K);
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                partial[at.warp_k][m][(at.in_block * GROUP_ROWS + 2 * t + (i & 1)) * TILE_N + g + 8 * (i >> 1)] = sums[m][i];
        __syncthreads();
        for (int i = threadIdx.x; i < VALUES; i += THREADS) {
            const int own = first + i / TILE_N % GROUP_ROWS;
            const int output = (blockIdx.x * TILES + i / TILE_N / GROUP_ROWS) * TILE_N + i % TILE_N;
            float totals[MATRICES] = {};
#pragma unroll
            for (int w = 0; w < WARPS_K; ++w)
#pragma unroll
                for (int m = 0; m < MATRICES; ++m) totals[m] += partial[w][m][i];
            if (own < count && output < N) store(own, output, totals);
        }
        __syncthreads();
    }
}

template <int WARPS_K, int MATRICES>
__device__ __forceinline__ Share<WARPS_K, MATRICES> share_of(const Experts (&experts)[MATRICES],
                                                             const BlockTiles<WARPS_K>& at, int expert, int N, int K) {
    const int supertiles = (K + TILE_K - 1) / TILE_K;
    Share<WARPS_K, MATRICES> share;
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) share.tiles[m] = experts[m].tile(expert, at.tile, N, supertiles);
    share.first = at.warp_k;
    share.supertiles = at.tile * TILE_N < N ? supertiles : 0;  // a tile beyond the last has none
    share.lane = at.lane;
    return share;
}

__device__ __forceinline__ bf16 rounded(float value) { return __float2bfloat16_rn(value); }

// silu(gate) * up of two sums, each rounded to BF16 first.
__device__ __forceinline__ bf16 activated(float gate, float up) {
    gate = __bfloat162float(rounded(gate));
    up = __bfloat162float(rounded(up));
    return rounded(gate * sigmoid(gate) * up);
}

// The splits of K that entry points exist for: name, WARPS_K. The launcher chooses by K.
#define FOR_EACH_SPLIT(ENTRY) ENTRY(k512, 2) ENTRY(k1024, 4) ENTRY(any, 8)
