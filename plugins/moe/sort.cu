// Slots by expert: a stable counting sort, one warp an expert. Each warp counts the ids below its own, which is where its
// slots begin, and then writes its slots in order: no scratch, no atomics, any number of experts and slots.
//
// An id outside the experts is sorted nowhere; as many slots as there are such ids are -1, at the end. Launched by
// router_launch.py. Grid: ceil(experts / 8); of local_ids ceil(count / 256).
#include "launch.cuh"

constexpr int WARPS = 8, AHEAD = 4;  // AHEAD loads in flight

struct Ids {
    int at[AHEAD];

    __device__ __forceinline__ Ids(const int* ids, int first, int count, int lane) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int slot = first + i * 32 + lane;
            at[i] = slot < count ? ids[slot] : -1;
        }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) sort_by_expert(
    const int* __restrict__ ids,  // [slots]
    int* __restrict__ sorted,     // [slots]
    int* __restrict__ offsets,    // [experts + 1]
    int slots, int experts) {
    allow_next_launch();
    wait_for_previous_launch();
    const int lane = threadIdx.x & 31, expert = blockIdx.x * WARPS + (threadIdx.x >> 5);
    int below = 0, own = 0;
    for (int first = 0; first < slots; first += AHEAD * 32) {
        const Ids chunk(ids, first, slots, lane);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {  // unsigned: a negative id is above all
            below += __popc(__ballot_sync(0xffffffffu, (u32)chunk.at[i] < (u32)expert));
            own += __popc(__ballot_sync(0xffffffffu, chunk.at[i] == expert));
        }
    }
    if (expert >= experts) return;  // no barrier follows
    if (lane == 0) offsets[expert] = below;
    int place = below;
    for (int first = 0; own > 0 && first < slots; first += AHEAD * 32) {
        const Ids chunk(ids, first, slots, lane);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const bool is_own = chunk.at[i] == expert;
            const u32 mask = __ballot_sync(0xffffffffu, is_own);
            if (is_own) sorted[place + __popc(mask & ((1u << lane) - 1))] = first + i * 32 + lane;
            place += __popc(mask);
        }
    }
    if (expert == experts - 1) {
        if (lane == 0) offsets[experts] = below + own;
        for (int i = below + own + lane; i < slots; i += 32) sorted[i] = -1;
    }
}

// Ids counted from expert ``first`` on, -1 for those of other experts: the same routing as a slice of the experts sees it.
extern "C" __global__ void __launch_bounds__(256) local_ids(
    const int* __restrict__ ids,  // [count]
    int* __restrict__ out,        // [count]
    int count, int first, int experts) {
    allow_next_launch();
    wait_for_previous_launch();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;  // no barrier follows
    const u32 local = (u32)ids[i] - (u32)first;
    out[i] = local < (u32)experts ? (int)local : -1;
}
