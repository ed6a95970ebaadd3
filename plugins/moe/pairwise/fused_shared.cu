// The experts of a decode step of up to four tokens in two fused launches: router top-k with gate and up, then down,
// each with the shared expert as one more expert. Launched by fused_launch.py. sm_80 and newer.
//
// Gate and up: the first blocks compute the shared expert. Its weights do not depend on the router, so that the
// prologue loads the first tile and prefetches the others into L2 before pdl_wait. These blocks also compute the gate
// of the shared expert, one token in a block. Every other block runs the top-k itself (topk.cuh), which takes less time
// than a separate launch. It then computes some tiles of the expert of one choice, for all choices of that expert; the
// blocks of the later choices return. Grid: shared blocks + ceil(tiles / TEAMS / repeats) * M T. Down: pairwise.cuh.
// Grid: (tiles, M).
//
// Numerics: topk.cuh, pairwise.cuh, and combine.cu for the gate. Every result has the bits of the separate launches.
// Outputs of earlier kernels are not __restrict__: the compiler moves loads of __restrict__ memory before pdl_wait.
#include "async_copy.cuh"
#include "bf16.cuh"
#include "global_memory.cuh"
#include "opaque.cuh"
#include "pairwise.cuh"
#include "pdl.cuh"
#include "reduce.cuh"
#include "shared_memory.cuh"
#include "../router/topk.cuh"

constexpr int MAX_TOKENS = 4, MAX_CHOICES = 32;
constexpr int FUSED_BLOCKS = 2;  // a multiprocessor
#define GATE_UP_BOUNDS __launch_bounds__(PAIRWISE_THREADS, FUSED_BLOCKS)
#define DOWN_BOUNDS __launch_bounds__(PAIRWISE_THREADS + 32 * SHARED_WARPS, FUSED_BLOCKS)

template <class F>
__device__ __forceinline__ void prefetch_supertile(const u8* p, const WarpPosition<F>& at) {
    for (int byte = at.lane * 128; byte < SUPERTILE_BYTES; byte += 32 * 128) prefetch_l2(p + byte);
}

struct SharedExpert {
    const u8 *gate, *up;  // [ceil(J/16)][ceil(H/256)][2304]
    float gate_scale, up_scale;
    const bf16* gate_weight;  // [H]
    bf16* out;                // [M, J]
    float* out_gate;          // [M]
    int J, blocks;
};

// sigmoid(x . gate_weight) of one row, summed as combine.cu does. For all threads of a block.
__device__ __forceinline__ float shared_gate(const bf16* x, const bf16* gate_weight, int H,
                                             float (&partial)[PAIRWISE_WARPS]) {
    float dot = 0.0f;
    for (int chunk = threadIdx.x; chunk < H / 8; chunk += PAIRWISE_THREADS) {
        const Values<8> v = load<8>(x, chunk), w = load<8>(gate_weight, chunk);
#pragma unroll
        for (int i = 0; i < 8; ++i) dot = fmaf(v.at[i], w.at[i], dot);
    }
    return sigmoid(block_sum(dot, partial));
}

// The rows of x, for all threads of a block. With K known at compile time they are copied to shared memory, padded
// against bank conflicts; otherwise they are read from global memory. Call ``fetch``, ``wait``, a barrier, then ``of``.
template <class F>
struct InputRows {
    static constexpr int STRIDE = F::STATIC_K + 8;
    const bf16* x;  // [M, H]
    int H;

    static __device__ __forceinline__ u32 offset_of(int token, int k) {
        __shared__ __align__(16) bf16 rows[F::STATIC_K > 0 ? MAX_TOKENS * STRIDE : 8];
        return shared_address(rows) + (token * STRIDE + k) * (u32)sizeof(bf16);
    }
    __device__ __forceinline__ void fetch(int M) const {
        if constexpr (F::STATIC_K > 0)
#pragma unroll 1
            for (int token = 0; token < M; ++token)
#pragma unroll 1
                for (int k = threadIdx.x * 8; k < F::STATIC_K; k += PAIRWISE_THREADS * 8)
                    cp_async_16(offset_of(token, k), x + (size_t)token * F::STATIC_K + k);
    }
    static __device__ __forceinline__ void wait() {
        if constexpr (F::STATIC_K > 0) cp_async_commit(), cp_async_wait<0>();
    }
    __device__ __forceinline__ auto of(int token) const {
        if constexpr (F::STATIC_K > 0) {
            SharedRow<F> row;
            row.row = offset_of(max(token, 0), 0);
            return row;
        } else {
            return global_row<F>(x, token, H);
        }
    }
};

