// Pairwise experts for small M: each pair of a token and a chosen expert, without a sort. Choices of one expert read
// its weights once. The shared expert of every token may be one more. Used by pairwise.cu and fused_shared.cu. sm_80
// and newer.
//
// Down: a block computes one tile of one token. A team computes one choice, TEAMS choices at a time; two more warps
// compute the shared expert. The prologue is speculative: before pdl_wait it loads the weights of the experts that the
// ids then name, and after it compares the ids. The load is wasted only if the previous kernel has written the ids.
//
// Numerics: experts.cuh. The result of each choice is rounded to BF16, then weighted and added in order of choice in
// FP32, and the sum is rounded. The shared expert sums K in the order of the GEMV that computes it alone; its result is
// rounded to BF16 and added to the rounded sum times its gate.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "../experts/experts.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

constexpr int PAIRWISE_WARPS = 8, PAIRWISE_THREADS = PAIRWISE_WARPS * 32;
constexpr int MAX_SLICES = 20;  // of the GEMV

// The i-th set bit of a mask.
__device__ __forceinline__ int nth_bit(u32 mask, int i) {
    for (; i > 0; --i) mask &= mask - 1;
    return __ffs(mask) - 1;
}

// The summation order of the GEMV (nvfp4_gemv/nvfp4_gemv.cuh): slice c is the supertiles c, c + slices, ... on two
// accumulators. The slices of each rank of a cluster are added, then the ranks. Without clusters there is one rank.
struct GemvOrder {
    int slices, ranks;

    __device__ __forceinline__ GemvOrder(int slices, int ranks) : slices(slices), ranks(ranks) {
#if __CUDA_ARCH__ < 900
        this->ranks = 1;
#endif
    }
    // ``at(c)`` is the sum of slice c. Slices from ``used_slices`` on are empty.
    template <class At>
    __device__ __forceinline__ float total(int used_slices, At at) const {
        if (ranks == 1 && used_slices <= 8) {  // all loads at once
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < 8; ++c)
                if (c < used_slices) sum += at(c);
            return sum;
        }
        const int of_rank = slices / ranks;
        float total = 0.0f;
        for (int first = 0; first < min(slices, used_slices); first += of_rank) {
            float sum = 0.0f;
            for (int c = first; c < min(first + of_rank, used_slices); ++c) sum += at(c);
            total += sum;
        }
        return total;
    }
};

// The row of a token of ``x [M, H]`` in global memory; no row for token -1.
template <class F>
__device__ __forceinline__ GlobalRow<F> global_row(const bf16* x, int token, int H) {
    GlobalRow<F> row;
    row.row = token >= 0 ? x + (size_t)token * H : nullptr;
    return row;
}

// One supertile on A accumulators.
template <int A, class Row, class F>
__device__ __forceinline__ void multiply_supertile(float (&c)[A][1][4], const Supertile& weights, Row& x, int s,
                                                   const WarpPosition<F>& at) {
    x.begin(s, at);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const u32 word = b < 2 ? weights.scales.x : weights.scales.y;
        multiply_block<1>(
            c, weights.codes[b], scale_pair(word, 2 * (b & 1)), scale_pair(word, 2 * (b & 1) + 1), x.block(b, at));
    }
}

