// Grouped experts: the rows of each expert, which stand together in sorted order, by its weights.
//
// A block has some tiles of one expert: the n-th of those that have rows, which it looks up in the offsets; the host needs
// no counts. Grid: (tiles / tiles a block, min(E, S)): blocks without an expert have no rows. Weights: see experts.cuh.
//
// Offsets are clamped to the S rows; rows that no expert has are zeros. A slot outside 0 .. S - 1 reads a row of zeros.
// Launched by expert_launch.py. sm_80 and newer.
#include "experts.cuh"

struct Group {
    int expert = -1, begin = 0, end = 0;
};

// The n-th expert that has rows; expert -1 if there are fewer. Every warp finds it for itself.
__device__ __forceinline__ Group nth_group(const int* offsets, int E, int S, int n, int lane) {
    constexpr int AHEAD = 8;
    Group group;
    int seen = 0;
    for (int base = 0; base < E && group.expert < 0; base += AHEAD * 32) {
        int begin[AHEAD], end[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int expert = base + i * 32 + lane;
            begin[i] = expert < E ? min(max(offsets[expert], 0), S) : 0;
            end[i] = expert < E ? min(max(offsets[expert + 1], 0), S) : 0;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const bool has_rows = begin[i] < end[i];
            const u32 mask = __ballot_sync(0xffffffffu, has_rows);
            const int rank = seen + __popc(mask & ((1u << lane) - 1));
            const u32 found = __ballot_sync(0xffffffffu, has_rows && rank == n);
            if (found) {
                const int source = __ffs(found) - 1;
                group.expert = base + i * 32 + source;
                group.begin = __shfl_sync(0xffffffffu, begin[i], source);
                group.end = __shfl_sync(0xffffffffu, end[i], source);
            }
            seen += __popc(mask);
        }
    }
    return group;
}

// Zeros for the outputs of a block's tiles in rows that no expert has.
template <int WARPS_K>
__device__ __forceinline__ void clear_rest(bf16* out, const int* offsets, int E, int S, int N) {
    constexpr int OUTPUTS = BlockTiles<WARPS_K>::COUNT * TILE_N;
    const int begin = min(max(offsets[0], 0), S), end = min(max(offsets[E], 0), S);
    const int count = begin + S - end;  // none, but for offsets that do not rise from 0 to S
    for (int i = threadIdx.x; i < count * OUTPUTS; i += THREADS) {
        const int rest = i / OUTPUTS, row = rest < begin ? rest : end + rest - begin;
        const int output = blockIdx.x * OUTPUTS + i % OUTPUTS;
        if (output < N) out[(size_t)row * N + output] = rounded(0.0f);
    }
}

template <int WARPS_K>
__device__ __forceinline__ void grouped_gate_up(const Experts (&experts)[2], const bf16* x, const int* slots,
                                                const int* offsets, bf16* out, int E, int S, int top_k, int I, int H) {
    allow_next_launch();
    wait_for_previous_launch();
    const BlockTiles<WARPS_K> at;
    const Group group = nth_group(offsets, E, S, blockIdx.y, at.lane);
    if (blockIdx.y == 0) clear_rest<WARPS_K>(out, offsets, E, S, I);
    const int expert = max(group.expert, 0);  // without one there are no rows
    const auto share = share_of<WARPS_K, 2>(experts, at, expert, I, H);
    const float scale_gate = experts[0].scale(expert), scale_up = experts[1].scale(expert);
    multiply_rows(
        share, at, I, H, group.end - group.begin,
        [&](int i) {
            const int slot = slots[group.begin + i];
            return (u32)slot < (u32)S ? x + (size_t)(slot / top_k) * H : nullptr;
        },
        [&](int i, int output, const float (&sums)[2]) {
            out[(size_t)(group.begin + i) * I + output] = activated(sums[0] * scale_gate, sums[1] * scale_up);
        });
}

template <int WARPS_K>
__device__ __forceinline__ void grouped_down(const Experts (&experts)[1], const bf16* h, const int* offsets, bf16* out,
                                             int E, int S, int H, int I) {
    allow_next_launch();
    wait_for_previous_launch();
    const BlockTiles<WARPS_K> at;
    const Group group = nth_group(offsets, E, S, blockIdx.y, at.lane);
    if (blockIdx.y == 0) clear_rest<WARPS_K>(out, offsets, E, S, H);
    const int expert = max(group.expert, 0);  // without one there are no rows
    const auto share = share_of<WARPS_K, 1>(experts, at, expert, H, I);
    const float scale = experts[0].scale(expert);
    multiply_rows(
        share, at, H, I, group.end - group.begin, [&](int i) { return h + (size_t)(group.begin + i) * I; },
        [&](int i, int output, const float (&sums)[1]) {
            out[(size_t)(group.begin + i) * H + output] = rounded(sums[0] * scale);
        });
}

#define GROUPED(NAME, WARPS_K)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_gate_up_##NAME(                               \
        const u8* __restrict__ gate,           /* [E][ceil(I/16)][ceil(H/256)][2304] */                            \
        const u8* __restrict__ up,             /* the same */                                                      \
        const float* __restrict__ gate_scale,  /* [E] */                                                           \
        const float* __restrict__ up_scale,    /* [E] */                                                           \
        const bf16* __restrict__ x,            /* [S / top_k, H] */                                                \
        const int* __restrict__ slots,         /* [S] */                                                           \
        const int* __restrict__ offsets,       /* [E + 1] */                                                       \
        bf16* __restrict__ out,                /* [S, I] */                                                        \
        int E, int S, int top_k, int I, int H) {                                                                   \
        const Experts experts[2] = {{gate, gate_scale}, {up, up_scale}};                                           \
        grouped_gate_up<WARPS_K>(experts, x, slots, offsets, out, E, S, top_k, I, H);                        \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_down_##NAME(                                  \
        const u8* __restrict__ down,           /* [E][ceil(H/16)][ceil(I/256)][2304] */                            \
        const float* __restrict__ down_scale,  /* [E] */                                                           \
        const bf16* __restrict__ h,            /* [S, I] */                                                        \
        const int* __restrict__ offsets,       /* [E + 1] */                                                       \
        bf16* __restrict__ out,                /* [S, H] */                                                        \
        int E, int S, int H, int I) {                                                                              \
        const Experts experts[1] = {{down, down_scale}};                                                           \
        grouped_down<WARPS_K>(experts, h, offsets, out, E, S, H, I);                                         \
    }

FOR_EACH_SPLIT(GROUPED)
