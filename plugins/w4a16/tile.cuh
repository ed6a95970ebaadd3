// The tile configuration and the problem of the W4A16 tile GEMM. Used by gemm.cu, copies.cuh and operands.cuh. sm_80
// and newer.
#pragma once
#include "types.cuh"

enum class Weights { TRANSPOSED, ROW_MAJOR };  // codes [K/2, N] and scales [K/16, N], or [N, K/2] and [N, K/16]

// A block computes BM x BN outputs with BK k in a stage, a warp WM x WN. Of STAGES stages one is multiplied, one has
// arrived, and the others are in flight. BLOCKS is the occupancy of the launch bounds, which limits the registers.
template <int BM_, int BN_, int BK_, int WM_, int WN_, int STAGES_, int BLOCKS_, Weights WEIGHTS_ = Weights::TRANSPOSED>
struct TileConfig {
    static constexpr int BM = BM_, BN = BN_, BK = BK_, WM = WM_, WN = WN_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr Weights WEIGHTS = WEIGHTS_;
    static constexpr int WARPS_N = BN / WN, WARPS = BM / WM * WARPS_N, THREADS = 32 * WARPS;
    static constexpr int MT = WM / 16, NT = WN / 8, GROUPS = BK / 16;
    // Padded by 32 bytes: a warp reads four rows at once.
    static constexpr int CODE_STRIDE = WEIGHTS == Weights::TRANSPOSED ? BN + 32 : BK / 2;
    static constexpr int CODE_BYTES = CODE_STRIDE * (WEIGHTS == Weights::TRANSPOSED ? BK / 2 : BN);
    static constexpr int X_BYTES = BM * BK * 2, RAW_BYTES = GROUPS * BN, STAGE_BYTES = X_BYTES + CODE_BYTES + RAW_BYTES;
    static constexpr int PAIR_BYTES = GROUPS * BN * 4;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + 3 * PAIR_BYTES;
    static_assert(BM % WM == 0 && BN % WN == 0 && WM % 16 == 0 && BK % 32 == 0 && STAGES >= 3);
    static_assert(NT == 2 || NT == 4 || NT == 8);
    static_assert(WEIGHTS == Weights::TRANSPOSED || BK == 64);
};

// The arguments: x [M, K] has rows ``stride`` apart. ``row`` and ``feature`` are the origin of the block's tile.
struct Problem {
    const u8* codes;
    const u8* scales;
    const __nv_bfloat16* x;
    int stride, M, N, K, row, feature;
};
