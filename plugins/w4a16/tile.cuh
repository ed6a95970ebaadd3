// What the files of this folder share: a block's tile, and what it works on.
#pragma once
#include "types.cuh"

enum class Weights { TRANSPOSED, ROW_MAJOR };  // codes [K/2, N] and scales [K/16, N], or [N, K/2] and [N, K/16]

// BM x BN outputs a block and BK k a stage; a warp has WM x WN. Of STAGES buffers one is multiplied, one is complete,
// and the others are under way. BLOCKS should fit a multiprocessor, which bounds the registers.
template <int BM_, int BN_, int BK_, int WM_, int WN_, int STAGES_, int BLOCKS_, Weights WEIGHTS_ = Weights::TRANSPOSED>
struct Tile {
    static constexpr int BM = BM_, BN = BN_, BK = BK_, WM = WM_, WN = WN_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr Weights WEIGHTS = WEIGHTS_;
    static constexpr int WARPS_N = BN / WN, WARPS = BM / WM * WARPS_N, THREADS = 32 * WARPS;
    static constexpr int MT = WM / 16, NT = WN / 8, GROUPS = BK / 16;
    // 32 bytes of padding put the four rows that a warp reads at once into different banks.
    static constexpr int CODE_STRIDE = WEIGHTS == Weights::TRANSPOSED ? BN + 32 : BK / 2;
    static constexpr int CODE_BYTES = CODE_STRIDE * (WEIGHTS == Weights::TRANSPOSED ? BK / 2 : BN);
    static constexpr int X_BYTES = BM * BK * 2, RAW_BYTES = GROUPS * BN, STAGE_BYTES = X_BYTES + CODE_BYTES + RAW_BYTES;
    static constexpr int PAIR_BYTES = GROUPS * BN * 4;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + 3 * PAIR_BYTES;
    static_assert(BM % WM == 0 && BN % WN == 0 && WM % 16 == 0 && BK % 32 == 0 && STAGES >= 3);
    static_assert(NT == 2 || NT == 4 || NT == 8);
    static_assert(WEIGHTS == Weights::TRANSPOSED || BK == 64);
};

// What a block works on: x [M, K] with rows ``stride`` apart, and its first row and feature.
struct Problem {
    const u8* codes;
    const u8* scales;
    const __nv_bfloat16* x;
    int stride, M, N, K, row, feature;
};
