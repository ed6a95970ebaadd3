// Sorts slots by expert: a stable counting sort with one warp for each expert. A warp counts the ids below its expert,
// which gives the offset of its slots, and then writes its slots in order. It needs no scratch and no reduction over
// blocks. The index of an expert in the work list is its rank among the experts with slots, from a bit mask that each
// block makes.
//
// Ids outside the experts are dropped: for each of them one slot at the end is -1. Launched by launch.py. sm_80 and
// newer. Grid: ceil(experts / 8); of local_ids ceil(count / 256).
#include "pdl.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32, LOADS = 4;  // LOADS in flight for each lane
constexpr int MAX_EXPERTS = 32768;                         // one bit each in shared memory
constexpr int LOCAL_THREADS = 256;                         // of local_ids

struct Ids {
    int at[LOADS];

    __device__ __forceinline__ Ids(const int* ids, int first, int experts_with_slots, int lane) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int slot = first + i * 32 + lane;
            at[i] = slot < experts_with_slots ? ids[slot] : -1;
        }
    }
};

// The number of experts with slots below ``expert``; the same for all lanes.
__device__ __forceinline__ int rank_of(const u32* has_slots, int expert, int lane) {
    int rank = 0;
    for (int word = lane; word * 32 < expert; word += 32) {
        const int bits = expert - word * 32;
        rank += __popc(has_slots[word] & (bits < 32 ? (1u << bits) - 1 : 0xffffffffu));
    }
    return __reduce_add_sync(0xffffffffu, rank);
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_by_expert(
    const int* ids,             // [slots]
    int* __restrict__ sorted,   // [slots]
    int* __restrict__ offsets,  // [experts + 1]
    int* __restrict__ work,     // [experts, 4]
    int slots, int experts) {
    __shared__ u32 has_slots[MAX_EXPERTS / 32];
    pdl_launch_dependents();
    pdl_wait();
    const int lane = threadIdx.x & 31, expert = blockIdx.x * WARPS + (threadIdx.x >> 5);
    for (int word = threadIdx.x; word * 32 < experts; word += THREADS) has_slots[word] = 0;
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += THREADS) {
        const u32 id = ids[slot];
        if (id < (u32)experts) atomicOr(&has_slots[id / 32], 1u << id % 32);
    }
    int below = 0, count_of_expert = 0;
    for (int first = 0; first < slots; first += LOADS * 32) {
        const Ids chunk(ids, first, slots, lane);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {  // unsigned: a negative id is larger than all experts
            below += __popc(__ballot_sync(0xffffffffu, (u32)chunk.at[i] < (u32)expert));
            count_of_expert += __popc(__ballot_sync(0xffffffffu, chunk.at[i] == expert));
        }
    }
    __syncthreads();
    if (expert >= experts) return;  // no barrier follows
    const int rank = rank_of(has_slots, expert, lane), experts_with_slots = rank_of(has_slots, experts, lane);
    if (lane == 0) {
        offsets[expert] = below;
        // Experts without slots come after all others.
        int4* const place =
            reinterpret_cast<int4*>(work) + (count_of_expert > 0 ? rank : experts_with_slots + expert - rank);
        *place = count_of_expert > 0 ? make_int4(expert, below, below + count_of_expert, experts_with_slots)
                                     : make_int4(-1, 0, 0, experts_with_slots);
    }
    int place = below;
    for (int first = 0; count_of_expert > 0 && first < slots; first += LOADS * 32) {
        const Ids chunk(ids, first, slots, lane);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const bool is_mine = chunk.at[i] == expert;
            const u32 mask = __ballot_sync(0xffffffffu, is_mine);
            if (is_mine) sorted[place + __popc(mask & ((1u << lane) - 1))] = first + i * 32 + lane;
            place += __popc(mask);
        }
    }
    if (expert == experts - 1) {
        if (lane == 0) offsets[experts] = below + count_of_expert;
        for (int i = below + count_of_expert + lane; i < slots; i += 32) sorted[i] = -1;
    }
}

// Ids relative to expert ``first``, -1 outside the ``experts`` of this slice: routing for expert parallelism.
extern "C" __global__ void __launch_bounds__(LOCAL_THREADS) local_ids(const int* ids,         // [count]
                                                                      int* __restrict__ out,  // [count]
                                                                      int experts_with_slots, int first, int experts) {
    pdl_launch_dependents();
    pdl_wait();
    const int i = blockIdx.x * LOCAL_THREADS + threadIdx.x;
    if (i >= experts_with_slots) return;  // no barrier follows
    const u32 local = (u32)ids[i] - (u32)first;
    out[i] = local < (u32)experts ? (int)local : -1;
}
