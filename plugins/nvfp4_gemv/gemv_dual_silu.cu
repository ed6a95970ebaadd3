// Dual NVFP4 GEMV with SwiGLU epilogue: out = silu(x gate^T) * (x up^T), each product rounded to BF16 first. A block
// computes a tile of 16 features of both weights. The split of K is that of gemv_parts.cu: products have its bits, and
// the activation has the bits of silu_mul. Launched by launch.py. sm_80 and newer. Grid: ceil(N / 16) tiles, times the
// cluster size.
#include "silu.cuh"
#include "splits.cuh"

// A split of K with a tile configuration for two weights: a warp computes a tile of each, or with two sides the first
// half of the warps computes gate and the second half up.
template <class SPLIT, int SIDES, class CONFIG>
struct DualConfig : Split<SPLIT::WARPS, SPLIT::CLUSTER, CONFIG, void> {
    static constexpr int THREADS = SIDES * SPLIT::WARPS * 32;
    static_assert(SIDES * CONFIG::TILES == 2);
};

#if __CUDA_ARCH__ >= 900
#define DUAL_BOUNDS(P) __cluster_dims__(P::CLUSTER, 1, 1) __launch_bounds__(P::THREADS, (P::template BLOCKS<1>))
#else
#define DUAL_BOUNDS(P) __launch_bounds__(P::THREADS, (P::template BLOCKS<1>))
#endif

#define GEMV_DUAL_SILU(NAME, SPLIT, SIDES, ...)                                                                  \
    using Joint_##NAME = DualConfig<SPLIT, SIDES, __VA_ARGS__>;                                                  \
    extern "C" __global__ void DUAL_BOUNDS(Joint_##NAME) gemv_dual_silu_##NAME##_m8(                             \
        const u8* __restrict__ gate,         /* [ceil(N/16)][ceil(K/256)][2304] */                               \
        const u8* __restrict__ up,           /* the same */                                                      \
        const __nv_bfloat16* __restrict__ x, /* [M, K], rows x_stride apart */                                   \
        __nv_bfloat16* __restrict__ out,     /* [M, N] */                                                        \
        float gate_scale, float up_scale, int x_stride, int M, int N, int K) {                                   \
        const GridPosition<Joint_##NAME> at;                                                                     \
        const u8* tiles[2 / SIDES];                                                                              \
        const size_t offset = at.group * (size_t)((K + TILE_K - 1) / TILE_K) * SUPERTILE_BYTES;                  \
        tiles[0] = (SIDES == 1 || threadIdx.x < SPLIT::WARPS * 32 ? gate : up) + offset;                         \
        if (SIDES == 1) tiles[2 / SIDES - 1] = up + offset;                                                      \
        const int first = at.group * TILE_N;                                                                     \
        gate_scale *= EXPONENT_GAP, up_scale *= EXPONENT_GAP;                                                    \
        NoHooks hooks;                                                                                           \
        gemv_group<1, Joint_##NAME, SIDES, 2>(                                                                   \
            tiles, x, x_stride, M, K, at.rank, hooks, [=](int row, int column, const float (&sums)[2]) {         \
                if (first + column < N)                                                                          \
                    out[(size_t)row * N + first + column] = activated(sums[0] * gate_scale, sums[1] * up_scale); \
            });                                                                                                  \
    }

GEMV_DUAL_SILU(any, AnyK, 1, TileConfig<2, 1, 16, 0>)
GEMV_DUAL_SILU(k2048_few, K2048SmallN, 1, TileConfig<2, 1, 16, 2048>)
GEMV_DUAL_SILU(k2048, K2048, 1, TileConfig<2, 1, 20, 2048>)
GEMV_DUAL_SILU(k5120_few, K5120SmallN, 1, TileConfig<2, 1, 20, 5120>)
GEMV_DUAL_SILU(k5120, K5120, 2, OnHopper<TileConfig<1, 1, 12, 5120, 2>, TileConfig<1, 4, 12, 5120>>)
