// Entry points of the pairwise experts, from the chosen ids. Launched by launch.py. sm_80 and newer.
//
// Gate and up: a block computes some tiles of the expert of one choice, for all choices of that expert among 32; the
// blocks of the later choices return. Grid: (ceil(tiles / TEAMS / repeats), M T).
// Down: pairwise.cuh. Grid: (tiles, M). An id outside the experts gives zeros.
//
// Outputs of earlier kernels are not __restrict__: the compiler moves loads of __restrict__ memory before pdl_wait.
#include "bf16.cuh"
#include "pairwise.cuh"
#include "pdl.cuh"

#define PAIRWISE_BOUNDS __launch_bounds__(PAIRWISE_THREADS, 2)

template <class F>
__device__ __forceinline__ void pairwise_gate_up(const Experts (&experts)[2], const bf16* x, const int* ids, bf16* out,
                                                 int E, int S, int T, int I, int H, int repeats) {
    __shared__ SplitKPartials<F, 2> partials;
    pdl_launch_dependents();
    pdl_wait();
    const WarpPosition<F> at(I, H);
    const int choice = blockIdx.y, expert = ids[choice], block_first = blockIdx.x * F::TEAMS * repeats;
    const int tile_end = min(block_first + F::TEAMS * repeats, at.tiles), first = block_first + at.team;
    if ((u32)expert >= (u32)E) {
        for (int output = block_first * TILE_N + threadIdx.x; output < min(tile_end * TILE_N, I); output += F::THREADS)
            out[(size_t)choice * I + output] = rounded(0.0f);
        return;  // no barrier follows
    }
    if (first >= tile_end) return;  // the whole team: no barrier of the team follows
    WeightPipeline<F, 2, 2> pipeline;
    pipeline.start(experts, at.offset(expert, first), at);
    const int base = choice / 32 * 32, slot = base + at.lane;
    const u32 mask = __ballot_sync(0xffffffffu, slot < S && ids[slot] == expert);
    if (base + __ffs(mask) - 1 != choice) return;  // the work of another block; the same for all warps
    const auto row_of = [=](int token) { return global_row<F>(x, token, H); };
    gate_up_of_choices(pipeline, partials, experts, expert, base, mask, first, tile_end, row_of, out, T, I, at);
}

#define PAIRWISE_GATE_UP(NAME, SLICES, STATIC_K)                                                                      \
    extern "C" __global__ void PAIRWISE_BOUNDS pairwise_gate_up_##NAME(                                               \
        const u8* __restrict__ gate,          /* [E][ceil(I/16)][ceil(H/256)][2304] */                                \
        const u8* __restrict__ up,            /* the same */                                                          \
        const float* __restrict__ gate_scale, /* [E] */                                                               \
        const float* __restrict__ up_scale,   /* [E] */                                                               \
        const bf16* x,                        /* [M, H] */                                                            \
        const int* ids,                       /* [M, T] */                                                            \
        bf16* __restrict__ out,               /* [M, T, I] */                                                         \
        int E, int S, int T, int I, int H, int repeats) {                                                             \
        const Experts experts[2] = {{gate, gate_scale}, {up, up_scale}};                                              \
        pairwise_gate_up<TileConfig<SLICES, STATIC_K, PAIRWISE_WARPS>>(experts, x, ids, out, E, S, T, I, H, repeats); \
    }

#define PAIRWISE_DOWN(NAME, SLICES, STATIC_K)                                                                        \
    extern "C" __global__ void PAIRWISE_BOUNDS pairwise_down_##NAME(                                                 \
        const u8* __restrict__ down,          /* [E][ceil(H/16)][ceil(I/256)][2304] */                               \
        const float* __restrict__ down_scale, /* [E] */                                                              \
        const bf16* h,                        /* [M, T, I] */                                                        \
        const int* ids,                       /* [M, T] */                                                           \
        const float* weights,                 /* [M, T] */                                                           \
        bf16* __restrict__ out,               /* [M, H] */                                                           \
        int E, int T, int H, int I) {                                                                                \
        const DownArguments in{nullptr, 0.0f, h, nullptr, ids, weights, nullptr, out, E, T, H, I, 0};                \
        pairwise_down<TileConfig<SLICES, STATIC_K, PAIRWISE_WARPS>, false>({down, down_scale}, in, GemvOrder(1, 1)); \
    }

FOR_EACH_GATE_UP(PAIRWISE_GATE_UP)
FOR_EACH_DOWN(PAIRWISE_DOWN)
