// Several NVFP4 projections of one x in one launch: a fused weight whose rows stand head by head, and two whose rows
// stand as their outputs do (key and value, or gate and up). Any of them may be missing: it has no rows. One entry
// point a split of K serves them all, each group of tiles one of them. Grid: the groups of tiles of the fused weight,
// of A and of B (times the cluster).
//
// Rows of a head of the fused weight:
//   value_dim = 0, gated attention   [query (D) | gate (D)]     -> query [M, heads D], gate [M, heads D]
//   value_dim > 0, gated delta net   [q (D) | k (D) | v | z]    -> qkv [M, q of all heads | k | v],
//                                                                  z [M, heads value_dim];
//                                    v and z hold the value heads of the key head
#include "pdl.cuh"
#include "splits.cuh"

struct Heads {
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

// What is read first stands first, in one line of the constant cache.
#define PARTS                                                                                                   \
    const u8 *__restrict__ weight,           /* [ceil(N/16)][ceil(K/256)][2304] */                              \
        const u8 *__restrict__ weight_a,     /* [ceil(A/16)][ceil(K/256)][2304] */                              \
        const u8 *__restrict__ weight_b,     /* [ceil(B/16)][ceil(K/256)][2304] */                              \
        const __nv_bfloat16 *__restrict__ x, /* [M, K], rows x_stride apart */                                  \
        int N, int A, int B, int K, int M, int x_stride, __nv_bfloat16 *__restrict__ first, /* query, or qkv */ \
        __nv_bfloat16 *__restrict__ second,                                                 /* gate, or z */    \
        __nv_bfloat16 *__restrict__ out_a,                                                  /* [M, A] */        \
        __nv_bfloat16 *__restrict__ out_b,                                                  /* [M, B] */        \
        float scale, float scale_a, float scale_b, int key_dim, int value_dim

#define GEMV_PARTS(NAME, SPLIT, ROWS)                                                           \
    extern "C" __global__ void SPLIT_BOUNDS(SPLIT, ROWS) gemv_parts_##NAME##_m##ROWS(PARTS) {   \
        const Place<SPLIT> at;                                                                  \
        constexpr int COLUMNS = SPLIT::template ShapeOf<ROWS / 8>::TILES * TILE_N;              \
        const int groups = (N + COLUMNS - 1) / COLUMNS, groups_a = (A + COLUMNS - 1) / COLUMNS; \
        const bool is_fused = at.group < groups, is_a = at.group < groups + groups_a;           \
        const int rows = is_fused ? N : is_a ? A : B;                                           \
        const int group = at.group - (is_fused ? 0 : is_a ? groups : groups + groups_a);        \
        gemv_tiles<ROWS / 8, SPLIT>(                                                            \
            is_fused ? weight                                                                   \
            : is_a   ? weight_a                                                                 \
                     : weight_b,                                                                \
            x, x_stride,                                                                        \
            (is_fused ? scale                                                                   \
             : is_a   ? scale_a                                                                 \
                      : scale_b) *                                                              \
                EXPONENT_GAP,                                                                   \
            M, rows, K, group, at.rank, [=](int m, int n, float v) {                            \
                if (is_fused) Heads{N, key_dim, value_dim}.store(first, second, m, n, v);       \
                else (is_a ? out_a : out_b)[(size_t)m * rows + n] = rounded(v);                 \
            });                                                                                 \
    }

FOR_EACH_INPUT_SPLIT(GEMV_PARTS, 8)

// Blocks of one size for two splits: where the fused weight is split over half as many warps, two groups share a block.
extern "C" __global__ void __launch_bounds__(K2048Few::WARPS * 32, K2048::BLOCKS<1> / 2) gemv_parts_k2048_and_few_m8(
    PARTS) {
    static_assert(2 * K2048::WARPS == K2048Few::WARPS && K2048::CLUSTER == 1 && K2048Few::CLUSTER == 1);
    constexpr int COLUMNS = 2 * K2048::ShapeOf<1>::TILES * TILE_N, COLUMNS_FEW = K2048Few::ShapeOf<1>::TILES * TILE_N;
    pdl_launch_dependents();
    const int groups = (N + COLUMNS - 1) / COLUMNS, groups_a = (A + COLUMNS_FEW - 1) / COLUMNS_FEW;
    int group = blockIdx.x;
    if (group < groups) {
        gemv_tiles<1, K2048, 2>(
            weight, x, x_stride, scale * EXPONENT_GAP, M, N, K, group, 0,
            [=](int m, int n, float v) { Heads{N, key_dim, value_dim}.store(first, second, m, n, v); });
        return;
    }
    group -= groups;
    const bool is_a = group < groups_a;
    const int rows = is_a ? A : B;
    __nv_bfloat16* out = is_a ? out_a : out_b;
    gemv_tiles<1, K2048Few>(
        is_a ? weight_a : weight_b, x, x_stride, (is_a ? scale_a : scale_b) * EXPONENT_GAP, M, rows, K,
        is_a ? group : group - groups_a, 0, [=](int m, int n, float v) { out[(size_t)m * rows + n] = rounded(v); });
}
