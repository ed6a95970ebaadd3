// A step's experts of up to four tokens in two launches: the router's choice and gate and up of what it chose, then
// down, each with the shared expert as one more expert. Launched by fused_launch.py. sm_80 and newer.
//
// Gate and up: the first blocks have the shared expert. Its weights do not depend on the choice: the first tile is on
// its way, and the others are on theirs to L2, before the launch ahead has ended. They also have the shared expert's
// gate, a token a block. Every other block chooses for itself (topk.cuh), which takes less time than a launch that
// chooses for all; then it has some tiles of one choice's expert, for all choices of it, unless an earlier choice is of
// the same expert. Grid: shared blocks + ceil(tiles / teams / repeats) * M T. A supertile of each matrix is on its way.
// Down: pairwise.cuh. Grid: (tiles, M).
//
// Numerics: topk.cuh, pairwise.cuh, and for the gate combine.cu; every result has the bits of the launches that compute
// it alone. What a launch before wrote is not __restrict__: a load of what nobody else writes may be moved before the
// wait.
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
// Two blocks a multiprocessor.
#define GATE_UP_BOUNDS __launch_bounds__(PAIRWISE_THREADS, 2)
#define DOWN_BOUNDS __launch_bounds__(PAIRWISE_THREADS + 32 * SHARED_WARPS, 2)

template <class F>
__device__ __forceinline__ void prefetch_supertile(const u8* p, const Place<F>& at) {
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
    for (int piece = threadIdx.x; piece < H / 8; piece += PAIRWISE_THREADS) {
        const Values<8> v = load<8>(x, piece), w = load<8>(gate_weight, piece);
#pragma unroll
        for (int i = 0; i < 8; ++i) dot = fmaf(v.at[i], w.at[i], dot);
    }
    return sigmoid(block_sum(dot, partial));
}

// The rows of x for all threads of a block: on their way to shared memory where K is known when compiled, a little
// apart, so that lanes of different rows read different banks; else they are read where they are. ``fetch`` begins,
// ``wait`` comes before the block's next barrier, and that before the first row.
template <class F>
struct Rows {
    static constexpr int STRIDE = F::STATIC_K + 8;
    const bf16* x;  // [M, H]
    int H;

    static __device__ __forceinline__ u32 place(int token, int k) {
        __shared__ __align__(16) bf16 rows[F::STATIC_K > 0 ? MAX_TOKENS * STRIDE : 8];
        return shared_address(rows) + (token * STRIDE + k) * (u32)sizeof(bf16);
    }
    __device__ __forceinline__ void fetch(int M) const {
        if constexpr (F::STATIC_K > 0)
#pragma unroll 1
            for (int token = 0; token < M; ++token)
#pragma unroll 1
                for (int k = threadIdx.x * 8; k < F::STATIC_K; k += PAIRWISE_THREADS * 8)
                    cp_async_16(place(token, k), x + (size_t)token * F::STATIC_K + k);
    }
    static __device__ __forceinline__ void wait() {
        if constexpr (F::STATIC_K > 0) cp_async_commit(), cp_async_wait<0>();
    }
    __device__ __forceinline__ auto of(int token) const {
        if constexpr (F::STATIC_K > 0) {
            SharedRow<F> row;
            row.row = place(max(token, 0), 0);
            return row;
        } else {
            return global_row<F>(x, token, H);
        }
    }
};

