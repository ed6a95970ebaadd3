// tiles_hopper.cuh for head sizes 128 and 256; launched by launch.py, which has the sizes too. sm_90a.
#include "tiles_hopper.cuh"

using Wide = HopperShape<256, 1>;
using Narrow = HopperShape<128, 2>;
static_assert(Wide::SHARED_BYTES == 96 * 1024 + 16 && Narrow::SHARED_BYTES == 80 * 1024 + 16);

PREFILL_TILES(prefill_hopper_d256, attend_hopper, Wide, 2)
PREFILL_TILES(prefill_hopper_d128, attend_hopper, Narrow, 2)
PREFILL_COMBINE(prefill_hopper_combine)
