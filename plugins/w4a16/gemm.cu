// The entry points of keys that share a source: their tiles, each compiled once, and one of them for any N and K.
// WEIGHTS and ENTRIES come from launch.py, which sizes the launches by them: ENTRY(name, even rows, shared memory,
// tile) ...
#include "gemm.cuh"

#define ENTRY(NAME, EVEN, SHARED, ...)                     \
    using Of_##NAME = Tile<__VA_ARGS__, Weights::WEIGHTS>; \
    static_assert(Of_##NAME::SHARED_BYTES == SHARED);      \
    W4A16_ENTRY(NAME, Of_##NAME, EVEN)

ENTRIES
