// Experts of a few tokens without sorting: every choice of every token by its expert.
//
//   gate_up  a block has some tiles of the expert of one choice, for all choices of that expert: the block of the
//            first of them does the work. Grid: (tiles / tiles a block, M * T).
//   down     a block has a tile of 16 outputs of one token and all its choices, four at a time, each by two warps that
//            split K; tokens with a common expert read it twice, from L2. Grid: (ceil(H / 16), M).
//
// Numerics: experts.cuh; each expert's result is rounded to BF16, then weighted and added in order of choice in FP32. An
// id outside the experts gives zeros. Launched by expert_launch.py. sm_80 and newer.
#include "experts.cuh"

// The i-th set bit of a mask.
__device__ __forceinline__ int nth_bit(u32 mask, int i) {
    for (; i > 0; --i) mask &= mask - 1;
    return __ffs(mask) - 1;
}

// Zeros for the outputs of a block's tiles.
template <int WARPS_K>
__device__ __forceinline__ void clear(bf16* row, int I) {
    constexpr int OUTPUTS = BlockTiles<WARPS_K>::COUNT * TILE_N;
    const int output = blockIdx.x * OUTPUTS + threadIdx.x;
    if (threadIdx.x < OUTPUTS && output < I) row[output] = rounded(0.0f);
}

template <int WARPS_K>
__device__ __forceinline__ void pairwise_gate_up(const Experts (&experts)[2], const bf16* x, const int* ids, bf16* out,
                                                 int E, int S, int T, int I, int H) {
    allow_next_launch();
    wait_for_previous_launch();
    const BlockTiles<WARPS_K> at;
    const int own = blockIdx.y;
    const bool is_there = (u32)ids[own] < (u32)E;
    const int expert = is_there ? ids[own] : 0;
    if (!is_there) clear<WARPS_K>(out + (size_t)own * I, I);
    const auto share = share_of<WARPS_K, 2>(experts, at, expert, I, H);
    const float scale_gate = experts[0].scale(expert), scale_up = experts[1].scale(expert);
    bool is_first = is_there;
    for (int base = 0; base < S && is_first; base += 32) {  // 32 choices at a time; all the same for the whole block
        const int slot = base + at.lane;
        const u32 mask = __ballot_sync(0xffffffffu, slot < S && ids[slot] == expert);
        is_first = !mask || base + __ffs(mask) > own;
        multiply_rows(
            share, at, I, H, is_first ? __popc(mask) : 0,
            [&](int i) { return x + (size_t)((base + nth_bit(mask, i)) / T) * H; },
            [&](int i, int output, const float (&sums)[2]) {
                out[(size_t)(base + nth_bit(mask, i)) * I + output] = activated(sums[0] * scale_gate, sums[1] * scale_up);
            });
    }
}

constexpr int DOWN_WARPS_K = 2, DOWN_CHOICES = WARPS / DOWN_WARPS_K;

extern "C" __global__ void __launch_bounds__(THREADS, 2) pairwise_down(
    const u8* __restrict__ down,           // [E][ceil(H/16)][ceil(I/256)][2304]
    const float* __restrict__ down_scale,  // [E]
    const bf16* __restrict__ h,            // [M, T, I]
    const int* __restrict__ ids,           // [M, T]
    const float* __restrict__ weights,     // [M, T]
    bf16* __restrict__ out,                // [M, H]
    int E, int T, int H, int I) {
    __shared__ float partial[DOWN_CHOICES][DOWN_WARPS_K][TILE_N];
    allow_next_launch();
    wait_for_previous_launch();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, choice = warp / DOWN_WARPS_K, warp_k = warp % DOWN_WARPS_K;
    const int token = blockIdx.y, supertiles = (I + TILE_K - 1) / TILE_K;
    const Experts experts{down, down_scale};
    float total = 0.0f;
    for (int first = 0; first < T; first += DOWN_CHOICES) {
        const int t = first + choice, expert = t < T ? ids[token * T + t] : -1;
        const bool is_there = (u32)expert < (u32)E;
        Share<DOWN_WARPS_K, 1> share;
        share.tiles[0] = experts.tile(is_there ? expert : 0, blockIdx.x, H, supertiles);
        share.first = warp_k;
        share.supertiles = is_there ? supertiles : 0;
        share.lane = lane;
        float sums[1][4];
        share.multiply(sums, lane < 4 ? h + ((size_t)token * T + t) * I : nullptr, I);
        if ((lane & 3) == 0) {  // row 0, outputs g and g + 8
            partial[choice][warp_k][lane >> 2] = sums[0][0];
            partial[choice][warp_k][(lane >> 2) + 8] = sums[0][2];
        }
        __syncthreads();
        for (int c = 0; threadIdx.x < TILE_N && c < min(DOWN_CHOICES, T - first); ++c) {
            const int own = ids[token * T + first + c];
            if ((u32)own >= (u32)E) continue;
            const float sum = partial[c][0][threadIdx.x] + partial[c][1][threadIdx.x];
            const float y = __bfloat162float(rounded(sum * experts.scale(own)));
            total = fmaf(y, weights[token * T + first + c], total);
        }
        __syncthreads();
    }
    const int output = blockIdx.x * TILE_N + threadIdx.x;
    if (threadIdx.x < TILE_N && output < H) out[(size_t)token * H + output] = rounded(total);
}

#define PAIRWISE(NAME, WARPS_K)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) pairwise_gate_up_##NAME(                              \
        const u8* __restrict__ gate,           /* [E][ceil(I/16)][ceil(H/256)][2304] */                            \
        const u8* __restrict__ up,             /* the same */                                                      \
        const float* __restrict__ gate_scale,  /* [E] */                                                           \
        const float* __restrict__ up_scale,    /* [E] */                                                           \
        const bf16* __restrict__ x,            /* [M, H] */                                                        \
        const int* __restrict__ ids,           /* [M, T] */                                                        \
        bf16* __restrict__ out,                /* [M, T, I] */                                                     \
        int E, int S, int T, int I, int H) {                                                                       \
        const Experts experts[2] = {{gate, gate_scale}, {up, up_scale}};                                           \
        pairwise_gate_up<WARPS_K>(experts, x, ids, out, E, S, T, I, H);                                      \
    }

FOR_EACH_SPLIT(PAIRWISE)
