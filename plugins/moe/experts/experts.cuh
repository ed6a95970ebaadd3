// Tiles of 16 outputs of experts for up to eight rows each: the weights are the A operand of a tensor-core mma, the
// rows its N side (nvfp4_mma.cuh), so that eight rows cost what one costs.
//
// K is summed in CHAINS chains: chain c has supertiles c, c + CHAINS, ... A team of WARPS_K warps shares the chains of
// a tile out, whatever their number: a chain is summed by one warp in order, chains are added in rising order. CHAINS
// depends on K only, so that a row's bits depend neither on other rows, nor on its place among them, nor on how many
// warps there were.
//
// A warp streams through its supertiles with one of each matrix, or one at all, on its way: each part of it is loaded
// again as soon as it is decoded, over the ends of chains, matrices and tiles. Numerics: products exact, FP32 sums,
// then the expert's global scale.
//
// Lost on an H200 (records/h200.md): weights through shared memory (cp.async) in blocks that list the experts for
// themselves, 7 to 20%; 24 warps of fewer registers, 3 to 10%; decoded weights kept for more than eight rows, which
// spills.
#pragma once
#include "bf16.cuh"
#include "named_barrier.cuh"
#include "nvfp4_mma.cuh"
#include "shared_memory.cuh"

constexpr int GROUP_ROWS = 8, TILE_VALUES = GROUP_ROWS * TILE_N;

// --- device functions ---

// Weights are read once; where they stand, ahead of the wait for the launch before: an ld.global.nc may be moved over
// it.
__device__ __forceinline__ void load_early(Supertile& own, const u8* p, int lane) {
#pragma unroll
    for (int b = 0; b < 4; ++b) own.codes[b] = load_codes_now(p + b * 512 + lane * 16);
    own.scales = load_scales_now(p + CODE_BYTES + lane * 8);
}

// Experts [E][tiles][supertiles][2304] with their global scales [E].
struct Experts {
    const u8* data;
    const float* scales;

    __device__ __forceinline__ float scale(int expert) const { return scales[expert] * EXPONENT_GAP; }
};

// How a block's warps stand: WARPS of them, in teams of WARPS_K. With a STATIC_K that is known when compiled, bounds
// are dropped and rows may lie in shared memory; 0 stands for any K.
template <int CHAINS_, int STATIC_K_, int WARPS>
struct Form {
    static constexpr int CHAINS = CHAINS_, STATIC_K = STATIC_K_, WARPS_K = CHAINS < WARPS ? CHAINS : WARPS;
    static constexpr int TEAMS = WARPS / WARPS_K, THREADS = WARPS * 32;
    static_assert(CHAINS % WARPS_K == 0 && WARPS % WARPS_K == 0 && STATIC_K % TILE_K == 0);
};

// In how many chains K is summed. For a form that serves any K; the others have their own number.
__device__ __forceinline__ int chains_of(int K) { return K <= 512 ? 1 : K <= 1024 ? 2 : 8; }

// Where a warp stands, and the sizes that it needs for that.
template <class F>
struct Place {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int warp_k = (threadIdx.x >> 5) % F::WARPS_K, team = (threadIdx.x >> 5) / F::WARPS_K;
    int N, K, tiles, supertiles, step, chains;

    __device__ __forceinline__ Place(int N, int k)
        : N(N), K(F::STATIC_K > 0 ? F::STATIC_K : k), tiles((N + TILE_N - 1) / TILE_N),
          supertiles((K + TILE_K - 1) / TILE_K), step(F::STATIC_K > 0 ? F::CHAINS : min(F::CHAINS, chains_of(K))),
          chains(min(step, supertiles)) {}

    // Where a tile of an expert begins, and this warp's part of it, in every matrix.
    __device__ __forceinline__ size_t offset(int expert, int tile) const {
        return (((size_t)expert * tiles + tile) * supertiles + warp_k) * SUPERTILE_BYTES;
    }
    __device__ __forceinline__ size_t stride() const { return (size_t)F::TEAMS * supertiles * SUPERTILE_BYTES; }
};

