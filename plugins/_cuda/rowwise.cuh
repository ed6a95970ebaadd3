// Element-wise kernels over rows that may have gaps between them: which thread does which piece.
//
// A thread has one piece of 8 values; the last thread of a row has what is left over. With a WIDTH of 1 each thread has
// one value. The launcher makes one row of rows without gaps.
#pragma once
#include "bf16.cuh"

constexpr int ROWWISE_THREADS = 128;

template <int WIDTH>
struct Width {
    static constexpr int value = WIDTH;
};

// Calls ``apply(Width<w>{}, row, piece)``; ``columns`` are values a row, ``blocks_a_row`` blocks of ROWWISE_THREADS.
template <int WIDTH, class Apply>
__device__ __forceinline__ void for_each_piece(long long columns, int blocks_a_row, Apply apply) {
    const size_t row = blockIdx.x / blocks_a_row;
    const size_t piece = (size_t)(blockIdx.x % blocks_a_row) * ROWWISE_THREADS + threadIdx.x;
    const size_t whole = columns / WIDTH;
    if (piece < whole) apply(Width<WIDTH>{}, row, piece);
    if (WIDTH > 1 && piece == whole)
        for (size_t rest = whole * WIDTH; rest < (size_t)columns; ++rest) apply(Width<1>{}, row, rest);
}