// Tiles blockIdx.x, blockIdx.x + blocks, ... of the gate and up of the shared expert, one slice in a warp at a time.
template <class F>
__device__ __forceinline__ void shared_gate_up(const SharedExpert& shared, const bf16* x, int M, int H,
                                               GemvOrder order) {
    __shared__ float partial[2][MAX_SLICES][MAX_TOKENS][TILE_N], sums[PAIRWISE_WARPS];
    const WarpPosition<F> at(shared.J, H);
    const int warp = threadIdx.x >> 5, used_slices = min(order.slices, at.supertiles);
    const auto offset_of = [&](int tile, int s) { return ((size_t)tile * at.supertiles + s) * SUPERTILE_BYTES; };
    Supertile gate, up;
    if (warp < used_slices) {
        gate.load(shared.gate + offset_of(blockIdx.x, warp), at.lane);
        up.load(shared.up + offset_of(blockIdx.x, warp), at.lane);
    }
    for (int tile = blockIdx.x + shared.blocks; tile < at.tiles; tile += shared.blocks)
        for (int s = warp; s < at.supertiles; s += PAIRWISE_WARPS) {
            prefetch_supertile(shared.gate + offset_of(tile, s), at);
            prefetch_supertile(shared.up + offset_of(tile, s), at);
        }
    for (int i = threadIdx.x * 64; i < H; i += PAIRWISE_THREADS * 64) prefetch_l2(shared.gate_weight + i);
    pdl_wait();
    const InputRows<F> rows{x, H};
    rows.fetch(M);
    rows.wait();
    __syncthreads();
    auto row = rows.of(at.g < M ? at.g : -1);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < at.tiles; tile += shared.blocks) {
#pragma unroll 1
        for (int slice = warp; slice < used_slices; slice += PAIRWISE_WARPS) {
            float c[2][2][1][4] = {};
#pragma unroll 1
            for (int s = slice; s < at.supertiles; s += order.slices) {
                int next_tile = tile,
                    next = s + order.slices;  // in this slice, else in the next slice, else in the next tile
                if (next >= at.supertiles) {
                    next = slice + PAIRWISE_WARPS;
                    if (next >= used_slices) next = warp, next_tile += shared.blocks;
                }
                const bool has_next = next_tile < at.tiles;
                const u8 *next_gate = shared.gate + offset_of(next_tile, next),
                         *next_up = shared.up + offset_of(next_tile, next);
                row.begin(s, at);
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const auto& xs = row.block(b, at);
                    const u32 word = b < 2 ? gate.scales.x : gate.scales.y;
                    multiply_block<1>(
                        c[0], gate.codes[b], scale_pair(word, 2 * (b & 1)), scale_pair(word, 2 * (b & 1) + 1), xs);
                    if (has_next) gate.load_block(next_gate, b, at.lane);
                    const u32 other = b < 2 ? up.scales.x : up.scales.y;
                    multiply_block<1>(
                        c[1], up.codes[b], scale_pair(other, 2 * (b & 1)), scale_pair(other, 2 * (b & 1) + 1), xs);
                    if (has_next) up.load_block(next_up, b, at.lane);
                }
                if (has_next) {
                    gate.scales = load_scales(next_gate + CODE_BYTES + at.lane * 8);
                    up.scales = load_scales(next_up + CODE_BYTES + at.lane * 8);
                }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = 2 * at.t + (i & 1);
                    if (row < M) partial[m][slice][row][at.g + 8 * (i >> 1)] = c[m][0][0][i] + c[m][1][0][i];
                }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < M * TILE_N; i += PAIRWISE_THREADS) {
            const int token = i / TILE_N, column = i % TILE_N, output = tile * TILE_N + column;
            const float g = order.total(used_slices, [&](int c) { return partial[0][c][token][column]; });
            const float u = order.total(used_slices, [&](int c) { return partial[1][c][token][column]; });
            if (output < shared.J)
                shared.out[(size_t)token * shared.J + output] =
                    activated(g * (shared.gate_scale * EXPONENT_GAP), u * (shared.up_scale * EXPONENT_GAP));
        }
        __syncthreads();
    }
    for (int token = blockIdx.x; token < M; token += shared.blocks) {
        const float gate_of_token = shared_gate(x + (size_t)token * H, shared.gate_weight, H, sums);
        if (threadIdx.x == 0) shared.out_gate[token] = gate_of_token;
        __syncthreads();
    }
}

