// Slots by expert: a stable counting sort, one warp an expert. Each warp counts the ids below its own, which is where
// its slots begin, and then writes its slots in order: no scratch, no sums over blocks, any number of slots. The work
// list takes the rank of an expert among those that have slots: each block notes all ids in a bit an expert.
//
// An id outside the experts is sorted nowhere; as many slots as there are such ids are -1, at the end. Launched by
// launch.py. Grid: ceil(experts / 8); of local_ids ceil(count / 256).
#include "pdl.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32, AHEAD = 4;  // AHEAD loads in flight
constexpr int MAX_EXPERTS = 32768;                         // a bit each in shared memory

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

// The experts below one that have slots; the same for all lanes.
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
    int below = 0, own = 0;
    for (int first = 0; first < slots; first += AHEAD * 32) {
        const Ids chunk(ids, first, slots, lane);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {  // unsigned: a negative id is above all
            below += __popc(__ballot_sync(0xffffffffu, (u32)chunk.at[i] < (u32)expert));
            own += __popc(__ballot_sync(0xffffffffu, chunk.at[i] == expert));
        }
    }
    __syncthreads();
    if (expert >= experts) return;  // no barrier follows
    const int rank = rank_of(has_slots, expert, lane), count = rank_of(has_slots, experts, lane);
    if (lane == 0) {
        offsets[expert] = below;
        // Those without slots are behind all that have some.
        int4* const place = reinterpret_cast<int4*>(work) + (own > 0 ? rank : count + expert - rank);
        *place = own > 0 ? make_int4(expert, below, below + own, count) : make_int4(-1, 0, 0, count);
    }
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

// Ids counted from expert ``first`` on, -1 for those of other experts: the same routing as a slice of the experts sees
// it.
extern "C" __global__ void __launch_bounds__(256) local_ids(const int* ids,         // [count]
                                                            int* __restrict__ out,  // [count]
                                                            int count, int first, int experts) {
    pdl_launch_dependents();
    pdl_wait();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;  // no barrier follows
    const u32 local = (u32)ids[i] - (u32)first;
    out[i] = local < (u32)experts ? (int)local : -1;
}
