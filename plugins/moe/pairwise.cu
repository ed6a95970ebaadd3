// Pairwise experts: every token and choice for itself, for few tokens; choices of one expert share a read of its weights.
//
// Gate and up: a block has some tiles of one choice's expert, for all choices of it that are in its group of 32; but the
// first of them does the work. Grid: (ceil(tiles / teams / repeats), M T). A supertile of each matrix is on its way.
// Down: a block has one tile of one token; a team has a choice, TEAMS choices at a time. Grid: (tiles, M). It begins before
// the launch ahead of it has ended: it loads the weights of the experts that the ids name by then, and looks again once it
// has ended. Only where it wrote the ids itself was that in vain.
//
// Numerics: experts.cuh; each choice's result is rounded to BF16, then weighted and added in order of choice in FP32. An
// id outside the experts gives zeros. Launched by expert_launch.py. sm_80 and newer.
#include "experts.cuh"

constexpr int PAIRWISE_WARPS = 8;
#define PAIRWISE_BOUNDS __launch_bounds__(PAIRWISE_WARPS * 32, 2)

// The i-th set bit of a mask.
__device__ __forceinline__ int nth_bit(u32 mask, int i) {
    for (; i > 0; --i) mask &= mask - 1;
    return __ffs(mask) - 1;
}

template <class F>
__device__ __forceinline__ void pairwise_gate_up(const Experts (&experts)[2], const bf16* x, const int* ids, bf16* out,
                                                 int E, int S, int T, int I, int H, int repeats) {
    __shared__ Exchange<F, 2> exchange;
    allow_next_launch();
    wait_for_previous_launch();
    const Place<F> at(I, H);
    const int own = blockIdx.y, expert = ids[own], block_first = blockIdx.x * F::TEAMS * repeats;
    const int tile_end = min(block_first + F::TEAMS * repeats, at.tiles), first = block_first + at.team;
    if ((u32)expert >= (u32)E) {
        for (int output = block_first * TILE_N + threadIdx.x; output < min(tile_end * TILE_N, I); output += F::THREADS)
            out[(size_t)own * I + output] = rounded(0.0f);
        return;  // no barrier follows
    }
    if (first >= tile_end) return;  // all of its team: no barrier of theirs follows
    Stream<F, 2, 2> stream;
    stream.start(experts, at.offset(expert, first), at);
    const int base = own / 32 * 32, slot = base + at.lane;
    const u32 mask = __ballot_sync(0xffffffffu, slot < S && ids[slot] == expert);
    if (base + __ffs(mask) - 1 != own) return;  // another block's; the same for all warps
    const int count = __popc(mask);
    const float scale_gate = experts[0].scale(expert), scale_up = experts[1].scale(expert);
    for (int begin = 0; begin < count; begin += GROUP_ROWS) {
        size_t offset = at.offset(expert, first);
        if (begin > 0) stream.start(experts, offset, at);
        const int rows = min(GROUP_ROWS, count - begin);
        GlobalRow<F> row;
        row.row = at.g < rows ? x + (size_t)((base + nth_bit(mask, begin + at.g)) / T) * H : nullptr;
#pragma unroll 1
        for (int tile = first; tile < tile_end; tile += F::TEAMS, offset += at.stride())
            multiply_rows(stream, exchange, experts, offset, offset + at.stride(), tile + F::TEAMS < tile_end, row, rows, tile,
                          at, [&](int i, int output, const float (&sums)[2]) {
                              out[(size_t)(base + nth_bit(mask, begin + i)) * I + output] =
                                  activated(sums[0] * scale_gate, sums[1] * scale_up);
                          });
    }
}

// A tile of one matrix that a warp has whole, all of it on its way at once.
template <class F>
struct WholeTile {
    static constexpr int SUPERTILES = F::STATIC_K / TILE_K;
    Supertile parts[SUPERTILES];