// Inputs and outputs of the router.
struct Routing {
    const void* logits;  // [M, E] BF16 or FP32
    bool is_f32;
    int* ids;        // [M, T]
    float* weights;  // [M, T]

    template <class T>
    __device__ __forceinline__ Scores<T, false> scores(int token, int E) const {
        return {reinterpret_cast<const T*>(logits) + (size_t)token * E, nullptr};
    }
    __device__ __forceinline__ LaneChoice choose(int token, int E, int T, u32& largest, PackedKeys& packed_keys,
                                                 int lane) const {
        if (is_f32) {
            const auto of_token = scores<float>(token, E);
            RegisterScores<Scores<float, false>> source(of_token, E, lane);
            return take_choices(source, T, largest, lane);
        }
        return choose_packed(scores<bf16>(token, E).logits, E, T, largest, packed_keys, lane);
    }
    // By the warp that has chosen for a token.
    __device__ __forceinline__ void store(int token, const LaneChoice& choice, u32 largest, int T, int lane) const {
        const float weight = choice.expert >= 0 ? expf(value_of(choice.key) - value_of(largest)) : 0.0f;
        const float sum = sum_in_order(0.0f, weight, T);
        if (lane >= T) return;
        ids[(size_t)token * T + lane] = max(choice.expert, 0);
        weights[(size_t)token * T + lane] = renormalised(weight, sum);
    }
};

template <class F>
__device__ __forceinline__ void routed_gate_up(const Experts (&experts)[2], const Routing& routing, const bf16* x,
                                               bf16* out, int block, int M, int E, int T, int I, int H, int repeats,
                                               int blocks) {
    __shared__ SplitKPartials<F, 2> partials;
    __shared__ int ids[MAX_TOKENS * MAX_CHOICES];
    __shared__ PackedKeys packed_keys[MAX_TOKENS];
    const WarpPosition<F> at(I, H);
    const int block_choice = block / blocks, block_first = block % blocks * F::TEAMS * repeats, warp = threadIdx.x >> 5;
    const int tile_end = min(block_first + F::TEAMS * repeats, at.tiles), first = block_first + at.team, S = M * T;
    // The addresses of the lane in expert 0. Only the expert is unknown before pdl_wait: little is left to compute
    // then.
    const u32 expert_bytes = at.tiles * at.supertiles * SUPERTILE_BYTES;
    const u8 *codes[2], *scales[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        codes[m] = experts[m].data + at.offset(0, first) + at.lane * 16;
        scales[m] = experts[m].data + at.offset(0, first) + CODE_BYTES + at.lane * 8;
        make_opaque(codes[m]), make_opaque(scales[m]);
    }
    LaneChoice choice;
    u32 largest = 0;
    pdl_wait();
    const InputRows<F> rows{x, H};
    rows.fetch(M);
    if (warp < M) {
        choice = routing.choose(warp, E, T, largest, packed_keys[warp], at.lane);
        if (at.lane < T) ids[warp * T + at.lane] = max(choice.expert, 0);
    }
    rows.wait();
    __syncthreads();
    const int expert = ids[block_choice], base = block_choice / 32 * 32, slot = base + at.lane;
    WeightPipeline<F, 2, 2> pipeline;
    const auto start = [&] {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            codes[m] += (size_t)(u32)expert * expert_bytes, scales[m] += (size_t)(u32)expert * expert_bytes;
            make_opaque(codes[m]), make_opaque(scales[m]);
        }
        pipeline.start_at(codes, scales, at);
    };
    if (M == 1 && first < tile_end) start();
    const u32 mask = __ballot_sync(0xffffffffu, slot < S && ids[slot] == expert);
    // The block of the first choice of an expert does the work. The choices of one token are different experts.
    const bool has_work = base + __ffs(mask) - 1 == block_choice && first < tile_end;
    if (M > 1 && has_work) start();
    if (block == 0 && warp < M) routing.store(warp, choice, largest, T, at.lane);
    if (!has_work) return;  // the whole team: no barrier of the team follows
    const auto row_of = [&](int token) { return rows.of(token); };
    gate_up_of_choices(pipeline, partials, experts, expert, base, mask, first, tile_end, row_of, out, T, I, at);
}