// A row of activations in global memory, as lane group g reads it; null for none. All of a supertile's values are asked
// for at once: they come from L2.
template <class F>
struct GlobalRow {
    static constexpr bool IS_NEAR = false;
    const bf16* row;
    uint4 xs[4][1][2];

    __device__ __forceinline__ void begin(int s, const Place<F>& at) {
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
    __device__ __forceinline__ const uint4 (&block(int b, const Place<F>&))[1][2] { return xs[b]; }
};

// A row in shared memory, at a multiple of 16 bytes, of which 64 k are read at a time, right before their decode. A
// lane without a row of its own may read anything: its results are not looked at, and a branch would keep loads and
// decode apart.
template <class F>
struct SharedRow {
    static constexpr bool IS_NEAR = true;
    u32 row;
    uint4 xs[1][2];

    __device__ __forceinline__ void begin(int own, const Place<F>& at) {
        at_k = row + (own * TILE_K + at.t * 16) * (u32)sizeof(bf16);
    }
    __device__ __forceinline__ const uint4 (&block(int b, const Place<F>&))[1][2] {
        const u32 p = at_k + b * 64 * (u32)sizeof(bf16);
        xs[0][0] = load_shared_16(p);
        xs[0][1] = load_shared_16(p + 16);
        return xs;
    }

private:
    u32 at_k;
};

// What a warp has on its way: a supertile of each matrix where SLOTS is their number, else of one of them.
template <class F, int MATRICES, int SLOTS>
struct Stream {
    static_assert(SLOTS == 1 || SLOTS == MATRICES);
    Supertile ring[SLOTS];

    // Begins with a tile.
    __device__ __forceinline__ void start(const Experts (&experts)[MATRICES], size_t tile, const Place<F>& at) {
        if (at.warp_k >= at.chains) return;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) ring[i].load(experts[i].data + tile, at.lane);
    }

    // The same from a lane's place in each matrix: of codes, and of scales.
    __device__ __forceinline__ void start_at(const u8* (&codes)[MATRICES], const u8* (&scales)[MATRICES],
                                             const Place<F>& at) {
        static_assert(SLOTS == MATRICES);
        if (at.warp_k >= at.chains) return;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
#pragma unroll
            for (int b = 0; b < 4; ++b) ring[i].codes[b] = load_codes(codes[i] + b * 512);
            ring[i].scales = load_scales(scales[i]);
        }
    }

    // One supertile; loads ``next`` in its place, null for nothing.
    template <int A, class Row>
    __device__ __forceinline__ void multiply(float (&c)[A][1][4], Supertile& own, Row& x, int s, const u8* next,
                                             const Place<F>& at) {
        x.begin(s, at);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const auto& xs = x.block(b, at);
            const u32 word = b < 2 ? own.scales.x : own.scales.y;
            multiply_block<1>(c, own.codes[b], scale_pair(word, 2 * (b & 1)), scale_pair(word, 2 * (b & 1) + 1), xs);
            if (next) own.load_block(next, b, at.lane);
        }
        if (next) own.scales = load_scales(next + CODE_BYTES + at.lane * 8);
    }

    // Multiplies a tile. ``finish(m, chain, sums)`` takes the sums of a chain: of rows 2t, 2t + 1 and outputs g, g + 8,
    // as an mma has them. ``after`` is the tile that comes next, if any does.
    template <class Row, class Finish>
    __device__ __forceinline__ void multiply_tile(const Experts (&experts)[MATRICES], size_t tile, size_t after,
                                                  bool has_after, Row& x, const Place<F>& at, Finish finish) {
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            // Behind this matrix: its own next tile, or the next matrix of this tile.
            constexpr bool HAS_OWN_SLOT = SLOTS == MATRICES;
            const bool is_last = HAS_OWN_SLOT || m + 1 == MATRICES;
#pragma unroll 1
            for (int chain = at.warp_k; chain < at.chains; chain += F::WARPS_K) {
                float c[4][1][4] = {};
#pragma unroll 1
                for (int s = chain; s < at.supertiles; s += at.step) {
                    int in_tile = s + at.step;
                    if (in_tile >= at.supertiles) in_tile = chain + F::WARPS_K < at.chains ? chain + F::WARPS_K : 0;
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
                finish(m, chain, sums);
            }
        }
    }
};

