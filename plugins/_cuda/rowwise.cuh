// Elementwise kernels over rows that may have gaps between them: which thread has which vector.
//
// A thread has one vector of 8 values, and the last thread of a row has the remainder. With a WIDTH of 1 each thread
// has one value. The launcher turns rows without gaps into a single row.
#pragma once
#include "bf16.cuh"

constexpr int ROWWISE_THREADS = 128;

template <int WIDTH>
struct Width {
    static constexpr int value = WIDTH;
};

// Calls ``apply(Width<w>{}, row, vec)``. ``columns`` is the length of a row, and ``blocks_per_row`` counts blocks of
// ROWWISE_THREADS.
template <int WIDTH, class Apply>
__device__ __forceinline__ void for_each_vector(long long columns, int blocks_per_row, Apply apply) {
    const size_t row = blockIdx.x / blocks_per_row;
    const size_t vec = (size_t)(blockIdx.x % blocks_per_row) * ROWWISE_THREADS + threadIdx.x;
    const size_t whole = columns / WIDTH;
    if (vec < whole) apply(Width<WIDTH>{}, row, vec);
    if (WIDTH > 1 && vec == whole)
        for (size_t rest = whole * WIDTH; rest < (size_t)columns; ++rest) apply(Width<1>{}, row, rest);
}