// Tiles first, first + TEAMS, ... of the gate and up of an expert, for those of the 32 choices from ``base`` on whose
// bit in ``mask`` is set. ``pipeline`` already loads the first tile. ``row_of(token)`` is the row of a token, none for
// -1.
template <class F, class RowOf>
__device__ __forceinline__ void gate_up_of_choices(
    WeightPipeline<F, 2, 2>& pipeline, SplitKPartials<F, 2>& partials, const Experts (&experts)[2], int expert,
    int base, u32 mask, int first, int tile_end, RowOf row_of, bf16* out, int T, int I, const WarpPosition<F>& at) {
    const int count = __popc(mask);
    const float scale_gate = experts[0].scale(expert), scale_up = experts[1].scale(expert);
    for (int begin = 0; begin < count; begin += GROUP_ROWS) {
        size_t offset = at.offset(expert, first);
        if (begin > 0) pipeline.start(experts, offset, at);
        const int rows = min(GROUP_ROWS, count - begin);
        auto row = row_of(at.g < rows ? (base + nth_bit(mask, begin + at.g)) / T : -1);
#pragma unroll 1
        for (int tile = first; tile < tile_end; tile += F::TEAMS, offset += at.stride())
            multiply_rows(pipeline, partials, experts, offset, offset + at.stride(), tile + F::TEAMS < tile_end, row,
                          rows, tile, at, [&](int i, int output, const float (&sums)[2]) {
                              out[(size_t)(base + nth_bit(mask, begin + i)) * I + output] =
                                  activated(sums[0] * scale_gate, sums[1] * scale_up);
                          });
    }
}

// Arguments of down. Outputs of earlier kernels are not __restrict__, or they would be read before pdl_wait. A null
// ``shared`` means no shared expert.
struct DownArguments {
    const u8* shared;  // [ceil(H/16)][ceil(J/256)][2304]
    float shared_scale;
    const bf16* h;         // [M, T, I]
    const bf16* h_shared;  // [M, J]
    const int* ids;        // [M, T]
    const float* weights;  // [M, T]
    const float* gate;     // [M]
    bf16* out;             // [M, H]
    int E, T, H, I, J;

    // The expert of a choice; -1 if it has none.
    __device__ __forceinline__ int expert(int token, int t) const {
        const int expert = t < T ? load_relaxed(ids + (size_t)token * T + t) : -1;
        return (u32)expert < (u32)E ? expert : -1;
    }
    template <bool SHARED>
    __device__ __forceinline__ void store(int token, int output, float total, float gate, float shared) const {
        if (output >= H) return;
        bf16 value = rounded(total);
        if (SHARED) value = rounded(fmaf(gate, shared, __bfloat162float(value)));
        out[(size_t)token * H + output] = value;
    }
};

// Down with K = 512 in experts and shared expert: a warp computes one choice, and loads all its weights and its row at
// once. Of the shared expert a warp computes one supertile, which is one slice of the GEMV.
constexpr int SHARED_WARPS = 2;

