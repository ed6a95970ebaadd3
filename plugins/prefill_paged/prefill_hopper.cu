// Paged prefill by wgmma (prefill_wgmma.cuh) for head sizes 128 and 256. Launched by launch.py, which has the sizes
// of shared memory too. sm_90a.
#include "prefill_wgmma.cuh"

using Wide = WgmmaConfig<256, 1>;
using Narrow = WgmmaConfig<128, 2>;
static_assert(Wide::SHARED_BYTES == 96 * 1024 + 16 && Narrow::SHARED_BYTES == 80 * 1024 + 16);

// For a head size of 256, whole contexts have their own entry point, because they take 1 to 4% longer in the code for
// splits. For 128, one entry point serves both, which compiles faster.
PREFILL_TILES(prefill_hopper_d256, 2, attend_wgmma<Wide, false>)
PREFILL_TILES(prefill_hopper_split_kv_d256, 2, attend_wgmma<Wide, true>)
PREFILL_TILES(prefill_hopper_d128, 2, attend_wgmma<Narrow, true>)
PREFILL_COMBINE(prefill_hopper_combine)