// Tiles blockIdx.x, blockIdx.x + blocks, ... of the shared expert's gate and up, a chain a warp at a time.
template <class F>
__device__ __forceinline__ void shared_gate_up(const SharedExpert& shared, const bf16* x, int M, int H,
                                               GemvOrder order) {
    __shared__ float partial[2][MAX_CHAINS][MAX_TOKENS][TILE_N], sums[PAIRWISE_WARPS];
    const Place<F> at(shared.J, H);
    const int warp = threadIdx.x >> 5, there = min(order.chains, at.supertiles);
    const auto place = [&](int tile, int s) { return ((size_t)tile * at.supertiles + s) * SUPERTILE_BYTES; };
    Supertile gate, up;
    if (warp < there) {
        gate.load(shared.gate + place(blockIdx.x, warp), at.lane);
        up.load(shared.up + place(blockIdx.x, warp), at.lane);
    }
    for (int tile = blockIdx.x + shared.blocks; tile < at.tiles; tile += shared.blocks)
        for (int s = warp; s < at.supertiles; s += PAIRWISE_WARPS) {
            prefetch_supertile(shared.gate + place(tile, s), at);
            prefetch_supertile(shared.up + place(tile, s), at);
        }
    for (int i = threadIdx.x * 64; i < H; i += PAIRWISE_THREADS * 64) prefetch_l2(shared.gate_weight + i);
    pdl_wait();
    const Rows<F> rows{x, H};
    rows.fetch(M);
    rows.wait();
    __syncthreads();
    auto row = rows.of(at.g < M ? at.g : -1);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < at.tiles; tile += shared.blocks) {
#pragma unroll 1
        for (int chain = warp; chain < there; chain += PAIRWISE_WARPS) {
            float c[2][2][1][4] = {};
#pragma unroll 1
            for (int s = chain; s < at.supertiles; s += order.chains) {
                int next_tile = tile,
                    next = s + order.chains;  // of this chain, else of the next one, else of the next tile
                if (next >= at.supertiles) {
                    next = chain + PAIRWISE_WARPS;
                    if (next >= there) next = warp, next_tile += shared.blocks;
                }
                const bool has_next = next_tile < at.tiles;
                const u8 *next_gate = shared.gate + place(next_tile, next),
                         *next_up = shared.up + place(next_tile, next);
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
                    const int own = 2 * at.t + (i & 1);
                    if (own < M) partial[m][chain][own][at.g + 8 * (i >> 1)] = c[m][0][0][i] + c[m][1][0][i];
                }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < M * TILE_N; i += PAIRWISE_THREADS) {
            const int own = i / TILE_N, column = i % TILE_N, output = tile * TILE_N + column;
            const float g = order.total(there, [&](int c) { return partial[0][c][own][column]; });
            const float u = order.total(there, [&](int c) { return partial[1][c][own][column]; });
            if (output < shared.J)
                shared.out[(size_t)own * shared.J + output] =
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

// Where the router's choices come from and go to.
struct Routing {
    const void* logits;  // [M, E] BF16 or FP32
    bool is_f32;
    int* ids;        // [M, T]
    float* weights;  // [M, T]

    template <class T>
    __device__ __forceinline__ Scores<T, false> scores(int token, int E) const {
        return {reinterpret_cast<const T*>(logits) + (size_t)token * E, nullptr};
    }
    __device__ __forceinline__ OwnChoice choose(int token, int E, int T, u32& largest, WordSpace& space,
                                                int lane) const {
        if (is_f32) {
            const auto of_token = scores<float>(token, E);
            HeldExperts<Scores<float, false>> source(of_token, E, lane);
            return take(source, T, largest, lane);
        }
        return choose_words(scores<bf16>(token, E).logits, E, T, largest, space, lane);
    }
    // For a warp that has the choices of a token.
    __device__ __forceinline__ void store(int token, const OwnChoice& own, u32 largest, int T, int lane) const {
        const float weight = own.expert >= 0 ? expf(value_of(own.key) - value_of(largest)) : 0.0f;
        const float sum = sum_in_order(0.0f, weight, T);
        if (lane >= T) return;
        ids[(size_t)token * T + lane] = max(own.expert, 0);
        weights[(size_t)token * T + lane] = renormalised(weight, sum);
    }
};

template <class F>
__device__ __forceinline__ void routed_gate_up(const Experts (&experts)[2], const Routing& routing, const bf16* x,
                                               bf16* out, int block, int M, int E, int T, int I, int H, int repeats,
                                               int blocks) {
    __shared__ Exchange<F, 2> exchange;
    __shared__ int ids[MAX_TOKENS * MAX_CHOICES];
    __shared__ WordSpace spaces[MAX_TOKENS];
    const Place<F> at(I, H);
    const int own = block / blocks, block_first = block % blocks * F::TEAMS * repeats, warp = threadIdx.x >> 5;
    const int tile_end = min(block_first + F::TEAMS * repeats, at.tiles), first = block_first + at.team, S = M * T;
    // Where the lane reads of expert 0. The expert is all that is waited for, so that little is left to do then.
    const u32 expert_bytes = at.tiles * at.supertiles * SUPERTILE_BYTES;
    const u8 *codes[2], *scales[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        codes[m] = experts[m].data + at.offset(0, first) + at.lane * 16;
        scales[m] = experts[m].data + at.offset(0, first) + CODE_BYTES + at.lane * 8;
        make_opaque(codes[m]), make_opaque(scales[m]);
    }
    OwnChoice choice;
    u32 largest = 0;
    pdl_wait();
    const Rows<F> rows{x, H};
    rows.fetch(M);
    if (warp < M) {
        choice = routing.choose(warp, E, T, largest, spaces[warp], at.lane);
        if (at.lane < T) ids[warp * T + at.lane] = max(choice.expert, 0);
    }
    rows.wait();
    __syncthreads();
    const int expert = ids[own], base = own / 32 * 32, slot = base + at.lane;
    Stream<F, 2, 2> stream;
    const auto start = [&] {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            codes[m] += (size_t)(u32)expert * expert_bytes, scales[m] += (size_t)(u32)expert * expert_bytes;
            make_opaque(codes[m]), make_opaque(scales[m]);
        }
        stream.start_at(codes, scales, at);
    };
    if (M == 1 && first < tile_end) start();
    const u32 mask = __ballot_sync(0xffffffffu, slot < S && ids[slot] == expert);
    // Choices of an earlier choice's expert are another block's; a token's are of different ones.
    const bool has_work = base + __ffs(mask) - 1 == own && first < tile_end;
    if (M > 1 && has_work) start();
    if (block == 0 && warp < M) routing.store(warp, choice, largest, T, at.lane);
    if (!has_work) return;  // all of its team: no barrier of theirs follows
    const auto row_of = [&](int token) { return rows.of(token); };
    gate_up_of_choices(stream, exchange, experts, expert, base, mask, first, tile_end, row_of, out, T, I, at);
}

#define FUSED_GATE_UP(NAME, CHAINS, STATIC_K)                                                                        \
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
        int repeats, int blocks, int shared_blocks, int gemv_chains, int gemv_ranks) {                               \
        using F = Form<CHAINS, STATIC_K, PAIRWISE_WARPS>;                                                            \
        pdl_launch_dependents();                                                                                     \
        if (blockIdx.x < shared_blocks) {                                                                            \
            const SharedExpert shared{                                                                               \
                shared_gate, shared_up, shared_gate_scale, shared_up_scale, gate_weight, out_shared,                 \
                out_gate,    J,         shared_blocks};                                                              \
            shared_gate_up<F>(shared, x, M, H, GemvOrder(gemv_chains, gemv_ranks));                                  \
        } else {                                                                                                     \
            const Experts experts[2] = {{gate, gate_scale}, {up, up_scale}};                                         \
            const Routing routing{logits, is_f32 != 0, ids, weights};                                                \
            routed_gate_up<F>(experts, routing, x, out, blockIdx.x - shared_blocks, M, E, T, I, H, repeats, blocks); \
        }                                                                                                            \
    }

#define FUSED_DOWN(NAME, CHAINS, STATIC_K)                                                                 \
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
        float shared_scale, int E, int T, int H, int I, int J, int gemv_chains, int gemv_ranks) {          \
        const DownArguments in{shared, shared_scale, h, h_shared, ids, weights, gate, out, E, T, H, I, J}; \
        pairwise_down<Form<CHAINS, STATIC_K, PAIRWISE_WARPS>, true>(                                       \
            {down, down_scale}, in, GemvOrder(gemv_chains, gemv_ranks));                                   \
    }

FOR_EACH_GATE_UP(FUSED_GATE_UP)
FOR_EACH_DOWN(FUSED_DOWN)
