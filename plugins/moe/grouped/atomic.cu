// Grouped down projections (grouped.cuh) with the reduction over experts as the epilogue: atomic adds to the rows of
// the tokens, in no fixed order. Three launches: clear the sums, add, round. Launched by launch.py. sm_80 and newer.
//
// Numerics: unrounded results are weighted and added in FP32, in any order; one rounding to BF16.
#include "bf16.cuh"
#include "grouped.cuh"
#include "pdl.cuh"

constexpr int CLEAR_THREADS = 256;

extern "C" __global__ void __launch_bounds__(CLEAR_THREADS) clear_sums(float* __restrict__ sums, int count) {  // [M, H]
    pdl_launch_dependents();
    pdl_wait();
    const int i = blockIdx.x * CLEAR_THREADS + threadIdx.x;
    if (i < count) sums[i] = 0.0f;
}

extern "C" __global__ void __launch_bounds__(CLEAR_THREADS) round_sums(const float* sums,       // [M, H]
                                                                       bf16* __restrict__ out,  // [M, H]
                                                                       int count) {
    pdl_launch_dependents();
    pdl_wait();
    const int i = blockIdx.x * CLEAR_THREADS + threadIdx.x;
    if (i < count) out[i] = rounded(sums[i]);
}

#define GROUPED_DOWN_ATOMIC(NAME, SLICES, STATIC_K)                                                               \
    extern "C" __global__ void DOWN_BOUNDS grouped_down_atomic_##NAME(                                            \
        const u8* __restrict__ down,          /* [E][ceil(H/16)][ceil(I/256)][2304] */                            \
        const float* __restrict__ down_scale, /* [E] */                                                           \
        const bf16* h,                        /* [S, I] */                                                        \
        const int* slots,                     /* [S] */                                                           \
        const int* work,                      /* [E, 4] */                                                        \
        const float* weights,                 /* [S] */                                                           \
        float* __restrict__ sums,             /* [S / top_k, H] */                                                \
        int E, int S, int top_k, int H, int I, int repeats, int is_early) {                                       \
        const Experts experts[1] = {{down, down_scale}};                                                          \
        grouped_down<TileConfig<SLICES, STATIC_K, DOWN_WARPS>>(                                                   \
            experts, h, nullptr, {work, E, S}, H, I, repeats, is_early, [&](int i, int output, float y) {         \
                const int slot = slots[i];                                                                        \
                if ((u32)slot < (u32)S) atomicAdd(sums + (size_t)(slot / top_k) * H + output, weights[slot] * y); \
            });                                                                                                   \
    }

FOR_EACH_DOWN(GROUPED_DOWN_ATOMIC)
