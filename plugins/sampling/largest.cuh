// The largest logits of a row, sorted, in one block: what top-k and sampling look at nearly always.
//
// Of the largest logits that the warps of a team met, the ``least``-th bounds the row's ``least``-th from below, and in a
// row without an order of its own few logits beyond those wanted reach it. Those that do are listed, brought together by
// block 0, and sorted. A row whose list gets too long, or what lies beyond a list, is left to ranking.cuh.
#pragma once
#include "ranking.cuh"

constexpr int LISTED = sizeof(Ranking::list) / sizeof(u64);
constexpr int MOST_WANTED = TEAM * WARPS;

__device__ __forceinline__ u32 key_at(const bf16* logits, u32 index) {
    return key_of(*reinterpret_cast<const unsigned short*>(logits + index));
}

// What rises along the order: the complement of the key, then the index.
__device__ __forceinline__ u64 order_of(u32 key, u32 index) { return ((u64)(0xFFFFu - key) << 32) | index; }
__device__ __forceinline__ u32 key_in(u64 order) { return 0xFFFFu - (u32)(order >> 32); }

// Bitonic, for any length: every exchange puts the smaller one first, so that what is beyond the end may be thought of as
// the largest. By one block. ``at(i)`` reads what is compared, ``exchange(i, j)`` exchanges two.
template <class At, class Exchange>
__device__ __forceinline__ void sort(int length, At at, Exchange exchange) {
    for (int size = 2; size / 2 < length; size *= 2)
        for (int flip = size - 1, distance = size / 4; flip > 0; flip = distance, distance /= 2) {
#pragma unroll 1
            for (int i = threadIdx.x; i < length; i += THREADS) {
                const int other = i ^ flip;
                if (other > i && other < length && at(other) < at(i)) exchange(i, other);
            }
            __syncthreads();
        }
}

__device__ __forceinline__ void sort_list(u64* list, int length) {
    sort(length, [&](int i) { return list[i]; },
         [&](int i, int j) {
             const u64 kept = list[i];
             list[i] = list[j], list[j] = kept;
         });
}

// The key of the ``least``-th largest of what the warps of the team met, or of the last one of them; 0 where that is none.
// Call after best_of_row: ``shared.best`` holds them.
__device__ __forceinline__ u32 key_to_reach(Ranking& shared, u32 least) {
    if (threadIdx.x < MOST_WANTED) {
        const Best& place = shared.best[threadIdx.x % WARPS];
        const float value = load_from_rank(&place.value, threadIdx.x / WARPS);
        const bool is_one = (int)word_of_rank(reinterpret_cast<const u32*>(&place.index), threadIdx.x / WARPS) != NOWHERE;
        shared.buckets[threadIdx.x] = is_one ? key_of(__float_as_uint(value) >> 16) : 0;
    }
    if (threadIdx.x == 0) shared.bin = 0;
    __syncthreads();
    // LANES threads for each of them, which all finish at once.
    constexpr int LANES = THREADS / MOST_WANTED;
    static_assert(LANES <= 32 && MOST_WANTED % (4 * LANES) == 0 || TEAM == 1);
    const int index = threadIdx.x / LANES, part = threadIdx.x % LANES;
    const u32 own = shared.buckets[index];
    u32 ahead = 0, ones = 0;
#pragma unroll 8
    for (int i = 4 * part; i < MOST_WANTED; i += 4 * LANES) {
        const uint4 keys = *reinterpret_cast<const uint4*>(&shared.buckets[i]);
        const u32 four[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            ahead += four[e] > own || (four[e] == own && i + e < index);
            ones += four[e] != 0;
        }
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        ahead += __shfl_xor_sync(ALL_LANES, ahead, distance);
        ones += __shfl_xor_sync(ALL_LANES, ones, distance);
    }
    if (part == 0 && own != 0 && ahead + 1 == min(least, ones)) shared.bin = own;
    __syncthreads();
    return shared.bin;
}

// Lists the largest logits of the row in order in block 0's ``list``, and returns there how many they are: 0 if they are
// too many, less than ``least`` if the row is short. All threads of the team; a cluster barrier must follow.
__device__ __forceinline__ u32 list_largest(const Row& row, u32 least) {
    Ranking& shared = row.shared;
    const u32 reach = key_to_reach(shared, least);
    if (threadIdx.x == 0) shared.selected = 0;
    __syncthreads();
    row.each<4>([&](int index, u32 bits) {
        const u32 key = key_of(bits);
        if (key >= reach && reach != 0) {
            const u32 place = atomicAdd(&shared.selected, 1u);
            if (place < LISTED) shared.list[place] = order_of(key, index);
        }
    });
    cluster_barrier();
    if (row.rank != 0) return 0;
    u32 total = 0, begin = 0, count = 0;  // of all blocks; and the part that this thread's share of the threads brings over
    const u32 source = threadIdx.x / (THREADS / TEAM);
#pragma unroll
    for (u32 other = 0; other < TEAM; ++other) {
        const u32 selected = word_of_rank(&shared.selected, other);
        if (other == source) begin = total, count = selected;
        total += selected;
    }
    if (total > LISTED) return 0;
    const u32* list = reinterpret_cast<const u32*>(shared.list);
    for (u32 i = threadIdx.x % (THREADS / TEAM); source > 0 && i < count; i += THREADS / TEAM)
        shared.list[begin + i] = word_of_rank(list + 2 * i, source) | (u64)word_of_rank(list + 2 * i + 1, source) << 32;
    __syncthreads();
    sort_list(shared.list, total);
    return total;
}
