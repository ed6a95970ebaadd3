// tiles.cuh for head sizes 128 and 256; launched by launch.py, which has the sizes too. sm_80 and newer. 97 KiB of shared
// memory are what a block has on sm_86, sm_89 and sm_12x, and twice fit on sm_90 and sm_100.
#include "tiles.cuh"

using Wide = Shape<256>;
using Narrow = Shape<128>;
static_assert(Wide::SHARED_BYTES == 96 * 1024 + 16 && Narrow::SHARED_BYTES == 48 * 1024 + 16);

PREFILL_TILES(prefill_mma_d256, 2, attend<Wide>)
PREFILL_TILES(prefill_mma_d128, 2, attend<Narrow>)
PREFILL_COMBINE(prefill_mma_combine)
