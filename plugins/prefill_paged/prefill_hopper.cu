// tiles_hopper.cuh for head sizes 128 and 256; launched by launch.py, which has the sizes too. sm_90a.
#include "tiles_hopper.cuh"

using Wide = HopperShape<256, 1>;
using Narrow = HopperShape<128, 2>;
static_assert(Wide::SHARED_BYTES == 96 * 1024 + 16 && Narrow::SHARED_BYTES == 80 * 1024 + 16);

// Apart for 256 values, as whole contexts take 1 to 4% longer in the code for parts; of 128 there is one, which compiles once.
PREFILL_TILES(prefill_hopper_d256, 2, attend_hopper<Wide, false>)
PREFILL_TILES(prefill_hopper_parts_d256, 2, attend_hopper<Wide, true>)
PREFILL_TILES(prefill_hopper_d128, 2, attend_hopper<Narrow, true>)
PREFILL_COMBINE(prefill_hopper_combine)
