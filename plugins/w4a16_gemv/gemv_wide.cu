// NVFP4 GEMV for many rows of small weights: 32 at a time share each decoded weight, and the rows that are left are further
// blocks along y. Grid: as the plain form's, times ceil(M / 32). No depth is known when compiled: few splits serve all.
#include "splits.cuh"

constexpr int ROWS = 32;
using InRows = Shape<1, 1, 16, 0>;
using Any = Split<8, 1, InRows, void>;
using OfTwo = Split<2, 1, InRows, void>;  // as eight of which six have nothing
using OfFour = Split<4, 1, InRows, void>;
using OfFourTwice = OfTwoBlocks<4, InRows, void>;
using OfTenTwice = OfTwoBlocks<10, InRows, void>;

#define GEMV_WIDE(NAME, SPLIT)                                                                                           \
    extern "C" __global__ void SPLIT_BOUNDS(SPLIT, ROWS) gemv_wide_##NAME(                                               \
        const u8* __restrict__ weight,         /* [ceil(N/16)][ceil(K/256)][2304] */                                     \
        const __nv_bfloat16* __restrict__ x,   /* [M, K], rows x_stride apart */                                         \
        __nv_bfloat16* __restrict__ out,       /* [M, N] */                                                              \
        float scale, int x_stride, int M, int N, int K) {                                                                \
        const Place<SPLIT> at;                                                                                           \
        const int first = blockIdx.y * ROWS, rows = min(M - first, ROWS);                                                \
        gemv_tiles<ROWS / 8, SPLIT>(weight, x + (size_t)first * x_stride, x_stride, scale * EXPONENT_GAP, rows, N, K,    \
                                    at.group, at.rank,                                                                   \
                                    [=](int m, int n, float v) { out[(size_t)(first + m) * N + n] = rounded(v); });      \
    }

GEMV_WIDE(any, Any)
GEMV_WIDE(2, OfTwo)
GEMV_WIDE(4, OfFour)
GEMV_WIDE(4x2, OfFourTwice)
GEMV_WIDE(10x2, OfTenTwice)
