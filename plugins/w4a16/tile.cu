// The entry points of one key: its tile for many rows (whole) and for few, and the whole tile for any N and K.
// WHOLE, FEW and WEIGHTS come from launch.py, which sizes the grid and the shared memory by them.
#include "tile.cuh"

using Whole = Tile<WHOLE, Weights::WEIGHTS>;
using Few = Tile<FEW, Weights::WEIGHTS>;

W4A16_ENTRY(w4a16_whole, Whole, true)
W4A16_ENTRY(w4a16_few, Few, true)
W4A16_ENTRY(w4a16_any, Whole, false)
