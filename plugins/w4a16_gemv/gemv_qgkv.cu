// What gated attention projects from one x, in one launch: query and gate, whose weight rows stand head by head as [query
// (D) | gate (D)], key and value. The bits are those of gemv_qg.cuh and gemv_dual.cuh: each has its own split of K. Grid:
// the groups of tiles of query and gate, then those of the key, then those of the value.
#include "gemv_dual.cuh"
#include "gemv_qg.cuh"

// Blocks of one size: where query and gate are split over half as many warps as key and value, two groups share a block.
#define GEMV_QGKV(NAME, SPLIT, KV_SPLIT)                                                                         \
    extern "C" __global__ void __launch_bounds__(KV_SPLIT::WARPS * 32,                                           \
                                                 SPLIT::BLOCKS<1> * SPLIT::WARPS / KV_SPLIT::WARPS)              \
        gemv_qgkv_##NAME##_m8(                                                                                   \
            const u8* __restrict__ weight,         /* [ceil(2Q/16)][ceil(K/256)][2304] */                        \
            const u8* __restrict__ key_weight,     /* [ceil(A/16)][ceil(K/256)][2304] */                         \
            const u8* __restrict__ value_weight,   /* [ceil(B/16)][ceil(K/256)][2304] */                         \
            const __nv_bfloat16* __restrict__ x,   /* [M, K], rows x_stride apart */                             \
            __nv_bfloat16* __restrict__ query,     /* [M, Q] */                                                  \
            __nv_bfloat16* __restrict__ gate,      /* [M, Q] */                                                  \
            __nv_bfloat16* __restrict__ key,       /* [M, A] */                                                  \
            __nv_bfloat16* __restrict__ value,     /* [M, B] */                                                  \
            float scale, float key_scale, float value_scale, int x_stride, int M, int Q, int A, int B, int K,    \
            int head_dim) {                                                                                      \
        constexpr int SIDES = KV_SPLIT::WARPS / SPLIT::WARPS;                                                    \
        static_assert(SIDES * SPLIT::WARPS == KV_SPLIT::WARPS && SPLIT::CLUSTER == 1 && KV_SPLIT::CLUSTER == 1); \
        constexpr int COLUMNS = SIDES * SPLIT::ShapeOf<1>::TILES * TILE_N;                                       \
        constexpr int KV_COLUMNS = KV_SPLIT::ShapeOf<1>::TILES * TILE_N;                                         \
        allow_next_launch();                                                                                     \
        const int groups = (2 * Q + COLUMNS - 1) / COLUMNS, key_groups = (A + KV_COLUMNS - 1) / KV_COLUMNS;      \
        int group = blockIdx.x;                                                                                  \
        if (group < groups) {                                                                                    \
            gemv_tiles<1, SPLIT, SIDES>(weight, x, x_stride, scale * EXPONENT_GAP, M, 2 * Q, K, group, 0,        \
                                        [=](int m, int n, float v) {                                             \
                                            const int head = n / (2 * head_dim), d = n - head * 2 * head_dim;    \
                                            __nv_bfloat16* to = d < head_dim ? query : gate;                     \
                                            to[(size_t)m * Q + head * head_dim + d % head_dim] = rounded(v);     \
                                        });                                                                      \
            return;                                                                                              \
        }                                                                                                        \
        group -= groups;                                                                                         \
        const bool is_key = group < key_groups;                                                                  \
        const int N = is_key ? A : B;                                                                            \
        __nv_bfloat16* out = is_key ? key : value;                                                               \
        gemv_tiles<1, KV_SPLIT>(is_key ? key_weight : value_weight, x, x_stride,                                 \
                                (is_key ? key_scale : value_scale) * EXPONENT_GAP, M, N, K,                      \
                                is_key ? group : group - key_groups, 0,                                          \
                                [=](int m, int n, float v) { out[(size_t)m * N + n] = rounded(v); });            \
    }

GEMV_QGKV(any, AnyK, AnyK)
GEMV_QGKV(k2048_few, K2048Few, K2048Few)
GEMV_QGKV(k2048_and_few, K2048, K2048Few)
GEMV_QGKV(k2048, K2048, K2048)
GEMV_QGKV(k5120, K5120, K5120)
GEMV_QGKV(k5120_pair, K5120Pair, K5120Pair)

// Splits that no block suits both of are two launches.
GEMV_QG(k2048_few, K2048Few, 8)
GEMV_QG(k5120_few, K5120Few, 8)
GEMV_QG(k5120, K5120, 8)
GEMV_QG(k5120_pair, K5120Pair, 8)
GEMV_DUAL(k2048, K2048, 8)
GEMV_DUAL(k5120_few, K5120Few, 8)
GEMV_DUAL(k5120, K5120, 8)
GEMV_DUAL(k5120_pair, K5120Pair, 8)
