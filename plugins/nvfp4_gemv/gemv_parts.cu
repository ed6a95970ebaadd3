// NVFP4 GEMV of up to three weights and one x in one launch: a fused weight whose rows are grouped by head, and two
// weights A and B whose rows are in the order of their outputs (key and value, or gate and up). A missing weight has no
// rows. Each tile group belongs to one weight. Launched by launch.py. sm_80 and newer. Grid: the tile groups of the
// fused weight, of A and of B, times the cluster size.
//
// Rows of a head of the fused weight:
//   value_dim = 0, gated attention   [query (D) | gate (D)]     -> query [M, heads D], gate [M, heads D]
//   value_dim > 0, gated delta net   [q (D) | k (D) | v | z]    -> qkv [M, q of all heads | k | v],
//                                                                  z [M, heads value_dim];
//                                    v and z hold the value heads of the key head
#include "pdl.cuh"
#include "splits.cuh"

struct HeadLayout {
    int N, key_dim, value_dim;

    __device__ __forceinline__ void store(__nv_bfloat16* first, __nv_bfloat16* second, int m, int n, float v) const {
        const int group = 2 * key_dim + 2 * value_dim, heads = N / group, head = n / group, i = n - head * group;
        const int keys = heads * key_dim, values = heads * value_dim, j = i - 2 * key_dim;  // j: from v on
        const bool is_gate = value_dim == 0 && i >= key_dim, is_z = value_dim > 0 && j >= value_dim;
        const int width = value_dim == 0 ? keys : is_z ? values : 2 * keys + values;
        int column = head * key_dim + i;
        if (is_gate) column -= key_dim;
        else if (is_z) column = head * value_dim + j - value_dim;
        else if (j >= 0) column = 2 * keys + head * value_dim + j;
        else if (i >= key_dim) column += keys - key_dim;
        (is_gate || is_z ? second : first)[(size_t)m * width + column] = rounded(v);
    }
};

// Parameters in order of their first use: the first ones are in one line of the constant cache.
#define PARAMETERS                                                                                              \
    const u8 *__restrict__ weight,           /* [ceil(N/16)][ceil(K/256)][2304] */                              \
        const u8 *__restrict__ weight_a,     /* [ceil(A/16)][ceil(K/256)][2304] */                              \
        const u8 *__restrict__ weight_b,     /* [ceil(B/16)][ceil(K/256)][2304] */                              \
        const __nv_bfloat16 *__restrict__ x, /* [M, K], rows x_stride apart */                                  \
        int N, int A, int B, int K, int M, int x_stride, __nv_bfloat16 *__restrict__ first, /* query, or qkv */ \
        __nv_bfloat16 *__restrict__ second,                                                 /* gate, or z */    \
        __nv_bfloat16 *__restrict__ out_a,                                                  /* [M, A] */        \
        __nv_bfloat16 *__restrict__ out_b,                                                  /* [M, B] */        \
        float scale, float scale_a, float scale_b, int key_dim, int value_dim

#define GEMV_PARTS(NAME, SPLIT, ROWS)                                                              \
    extern "C" __global__ void SPLIT_BOUNDS(SPLIT, ROWS) gemv_parts_##NAME##_m##ROWS(PARAMETERS) { \
        const GridPosition<SPLIT> at;                                                              \
        constexpr int COLUMNS = SPLIT::template ConfigOf<ROWS / 8>::TILES * TILE_N;                \
        const int groups = (N + COLUMNS - 1) / COLUMNS, groups_a = (A + COLUMNS - 1) / COLUMNS;    \
        const bool is_fused = at.group < groups, is_a = at.group < groups + groups_a;              \
        const int rows = is_fused ? N : is_a ? A : B;                                              \
        const int group = at.group - (is_fused ? 0 : is_a ? groups : groups + groups_a);           \
        gemv_tiles<ROWS / 8, SPLIT>(                                                               \
            is_fused ? weight                                                                      \
            : is_a   ? weight_a                                                                    \
                     : weight_b,                                                                   \
            x, x_stride,                                                                           \
            (is_fused ? scale                                                                      \
             : is_a   ? scale_a                                                                    \
                      : scale_b) *                                                                 \
                EXPONENT_GAP,                                                                      \
            M, rows, K, group, at.rank, [=](int m, int n, float v) {                               \
                if (is_fused) HeadLayout{N, key_dim, value_dim}.store(first, second, m, n, v);     \
                else (is_a ? out_a : out_b)[(size_t)m * rows + n] = rounded(v);                    \
            });                                                                                    \
    }

FOR_EACH_INPUT_SPLIT(GEMV_PARTS, 8)

// Two splits with one block size: the fused weight is split over half as many warps, and two of its groups use one
// block.
extern "C" __global__ void __launch_bounds__(K2048SmallN::WARPS * 32, K2048::BLOCKS<1> / 2) gemv_parts_k2048_and_few_m8(
    PARAMETERS) {
    static_assert(2 * K2048::WARPS == K2048SmallN::WARPS && K2048::CLUSTER == 1 && K2048SmallN::CLUSTER == 1);
    constexpr int COLUMNS = 2 * K2048::ConfigOf<1>::TILES * TILE_N,
                  COLUMNS_SMALL_N = K2048SmallN::ConfigOf<1>::TILES * TILE_N;
    pdl_launch_dependents();
    const int groups = (N + COLUMNS - 1) / COLUMNS, groups_a = (A + COLUMNS_SMALL_N - 1) / COLUMNS_SMALL_N;
    int group = blockIdx.x;
    if (group < groups) {
        gemv_tiles<1, K2048, 2>(
            weight, x, x_stride, scale * EXPONENT_GAP, M, N, K, group, 0,
            [=](int m, int n, float v) { HeadLayout{N, key_dim, value_dim}.store(first, second, m, n, v); });
        return;
    }
    group -= groups;
    const bool is_a = group < groups_a;
    const int rows = is_a ? A : B;
    __nv_bfloat16* out = is_a ? out_a : out_b;
    gemv_tiles<1, K2048SmallN>(
        is_a ? weight_a : weight_b, x, x_stride, (is_a ? scale_a : scale_b) * EXPONENT_GAP, M, rows, K,
        is_a ? group : group - groups_a, 0, [=](int m, int n, float v) { out[(size_t)m * rows + n] = rounded(v); });
}
