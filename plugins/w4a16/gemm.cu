// The entry points of one key: its tile for many rows (whole) and for few, and the latter for any N and K.
// WHOLE, FEW, their shared memory and WEIGHTS come from launch.py, which sizes the launch by them.
#include "gemm.cuh"

using Whole = Tile<WHOLE, Weights::WEIGHTS>;
using Few = Tile<FEW, Weights::WEIGHTS>;
static_assert(Whole::SHARED_BYTES == WHOLE_SHARED && Few::SHARED_BYTES == FEW_SHARED);

W4A16_ENTRY(w4a16_whole, Whole, true)
W4A16_ENTRY(w4a16_few, Few, true)
W4A16_ENTRY(w4a16_any, Few, false)