    __device__ __forceinline__ void start(const Experts (&experts)[1], size_t tile, const Place<F>& at) {
#pragma unroll
        for (int s = 0; s < SUPERTILES; ++s) parts[s].load(experts[0].data + tile + s * SUPERTILE_BYTES, at.lane);
    }
    template <class Row, class Finish>
    __device__ __forceinline__ void multiply_tile(const Experts (&)[1], size_t, size_t, bool, Row& x, const Place<F>& at,
                                                  Finish finish) {
        float c[4][1][4] = {}, sums[4];
#pragma unroll
        for (int s = 0; s < SUPERTILES; ++s) {
            x.begin(s, at);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const u32 word = b < 2 ? parts[s].scales.x : parts[s].scales.y;
                multiply_block<1>(c, parts[s].codes[b], scale_pair(word, 2 * (b & 1)), scale_pair(word, 2 * (b & 1) + 1),
                                  x.block(b, at));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = (c[0][0][i] + c[1][0][i]) + (c[2][0][i] + c[3][0][i]);
        finish(0, 0, sums);
    }
};

template <class F, class Weights>
__device__ __forceinline__ void pairwise_down(Weights& stream, const Experts (&experts)[1], const bf16* h, const int* ids,
                                              const float* weights, bf16* out, int E, int T, int H, int I) {
    __shared__ float partial[F::TEAMS][F::CHAINS][TILE_N];
    __shared__ float scales[F::TEAMS], shares[F::TEAMS];  // of the choices at hand: no scale, no such expert
    allow_next_launch();
    const Place<F> at(H, I);
    const int tile = blockIdx.x, token = blockIdx.y;
    ids += (size_t)token * T, weights += (size_t)token * T, h += (size_t)token * T * I;
    const auto expert_of = [&](int t) {
        const int expert = t < T ? load_fresh(ids + t) : -1;
        return (u32)expert < (u32)E ? expert : -1;
    };
    const int early = expert_of(at.team);
    if (early >= 0) stream.start(experts, at.offset(early, tile), at);
    wait_for_previous_launch();
    float total = 0.0f;
    for (int first = 0; first < T; first += F::TEAMS) {
        const int t = first + at.team, expert = expert_of(t);
        if (at.warp_k == 0 && at.lane == 0) {
            scales[at.team] = expert >= 0 ? experts[0].scale(expert) : 0.0f;
            shares[at.team] = t < T ? weights[t] : 0.0f;
        }
        if (expert >= 0) {
            const size_t offset = at.offset(expert, tile);
            if (first > 0 || expert != early) stream.start(experts, offset, at);
            GlobalRow<F> row;
            row.row = at.g == 0 ? h + (size_t)t * I : nullptr;
            stream.multiply_tile(experts, offset, offset, false, row, at, [&](int, int chain, const float (&sums)[4]) {
                if (at.t > 0) return;  // row 0, outputs g and g + 8
                partial[at.team][chain][at.g] = sums[0];
                partial[at.team][chain][at.g + 8] = sums[2];
            });
        }
        __syncthreads();
        for (int c = 0; threadIdx.x < TILE_N && c < min(F::TEAMS, T - first); ++c) {
            if (scales[c] == 0.0f) continue;
            float sum = 0.0f;
#pragma unroll
            for (int chain = 0; chain < F::CHAINS; ++chain)
                if (F::STATIC_K > 0 || chain < at.chains) sum += partial[c][chain][threadIdx.x];
            total = fmaf(__bfloat162float(rounded(sum * scales[c])), shares[c], total);
        }
        if (first + F::TEAMS < T) __syncthreads();
    }
    const int output = tile * TILE_N + threadIdx.x;
    if (threadIdx.x < TILE_N && output < H) out[(size_t)token * H + output] = rounded(total);
}

#define PAIRWISE(NAME, CHAINS, STATIC_K)                                                                           \
    extern "C" __global__ void PAIRWISE_BOUNDS pairwise_gate_up_##NAME(                                            \
        const u8* __restrict__ gate,           /* [E][ceil(I/16)][ceil(H/256)][2304] */                            \
        const u8* __restrict__ up,             /* the same */                                                      \
        const float* __restrict__ gate_scale,  /* [E] */                                                           \
        const float* __restrict__ up_scale,    /* [E] */                                                           \
        const bf16* __restrict__ x,            /* [M, H] */                                                        \
        const int* __restrict__ ids,           /* [M, T] */                                                        \
        bf16* __restrict__ out,                /* [M, T, I] */                                                     \
        int E, int S, int T, int I, int H, int repeats) {                                                          \
        const Experts experts[2] = {{gate, gate_scale}, {up, up_scale}};                                           \
        pairwise_gate_up<Form<CHAINS, STATIC_K, PAIRWISE_WARPS>>(experts, x, ids, out, E, S, T, I, H, repeats);    \
    }                                                                                                              \
    extern "C" __global__ void PAIRWISE_BOUNDS pairwise_down_##NAME(                                               \
        const u8* __restrict__ down,           /* [E][ceil(H/16)][ceil(I/256)][2304] */                            \
        const float* __restrict__ down_scale,  /* [E] */                                                           \
        const bf16* __restrict__ h,            /* [M, T, I] */                                                     \
        const int* __restrict__ ids,           /* [M, T] */                                                        \
        const float* __restrict__ weights,     /* [M, T] */                                                        \
        bf16* __restrict__ out,                /* [M, H] */                                                        \
        int E, int T, int H, int I) {                                                                              \
        using F = Form<CHAINS, STATIC_K, PAIRWISE_WARPS>;                                                          \
        const Experts experts[1] = {{down, down_scale}};                                                           \
        Weights<F> stream;                                                                                         \
        pairwise_down<F>(stream, experts, h, ids, weights, out, E, T, H, I);                                       \
    }

template <class F, bool IS_WHOLE = F::CHAINS == 1 && F::STATIC_K == 512>
struct WeightsOf {
    using Type = Stream<F, 1, 1>;
};
template <class F>
struct WeightsOf<F, true> {
    using Type = WholeTile<F>;
};
template <class F>
using Weights = typename WeightsOf<F>::Type;

FOR_EACH_SPLIT(PAIRWISE)
