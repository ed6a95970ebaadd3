// The number of accepted drafts: drafted tokens that equal the target's token at their place, before the first that
// does not.
//
// A draft below 0 is never accepted. A target below 0, which the contract rejects, equals no draft. A warp has a
// sequence, 32 drafts at a time. Launched by launch.py. sm_80 and newer.
#include "pdl.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS) verify_greedy(
    const int* __restrict__ draft_ids,   // [S, n]
    const int* __restrict__ target_ids,  // [S, n + 1]
    int* __restrict__ accepted,          // [S]
    int S, int n) {
    pdl_launch_dependents();
    pdl_wait();
    const int lane = threadIdx.x & 31;
    const long long s = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    int held = 0;
    bool goes_on = s < S;  // the same in all lanes of a warp
    for (int first = 0; goes_on && first < n; first += 32) {
        const int at = first + lane;
        const int draft = at < n ? draft_ids[s * n + at] : -1;
        const bool holds = draft >= 0 && draft == target_ids[s * (n + 1) + at];
        const u32 misses = ~__ballot_sync(0xFFFFFFFFu, holds);
        held += misses != 0 ? __ffs(misses) - 1 : 32;
        goes_on = misses == 0;
    }
    if (s < S && lane == 0) accepted[s] = held;
}