template <bool SHARED>
__device__ __forceinline__ void down_of_512(const Experts& experts, const DownArguments& in) {
    constexpr int K = 512, SUPERTILES = K / TILE_K, WARPS = PAIRWISE_WARPS + (SHARED ? SHARED_WARPS : 0);
    static_assert(SUPERTILES == SHARED_WARPS);
    using F = TileConfig<1, K, PAIRWISE_WARPS>;
    __shared__ __align__(16) bf16 rows[WARPS][K];
    __shared__ float results[WARPS][TILE_N], choice_weights[PAIRWISE_WARPS];
    __shared__ bool is_valid[PAIRWISE_WARPS];
    pdl_launch_dependents();
    const WarpPosition<F> at(in.H, K);
    const int tile = blockIdx.x, token = blockIdx.y, warp = threadIdx.x >> 5, T = in.T;
    const bool is_shared = SHARED && warp >= PAIRWISE_WARPS;
    const int slice = warp - PAIRWISE_WARPS;
    const size_t tile_bytes = SUPERTILES * SUPERTILE_BYTES;
    Supertile weights[SUPERTILES];
    float scale = 1.0f;
    const auto start = [&](int expert) {
        const u8* weight = experts.data + ((size_t)expert * at.tiles + tile) * tile_bytes;
#pragma unroll
        for (int s = 0; s < SUPERTILES; ++s) weights[s].load(weight + s * SUPERTILE_BYTES, at.lane);
        scale = experts.scale(expert);
    };
    int loaded = -1;
    if (is_shared) weights[0].load(in.shared + tile * tile_bytes + slice * SUPERTILE_BYTES, at.lane);
    else loaded = in.expert(token, warp);
    if (loaded >= 0) start(loaded);
    pdl_wait();
    const float gate = SHARED ? in.gate[token] : 0.0f;
    float total = 0.0f;
    for (int first = 0; first < T; first += PAIRWISE_WARPS) {
        const int t = first + warp;
        SharedRow<F> x;
        x.row = shared_address(rows[warp]);
        float low, high;  // row 0, outputs g and g + 8
        if (is_shared) {
            if (first == 0) {
                cp_async_16(x.row + at.lane * 16, in.h_shared + (size_t)token * K + slice * TILE_K + at.lane * 8);
                cp_async_commit(), cp_async_wait<0>();
                __syncwarp();
                float c[2][1][4] = {};
                multiply_supertile(c, weights[0], x, 0, at);
                low = c[0][0][0] + c[1][0][0];
                high = c[0][0][2] + c[1][0][2];
            }
        } else if (t < T) {
            const bf16* row = in.h + ((size_t)token * T + t) * K;
#pragma unroll
            for (int i = at.lane * 8; i < K; i += 256) cp_async_16(x.row + i * (u32)sizeof(bf16), row + i);
            const int expert = in.expert(token, t);
            const float choice_weight = in.weights[(size_t)token * T + t];
            if (expert >= 0 && expert != loaded) start(expert);
            loaded = expert;
            cp_async_commit(), cp_async_wait<0>();
            __syncwarp();
            float c[4][1][4] = {};
#pragma unroll
            for (int s = 0; s < SUPERTILES; ++s) multiply_supertile(c, weights[s], x, s, at);
            low = __bfloat162float(rounded(((c[0][0][0] + c[1][0][0]) + (c[2][0][0] + c[3][0][0])) * scale));
            high = __bfloat162float(rounded(((c[0][0][2] + c[1][0][2]) + (c[2][0][2] + c[3][0][2])) * scale));
            if (at.lane == 0) choice_weights[warp] = choice_weight, is_valid[warp] = expert >= 0;
        } else if (at.lane == 0) {
            is_valid[warp] = false;
        }
        if (at.t == 0 && (is_shared ? first == 0 : t < T)) results[warp][at.g] = low, results[warp][at.g + 8] = high;
        __syncthreads();
        if (threadIdx.x < TILE_N) {
#pragma unroll
            for (int c = 0; c < PAIRWISE_WARPS; ++c) {  // no branch: loads after a branch would be serialised
                const float sum = fmaf(results[c][threadIdx.x], choice_weights[c], total);
                total = is_valid[c] ? sum : total;
            }
        }
        if (first + PAIRWISE_WARPS < T) __syncthreads();
    }
    if (threadIdx.x >= TILE_N) return;  // no barrier follows
    float shared = 0.0f;
    if constexpr (SHARED)
#pragma unroll
        for (int c = 0; c < SHARED_WARPS; ++c) shared += results[PAIRWISE_WARPS + c][threadIdx.x];
    shared = __bfloat162float(rounded(shared * (in.shared_scale * EXPONENT_GAP)));
    in.store<SHARED>(token, tile * TILE_N + threadIdx.x, total, gate, shared);
}

