// Entry points of the grouped experts: gate and up with the SwiGLU activation, and down, in sorted order. Small M is
// grouped.cuh, large M grouped_large_m.cuh. Rows without an expert are zeros. Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "global_memory.cuh"
#include "grouped.cuh"
#include "grouped_large_m.cuh"
#include "pdl.cuh"

// Prefetches memory into L2, one line for each thread, from block ``first`` on.
__device__ __forceinline__ void prefetch_lines(const void* p, size_t bytes, int first) {
    if ((int)blockIdx.x < first) return;
    const size_t at = ((blockIdx.x - first) * blockDim.x + threadIdx.x) * (size_t)128;
    if (at < bytes) prefetch_l2(static_cast<const char*>(p) + at);
}

template <class F>
__device__ __forceinline__ void grouped_gate_up(const Experts (&experts)[2], const bf16* x, const int* slots,
                                                const int* offsets, WorkList work, bf16* out, int top_k, int I, int H,
                                                int repeats) {
    __shared__ SharedRows<F> rows;
    __shared__ SharedWorkList shared_list;
    __shared__ int all_rows;
    pdl_launch_dependents();
    if (repeats == 0) {
        prefetch_lines(experts[0].scales, work.E * sizeof(float), 0);
        prefetch_lines(experts[1].scales, work.E * sizeof(float), 1);
        prefetch_lines(work.list, work.E * 16, 2);
        prefetch_lines(slots, work.S * sizeof(int), 3);
        prefetch_lines(offsets + work.E, 4, 4);
        prefetch_lines(x, (size_t)(work.S / top_k) * H * sizeof(bf16), 5);
    }
    pdl_wait();
    if (threadIdx.x == F::THREADS - 1) all_rows = load_relaxed(offsets + work.E);
    work.load_to_shared<F::THREADS>(shared_list, slots);
    const WarpPosition<F> at(I, H);
    const TileRange range = TileRange::of(work.count(), repeats, at);
    TilePipeline<F, 2> pipeline;
    multiply_range(
        pipeline, false, false, rows, experts, work, range, work.at(range.entry), at,
        [&](int i) {
            const int slot = work.shared_list ? work.shared_list->slots[i] : load_relaxed(slots + i);
            return (u32)slot < (u32)work.S ? x + (size_t)(slot / top_k) * H : nullptr;
        },
        [&](int i, int output, const float (&sums)[2], const float (&scales)[2]) {
            out[(size_t)i * I + output] = activated(sums[0] * scales[0], sums[1] * scales[1]);
        });
    __syncthreads();
    clear_from(out, all_rows, work.S, I);
}

#define GROUPED_GATE_UP(NAME, SLICES, STATIC_K)                                        \
    extern "C" __global__ void GATE_UP_BOUNDS grouped_gate_up_##NAME(                  \
        const u8* __restrict__ gate,          /* [E][ceil(I/16)][ceil(H/256)][2304] */ \
        const u8* __restrict__ up,            /* the same */                           \
        const float* __restrict__ gate_scale, /* [E] */                                \
        const float* __restrict__ up_scale,   /* [E] */                                \
        const bf16* x,                        /* [S / top_k, H] */                     \
        const int* slots,                     /* [S] */                                \
        const int* offsets,                   /* [E + 1] */                            \
        const int* work,                      /* [E, 4] */                             \
        bf16* __restrict__ out,               /* [S, I] */                             \
        int E, int S, int top_k, int I, int H, int repeats) {                          \
        const Experts experts[2] = {{gate, gate_scale}, {up, up_scale}};               \
        grouped_gate_up<TileConfig<SLICES, STATIC_K, GATE_UP_WARPS>>(                  \
            experts, x, slots, offsets, {work, E, S}, out, top_k, I, H, repeats);      \
    }

#define GROUPED_DOWN(NAME, SLICES, STATIC_K)                                                \
    extern "C" __global__ void DOWN_BOUNDS grouped_down_##NAME(                             \
        const u8* __restrict__ down,          /* [E][ceil(H/16)][ceil(I/256)][2304] */      \
        const float* __restrict__ down_scale, /* [E] */                                     \
        const bf16* h,                        /* [S, I] */                                  \
        const int* offsets,                   /* [E + 1] */                                 \
        const int* work,                      /* [E, 4] */                                  \
        bf16* __restrict__ out,               /* [S, H] */                                  \
        int E, int S, int H, int I, int repeats, int is_early) {                            \
        const Experts experts[1] = {{down, down_scale}};                                    \
        const int rest = grouped_down<TileConfig<SLICES, STATIC_K, DOWN_WARPS>>(            \
            experts, h, offsets, {work, E, S}, H, I, repeats, is_early,                     \
            [&](int i, int output, float y) { out[(size_t)i * H + output] = rounded(y); }); \
        clear_from(out, rest, S, H);                                                        \
    }

FOR_EACH_GATE_UP(GROUPED_GATE_UP)
FOR_EACH_DOWN(GROUPED_DOWN)
