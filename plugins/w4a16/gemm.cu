// Entry points of the W4A16 tile GEMM: one for each tile configuration of the keys that share this source, and one for
// any N and K. launch.py defines WEIGHTS and ENTRIES (-D): ENTRY(name, aligned rows, shared memory, tile configuration)
// ... Launched by launch.py. sm_80 and newer.
#include "gemm.cuh"

#define ENTRY(NAME, ALIGNED, SHARED, ...)                        \
    using Of_##NAME = TileConfig<__VA_ARGS__, Weights::WEIGHTS>; \
    static_assert(Of_##NAME::SHARED_BYTES == SHARED);            \
    W4A16_ENTRY(NAME, Of_##NAME, ALIGNED)

ENTRIES
