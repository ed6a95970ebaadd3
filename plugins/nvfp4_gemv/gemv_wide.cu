// NVFP4 GEMV for many rows of small weights: 32 at a time share each decoded weight, and rows beyond those are further
// blocks along y. Grid: as the plain form's, times ceil(M / 32). No depth is known when compiled: few splits serve all.
#include "splits.cuh"

constexpr int ROWS = 32;
// Where there is a block a multiprocessor or less, registers hold all that a warp loads ahead; where there are more,
// two tiles a warp halve what is read of x. H200, us one tile / two: 2048 x 4096 at 32 rows 5.9 / 7.6, 64 rows 8.5 /
// 8.1; 2048 x 512 at 64 rows 3.7 / 4.4, 128 rows 4.8 / 4.6.
template <int DEPTH>
using One = Shape<1, 1, 8, DEPTH, 0, true>;
using Two = Shape<2, 1, 8, WHOLE, 0, true>;
using Any = Split<8, 1, One<0>, void>;
using OfEight = Split<8, 1, One<WHOLE>, void>;
using OfEightPair = Split<8, 1, Two, void>;
using OfTwo = Split<2, 1, One<WHOLE>, void>;  // as eight of which six have nothing
using OfTwoPair = Split<2, 1, Two, void>;
using OfFourPair = Split<4, 1, Shape<2, 1, 12, WHOLE, 0, true>, void>;
using OfFourTwice = OfTwoBlocks<4, Shape<1, 1, 12, WHOLE, 0, true>, void>;
using OfTenTwice = OfTwoBlocks<10, One<WHOLE>, void>;

#define GEMV_WIDE(NAME, SPLIT)                                                                                   \
    extern "C" __global__ void SPLIT_BOUNDS(SPLIT, ROWS) gemv_wide_##NAME(                                       \
        const u8* __restrict__ weight,       /* [ceil(N/16)][ceil(K/256)][2304] */                               \
        const __nv_bfloat16* __restrict__ x, /* [M, K], rows x_stride apart */                                   \
        __nv_bfloat16* __restrict__ out,     /* [M, N] */                                                        \
        float scale, int x_stride, int M, int N, int K) {                                                        \
        const Place<SPLIT> at;                                                                                   \
        const int first = blockIdx.y * ROWS, rows = min(M - first, ROWS);                                        \
        gemv_tiles<ROWS / 8, SPLIT>(                                                                             \
            weight, x + (size_t)first * x_stride, x_stride, scale * EXPONENT_GAP, rows, N, K, at.group, at.rank, \
            [=](int m, int n, float v) { out[(size_t)(first + m) * N + n] = rounded(v); });                      \
    }

GEMV_WIDE(any, Any)
GEMV_WIDE(8, OfEight)
GEMV_WIDE(8_pair, OfEightPair)
GEMV_WIDE(2, OfTwo)
GEMV_WIDE(2_pair, OfTwoPair)
GEMV_WIDE(4_pair, OfFourPair)
GEMV_WIDE(4x2, OfFourTwice)
GEMV_WIDE(10x2, OfTenTwice)
