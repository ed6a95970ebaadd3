// Gate and up of a SwiGLU in one launch, with the activation: out = silu(x gate^T) * (x up^T), each product rounded to
// BF16 first. A block owns a tile of 16 rows of both weights, with the split of K that gemv_parts.cu has: its sums have
// the bits of that one's, and the activation those of silu_mul. Grid: ceil(N / 16) tiles (times the cluster).
#include "silu.cuh"
#include "splits.cuh"

// A split of K with another way to work: of each weight a tile a warp, or with two sides the first half of a block's
// warps for the gate and the second half for up.
template <class SPLIT, int SIDES, class SHAPE>
struct Joint : Split<SPLIT::WARPS, SPLIT::CLUSTER, SHAPE, void> {
    static constexpr int THREADS = SIDES * SPLIT::WARPS * 32;
    static_assert(SIDES * SHAPE::TILES == 2);
};

__device__ __forceinline__ __nv_bfloat16 activated(float gate, float up) {
    return rounded(silu_mul(__bfloat162float(rounded(gate)), __bfloat162float(rounded(up))));
}

#if __CUDA_ARCH__ >= 900
#define JOINT_BOUNDS(P) __cluster_dims__(P::CLUSTER, 1, 1) __launch_bounds__(P::THREADS, (P::template BLOCKS<1>))
#else
#define JOINT_BOUNDS(P) __launch_bounds__(P::THREADS, (P::template BLOCKS<1>))
#endif

#define GEMV_DUAL_SILU(NAME, SPLIT, SIDES, ...)                                                                  \
    using Joint_##NAME = Joint<SPLIT, SIDES, __VA_ARGS__>;                                                       \
    extern "C" __global__ void JOINT_BOUNDS(Joint_##NAME) gemv_dual_silu_##NAME##_m8(                            \
        const u8* __restrict__ gate,         /* [ceil(N/16)][ceil(K/256)][2304] */                               \
        const u8* __restrict__ up,           /* the same */                                                      \
        const __nv_bfloat16* __restrict__ x, /* [M, K], rows x_stride apart */                                   \
        __nv_bfloat16* __restrict__ out,     /* [M, N] */                                                        \
        float gate_scale, float up_scale, int x_stride, int M, int N, int K) {                                   \
        const Place<Joint_##NAME> at;                                                                            \
        const u8* tiles[2 / SIDES];                                                                              \
        const size_t offset = at.group * (size_t)((K + TILE_K - 1) / TILE_K) * SUPERTILE_BYTES;                  \
        tiles[0] = (SIDES == 1 || threadIdx.x < SPLIT::WARPS * 32 ? gate : up) + offset;                         \
        if (SIDES == 1) tiles[2 / SIDES - 1] = up + offset;                                                      \
        const int first = at.group * TILE_N;                                                                     \
        gate_scale *= EXPONENT_GAP, up_scale *= EXPONENT_GAP;                                                    \
        Nothing meanwhile;                                                                                       \
        gemv_group<1, Joint_##NAME, SIDES, 2>(                                                                   \
            tiles, x, x_stride, M, K, at.rank, meanwhile, [=](int row, int column, const float (&sums)[2]) {     \
                if (first + column < N)                                                                          \
                    out[(size_t)row * N + first + column] = activated(sums[0] * gate_scale, sums[1] * up_scale); \
            });                                                                                                  \
    }

GEMV_DUAL_SILU(any, AnyK, 1, Shape<2, 1, 16, 0>)
GEMV_DUAL_SILU(k2048_few, K2048Few, 1, Shape<2, 1, 16, 2048>)
GEMV_DUAL_SILU(k2048, K2048, 1, Shape<2, 1, 20, 2048>)
GEMV_DUAL_SILU(k5120_few, K5120Few, 1, Shape<2, 1, 20, 5120>)
GEMV_DUAL_SILU(k5120, K5120, 2, OnHopper<Shape<1, 1, 12, 5120, 2>, Shape<1, 4, 12, 5120>>)
