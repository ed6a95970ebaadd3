// Paged prefill by mma.sync (prefill_mma.cuh) for head sizes 128 and 256. Launched by launch.py, which has the sizes
// of shared memory too. 97 KiB are the limit of a block on sm_86, sm_89 and sm_12x, and fit twice on sm_90 and
// sm_100. sm_80 and newer.
#include "prefill_mma.cuh"

using Wide = MmaConfig<256>;
using Narrow = MmaConfig<128>;
static_assert(Wide::SHARED_BYTES == 96 * 1024 + 16 && Narrow::SHARED_BYTES == 48 * 1024 + 16);

PREFILL_TILES(prefill_mma_d256, 2, attend_mma<Wide>)
PREFILL_TILES(prefill_mma_d128, 2, attend_mma<Narrow>)
PREFILL_COMBINE(prefill_mma_combine)
