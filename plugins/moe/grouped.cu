// Grouped experts (grouped.cuh, and grouped_many.cuh for many rows an expert): gate and up with the activation, and down, in
// sorted order. Rows that no expert has are zeros. Launched by expert_launch.py. sm_80 and newer.
#include "grouped.cuh"
#include "grouped_many.cuh"

template <class F>
__device__ __forceinline__ void grouped_gate_up(const Experts (&experts)[2], const bf16* x, const int* slots,
                                                const Work& work, bf16* out, int top_k, int I, int H, int repeats) {
    allow_next_launch();
    wait_for_previous_launch();
    const Place<F> at(I, H);
    const Share share = Share::of(work.count(), repeats, at);
    Stream<F, 2, 1> stream;
    multiply_share(
        stream, false, experts, work, share, work.at(share.place), at,
        [&](int i) {
            const int slot = slots[i];
            return (u32)slot < (u32)work.S ? x + (size_t)(slot / top_k) * H : nullptr;
        },
        [&](int expert, int i, int output, const float (&sums)[2]) {
            out[(size_t)i * I + output] = activated(sums[0] * experts[0].scale(expert), sums[1] * experts[1].scale(expert));
        });
}

#define GROUPED(NAME, CHAINS, STATIC_K)                                                                            \
    extern "C" __global__ void GROUPED_BOUNDS grouped_gate_up_##NAME(                                              \
        const u8* __restrict__ gate,           /* [E][ceil(I/16)][ceil(H/256)][2304] */                            \
        const u8* __restrict__ up,             /* the same */                                                      \
        const float* __restrict__ gate_scale,  /* [E] */                                                           \
        const float* __restrict__ up_scale,    /* [E] */                                                           \
        const bf16* x,                         /* [S / top_k, H] */                                                \
        const int* slots,                      /* [S] */                                                           \
        const int* offsets,                    /* [E + 1] */                                                       \
        const int* work,                       /* [E, 4] */                                                        \
        bf16* __restrict__ out,                /* [S, I] */                                                        \
        int E, int S, int top_k, int I, int H, int repeats) {                                                      \
        const Experts experts[2] = {{gate, gate_scale}, {up, up_scale}};                                           \
        grouped_gate_up<Form<CHAINS, STATIC_K, GROUPED_WARPS>>(experts, x, slots, {work, E, S}, out, top_k, I, H,  \
                                                               repeats);                                           \
        clear_rest(out, offsets, E, S, I);                                                                         \
    }                                                                                                              \
    extern "C" __global__ void GROUPED_BOUNDS grouped_down_##NAME(                                                 \
        const u8* __restrict__ down,           /* [E][ceil(H/16)][ceil(I/256)][2304] */                            \
        const float* __restrict__ down_scale,  /* [E] */                                                           \
        const bf16* h,                         /* [S, I] */                                                        \
        const int* offsets,                    /* [E + 1] */                                                       \
        const int* work,                       /* [E, 4] */                                                        \
        bf16* __restrict__ out,                /* [S, H] */                                                        \
        int E, int S, int H, int I, int repeats, int is_early) {                                                   \
        const Experts experts[1] = {{down, down_scale}};                                                           \
        grouped_down<Form<CHAINS, STATIC_K, GROUPED_WARPS>>(                                                       \
            experts, h, {work, E, S}, H, I, repeats, is_early,                                                     \
            [&](int i, int output, float y) { out[(size_t)i * H + output] = rounded(y); });                        \
        clear_rest(out, offsets, E, S, H);                                                                         \
    }

FOR_EACH_SPLIT(GROUPED)