// Down with any K.
template <class F, bool SHARED>
__device__ __forceinline__ void down_of_any(const Experts& expert_weights, const DownArguments& in, GemvOrder order) {
    using G = TileConfig<1, 0, 1>;
    const Experts experts[1] = {expert_weights};
    __shared__ float partial[F::TEAMS][F::SLICES][TILE_N], shared_partials[SHARED ? MAX_SLICES : 1][TILE_N];
    __shared__ float scales[F::TEAMS], choice_weights[F::TEAMS];  // of the current choices
    __shared__ bool is_valid[F::TEAMS];
    pdl_launch_dependents();
    const WarpPosition<F> at(in.H, in.I);
    const WarpPosition<G> at_shared(in.H, in.J);
    const int tile = blockIdx.x, token = blockIdx.y, T = in.T;
    const int used_slices = min(order.slices, at_shared.supertiles);
    const bool is_shared = SHARED && threadIdx.x >= PAIRWISE_THREADS;
    const int first_slice = (int)(threadIdx.x - PAIRWISE_THREADS) >> 5;
    WeightPipeline<F, 1, 1> pipeline;
    const int speculative = is_shared ? -1 : in.expert(token, at.team);
    if (speculative >= 0) pipeline.start(experts, at.offset(speculative, tile), at);
    pdl_wait();
    const float gate = SHARED ? in.gate[token] : 0.0f;
    if (is_shared) {
        GlobalRow<G> row;
        row.row = at.g == 0 ? in.h_shared + (size_t)token * in.J : nullptr;
        const u8* weight = in.shared + (size_t)tile * at_shared.supertiles * SUPERTILE_BYTES;
        for (int slice = first_slice; slice < used_slices; slice += SHARED_WARPS) {
            float c[2][1][4] = {};
            for (int s = slice; s < at_shared.supertiles; s += order.slices) {
                Supertile supertile;
                supertile.load(weight + (size_t)s * SUPERTILE_BYTES, at.lane);
                multiply_supertile(c, supertile, row, s, at_shared);
            }
            if (at.t > 0) continue;
            shared_partials[slice][at.g] = c[0][0][0] + c[1][0][0];
            shared_partials[slice][at.g + 8] = c[0][0][2] + c[1][0][2];
        }
    }
    float total = 0.0f;
    for (int first = 0; first < T; first += F::TEAMS) {
        const int t = first + at.team, expert = is_shared ? -1 : in.expert(token, t);
        if (!is_shared && at.warp_k == 0 && at.lane == 0) {
            is_valid[at.team] = expert >= 0;
            scales[at.team] = expert >= 0 ? experts[0].scale(expert) : 0.0f;
            choice_weights[at.team] = t < T ? in.weights[(size_t)token * T + t] : 0.0f;
        }
        if (expert >= 0) {
            const size_t offset = at.offset(expert, tile);
            if (first > 0 || expert != speculative) pipeline.start(experts, offset, at);
            GlobalRow<F> row;
            row.row = at.g == 0 ? in.h + ((size_t)token * T + t) * in.I : nullptr;
            pipeline.multiply_tile(
                experts, offset, offset, false, row, at, [&](int, int slice, const float (&sums)[4]) {
                    if (at.t > 0) return;  // row 0, outputs g and g + 8
                    partial[at.team][slice][at.g] = sums[0];
                    partial[at.team][slice][at.g + 8] = sums[2];
                });
        }
        __syncthreads();
        for (int c = 0; threadIdx.x < TILE_N && c < min(F::TEAMS, T - first); ++c) {
            if (!is_valid[c]) continue;
            float sum = 0.0f;
#pragma unroll
            for (int slice = 0; slice < F::SLICES; ++slice)
                if (F::STATIC_K > 0 || slice < at.slices) sum += partial[c][slice][threadIdx.x];
            total = fmaf(__bfloat162float(rounded(sum * scales[c])), choice_weights[c], total);
        }
        if (first + F::TEAMS < T) __syncthreads();
    }
    if (threadIdx.x >= TILE_N) return;  // no barrier follows
    float shared = 0.0f;
    if (SHARED)
        shared = order.total(used_slices, [&](int c) { return shared_partials[c][threadIdx.x]; }) *
                 (in.shared_scale * EXPONENT_GAP);
    in.store<SHARED>(token, tile * TILE_N + threadIdx.x, total, gate, __bfloat162float(rounded(shared)));
}

template <class F, bool SHARED>
__device__ __forceinline__ void pairwise_down(const Experts& experts, const DownArguments& in, GemvOrder order) {
    if constexpr (F::SLICES == 1 && F::STATIC_K == 512) down_of_512<SHARED>(experts, in);
    else down_of_any<F, SHARED>(experts, in, order);
}