#define FUSED_GATE_UP(NAME, SLICES, STATIC_K)                                                                        \
    extern "C" __global__ void GATE_UP_BOUNDS fused_gate_up_##NAME(                                                  \
        const u8* __restrict__ gate,          /* [E][ceil(I/16)][ceil(H/256)][2304] */                               \
        const u8* __restrict__ up,            /* the same */                                                         \
        const float* __restrict__ gate_scale, /* [E] */                                                              \
        const float* __restrict__ up_scale,   /* [E] */                                                              \
        const u8* __restrict__ shared_gate,   /* [ceil(J/16)][ceil(H/256)][2304] */                                  \
        const u8* __restrict__ shared_up,     /* the same */                                                         \
        const bf16* x,                        /* [M, H] */                                                           \
        const void* logits,                   /* [M, E] BF16 or FP32 */                                              \
        const bf16* __restrict__ gate_weight, /* [H] */                                                              \
        int* __restrict__ ids,                /* [M, T] */                                                           \
        float* __restrict__ weights,          /* [M, T] */                                                           \
        bf16* __restrict__ out,               /* [M, T, I] */                                                        \
        bf16* __restrict__ out_shared,        /* [M, J] */                                                           \
        float* __restrict__ out_gate,         /* [M] */                                                              \
        float shared_gate_scale, float shared_up_scale, int is_f32, int M, int E, int T, int I, int H, int J,        \
        int repeats, int blocks, int shared_blocks, int gemv_slices, int gemv_ranks) {                               \
        using F = TileConfig<SLICES, STATIC_K, PAIRWISE_WARPS>;                                                      \
        pdl_launch_dependents();                                                                                     \
        if (blockIdx.x < shared_blocks) {                                                                            \
            const SharedExpert shared{                                                                               \
                shared_gate, shared_up, shared_gate_scale, shared_up_scale, gate_weight, out_shared,                 \
                out_gate,    J,         shared_blocks};                                                              \
            shared_gate_up<F>(shared, x, M, H, GemvOrder(gemv_slices, gemv_ranks));                                  \
        } else {                                                                                                     \
            const Experts experts[2] = {{gate, gate_scale}, {up, up_scale}};                                         \
            const Routing routing{logits, is_f32 != 0, ids, weights};                                                \
            routed_gate_up<F>(experts, routing, x, out, blockIdx.x - shared_blocks, M, E, T, I, H, repeats, blocks); \
        }                                                                                                            \
    }

#define FUSED_DOWN(NAME, SLICES, STATIC_K)                                                                 \
    extern "C" __global__ void DOWN_BOUNDS fused_down_##NAME(                                              \
        const u8* __restrict__ down,          /* [E][ceil(H/16)][ceil(I/256)][2304] */                     \
        const float* __restrict__ down_scale, /* [E] */                                                    \
        const u8* __restrict__ shared,        /* [ceil(H/16)][ceil(J/256)][2304] */                        \
        const bf16* h,                        /* [M, T, I] */                                              \
        const bf16* h_shared,                 /* [M, J] */                                                 \
        const int* ids,                       /* [M, T] */                                                 \
        const float* weights,                 /* [M, T] */                                                 \
        const float* gate,                    /* [M] */                                                    \
        bf16* __restrict__ out,               /* [M, H] */                                                 \
        float shared_scale, int E, int T, int H, int I, int J, int gemv_slices, int gemv_ranks) {          \
        const DownArguments in{shared, shared_scale, h, h_shared, ids, weights, gate, out, E, T, H, I, J}; \
        pairwise_down<TileConfig<SLICES, STATIC_K, PAIRWISE_WARPS>, true>(                                 \
            {down, down_scale}, in, GemvOrder(gemv_slices, gemv_ranks));                                   \
    }

FOR_EACH_GATE_UP(FUSED_GATE_UP)
FOR_EACH_DOWN(FUSED_DOWN)