// Where sums of chains meet: [TEAMS][MATRICES][CHAINS][TILE_VALUES], row-major values [8 rows][16 outputs].
template <class F, int MATRICES>
struct Exchange {
    float at[F::CHAINS == 1 ? 1 : F::TEAMS][MATRICES][F::CHAINS][F::CHAINS == 1 ? 1 : TILE_VALUES];
};

template <class F>
__device__ __forceinline__ void team_barrier(int team) {
    if constexpr (F::TEAMS == 1) __syncthreads();
    else named_barrier_sync(team + 1, F::WARPS_K * 32);
}

// Multiplies one tile for up to eight rows; ``store(i, output, sums)`` takes each output of row i, before the global
// scale.
template <class F, int MATRICES, int SLOTS, class Row, class Store>
__device__ __forceinline__ void multiply_rows(
    Stream<F, MATRICES, SLOTS>& stream, Exchange<F, MATRICES>& exchange, const Experts (&experts)[MATRICES],
    size_t offset, size_t after, bool has_after, Row& x, int rows, int tile, const Place<F>& at, Store store) {
    if constexpr (F::CHAINS == 1) {
        float sums[MATRICES][4] = {};
        stream.multiply_tile(experts, offset, after, has_after, x, at, [&](int m, int, const float (&own)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][i] = own[i];
        });
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = 2 * at.t + (i & 1), output = tile * TILE_N + at.g + 8 * (i >> 1);
            float values[MATRICES];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) values[m] = sums[m][i];
            if (own < rows && output < at.N) store(own, output, values);
        }
    } else {
        auto& partial = exchange.at[at.team];
        stream.multiply_tile(experts, offset, after, has_after, x, at, [&](int m, int chain, const float (&own)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) partial[m][chain][(2 * at.t + (i & 1)) * TILE_N + at.g + 8 * (i >> 1)] = own[i];
        });
        team_barrier<F>(at.team);
        for (int i = at.warp_k * 32 + at.lane; i < rows * TILE_N; i += F::WARPS_K * 32) {
            const int output = tile * TILE_N + i % TILE_N;
            float totals[MATRICES] = {};
#pragma unroll
            for (int c = 0; c < F::CHAINS; ++c)
#pragma unroll
                for (int m = 0; m < MATRICES; ++m)
                    if (F::STATIC_K > 0 || c < at.chains) totals[m] += partial[m][c][i];
            if (output < at.N) store(i / TILE_N, output, totals);
        }
        team_barrier<F>(at.team);  // before the next tile's sums
    }
}

__device__ __forceinline__ bf16 rounded(float value) { return __float2bfloat16_rn(value); }

// silu(gate) * up of two sums, each rounded to BF16 first.
__device__ __forceinline__ bf16 activated(float gate, float up) {
    gate = __bfloat162float(rounded(gate));
    up = __bfloat162float(rounded(up));
    return rounded(gate * sigmoid(gate) * up);
}

// The splits of K that entry points exist for: name, CHAINS and STATIC_K. The launcher chooses: CHAINS is 1 up to K =
// 512, 2 up to 1024, else 8.
#define FOR_EACH_GATE_UP(ENTRY) ENTRY(k2048, 8, 2048) ENTRY(any, 8, 0)
#define FOR_EACH_DOWN(ENTRY) ENTRY(k512, 1, 512) ENTRY(to_512, 1, 0) ENTRY(to_1024, 2, 0) ENTRY(any, 8, 0)
