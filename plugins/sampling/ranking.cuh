// Where in the falling order of a row's logits something lies, without sorting it: BF16 has 65536 values only.
//
// What is summed along the order is either how many logits there are, or their mass: exp((logit - largest) / temperature)
// as a whole number, FP32 times 2^k. Whole numbers make every sum the same in any order, so that atomics serve. A place is
// found in passes over the row, each of which shares a part of the order out among 256 bins: by the upper half of a key,
// by its lower half, and of equal keys by index. Bins are summed in shared memory and brought together in L2, where all
// blocks of the row meet once a pass; each then searches for itself. So all of them must run at once (launch.py).
#pragma once
#include "bf16.cuh"
#include "fast_math.cuh"
#include "global_memory.cuh"
#include "logits.cuh"
#include "shared_memory.cuh"

constexpr int BINS = THREADS, COPIES = 8;  // a bin a thread; so that lanes of a warp seldom add to one word
constexpr int LISTED = BINS * COPIES, MOST_WANTED = 128;  // of the latter launch.py says the same

// 2^((logit - largest) * rate) * unit.
struct Softmax {
    float largest, rate, unit;
    __device__ __forceinline__ u64 mass(u32 key) const {
        return __float2ull_rz(exp2_approx((value_of(key) - largest) * rate) * unit);
    }
};
// The rate of a temperature above 0; finite, so that the largest has a power of 1.
__device__ __forceinline__ float rate_of(float temperature) { return fminf(1.44269504f / temperature, 3e38f); }

// What the blocks of a row share in global memory: zeros before and after. launch.py knows the size.
constexpr int SETS = 3;
struct Joint {
    u32 arrived, done;
    u32 largest, selected;
    u64 sums[SETS][BINS];
};

struct Shared {
    union {
        struct {
            u32 low[BINS * COPIES], high[BINS * COPIES];
        };
        u64 list[LISTED];
    };
    u64 sorted[MOST_WANTED];
    u32 tops[WARPS];
    __align__(16) unsigned short few[32], few_keys[32];  // the largest of each warp, and their keys
    u64 sums[WARPS][32];  // parts of sums up to each of a few
    u64 of_warp[WARPS];
    u64 rest;
    u32 bin, index, listed, has_more;
    u32 meetings, passes;
};
// Of the block; not passed about, so that all code knows where it is.
__shared__ Shared shared;

// A logit in the falling order: larger is ahead. The lower 16 bits are anybody's.
__device__ __forceinline__ u64 order_of(u32 key, u32 index, u32 low = 0xFFFFu) {
    return (u64)key << 48 | (u64)~index << 16 | low;
}
__device__ __forceinline__ u32 key_in(u64 order) { return (u32)(order >> 48); }
__device__ __forceinline__ int index_in(u64 order) { return (int)~(u32)(order >> 16); }

// Without what the compiler adds to share one among the lanes of a warp.
__device__ __forceinline__ u32 count_up(u32& counter) {
    u32 before;
    asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(&counter)) : "memory");
    return before;
}
// True as long as the list has room.
__device__ __forceinline__ bool list_up(u64 order) {
    const u32 place = count_up(shared.listed);
    if (place < LISTED) shared.list[place] = order;
    return place < LISTED;
}

// The sum over all threads up to and with this one, and that over all.
__device__ __noinline__ ulonglong2 sums_up_to_thread(u64 sum) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int distance = 1; distance < 32; distance *= 2) {
        const u64 lower = __shfl_up_sync(ALL_LANES, sum, distance);
        if (lane >= distance) sum += lower;
    }
    __syncthreads();
    if (lane == 31) shared.of_warp[warp] = sum;
    __syncthreads();
    u64 before = 0, all = 0;
#pragma unroll 1
    for (int other = 0; other < WARPS; ++other) {
        if (other == warp) before = all;
        all += shared.of_warp[other];
    }
    return make_ulonglong2(sum + before, all);
}

// Of sums of bins, one a thread: the first bin whose sum, with those before, reaches ``wanted``, how much of it is wanted, and
// the sum of all.
struct Found {
    u32 bin;
    u64 rest, all;
};
__device__ __noinline__ Found search(u64 own, u64 wanted) {
    const ulonglong2 sums = sums_up_to_thread(own);
    const u64 up_to = sums.x;
    if (threadIdx.x == BINS - 1) shared.bin = BINS - 1, shared.rest = 1;  // where there is none: no such row is right
    __syncthreads();
    if (up_to - own < wanted && wanted <= up_to) shared.bin = threadIdx.x, shared.rest = wanted - (up_to - own);
    __syncthreads();
    return {shared.bin, shared.rest, sums.y};
}

// Which logits a pass sums, and into which bins: those whose key is in ``lowest .. highest``, by the ``shift``-th bits of it,
// complemented, or by index. Each counts 1, or its mass.
struct Pass {
    u32 lowest, highest;
    int shift;
    bool by_index, by_mass;
};

// A row, or a part of it if blocks share it.
struct Row {
    const bf16* logits;
    Joint* joint;
    int V, row_bits, block;
};

// All blocks of the row.
__device__ __forceinline__ void meet(const Row& row) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 all = ++shared.meetings << row.row_bits;
        add_release(&row.joint->arrived, 1);
        u32 arrived = 0;
        while (arrived < all) arrived = load_acquire(&row.joint->arrived);
    }
    __syncthreads();
}

// The sum of this thread's bin over the row. All threads; what is passed is passed in registers.
__device__ __noinline__ u64 sum_bins(Row row, Pass pass, Softmax softmax) {
    const Share share(row.V, row.row_bits, row.block);
    __syncthreads();
    const u32 set = shared.passes % SETS, copy = threadIdx.x % COPIES;
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS * COPIES; i += THREADS) shared.low[i] = shared.high[i] = 0;
    __syncthreads();
    each_four(row.logits, share.width, share.first, share.step, share.pieces, pass.lowest, [&](uint2 bits, int index) {
        constexpr int FOUR = 4;  // steps of all, so that none waits for the last
        u64 mass[FOUR];
        u32 at[FOUR], before[FOUR];
        u32 any = 0;
#pragma unroll
        for (int i = 0; i < FOUR; ++i) {
            const u32 key = key_of((i < 2 ? bits.x : bits.y) >> 16 * (i % 2) & 0xFFFFu);
            const u32 bin = pass.by_index ? (u32)(index + i) >> pass.shift : ~(key >> pass.shift) & (BINS - 1);
            const bool counts = key >= pass.lowest && key <= pass.highest && i < share.width;
            at[i] = bin * COPIES + copy;
            mass[i] = counts ? pass.by_mass ? softmax.mass(key) : 1 : 0;
            any |= counts;
        }
        if (!any) return;
#pragma unroll
        for (int i = 0; i < FOUR; ++i)
            if (mass[i]) before[i] = atomicAdd(&shared.low[at[i]], (u32)mass[i]);
#pragma unroll
        for (int i = 0; i < FOUR; ++i) {
            const u32 high = (u32)(mass[i] >> 32) + (mass[i] && before[i] + (u32)mass[i] < before[i]);
            if (high) atomicAdd(&shared.high[at[i]], high);
        }
    });
    __syncthreads();
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        const int at = threadIdx.x * COPIES + (i + threadIdx.x) % COPIES;
        sum += shared.low[at] + ((u64)shared.high[at] << 32);
    }
    if (row.row_bits == 0) return sum;
    // Of three sets in turn one is summed, one is read, and one, which all have read, is cleared.
    u64* const own = &row.joint->sums[set][threadIdx.x];
    if (sum) add_relaxed(own, sum);
    meet(row);
    if (row.block == 0) row.joint->sums[(set + SETS - 1) % SETS][threadIdx.x] = 0;
    if (threadIdx.x == 0) ++shared.passes;
    return load_relaxed(own);
}

// Of the logits with this key the wanted-th by index, from 1: its index, in all threads; for a block that does not ask, 0.
__device__ __noinline__ u32 index_of(Row row, u32 key, u64 wanted, bool is_asked) {
    int bits = 0;
#pragma unroll 1
    while (BINS << bits < row.V) ++bits;
    const Found bin = search(sum_bins(row, {key, key, bits, true, false}, {}), wanted);
    if (!is_asked) return 0;
    const int each = max((1 << bits) / THREADS, 1);
    const int first = ((int)bin.bin << bits) + threadIdx.x * each;
    const int end = min(min(first + each, (int)(bin.bin + 1) << bits), row.V);
    u32 count = 0;
#pragma unroll 1
    for (int i = first; i < end; ++i) count += key_at(row.logits, i) == key;
    const Found thread = search(count, bin.rest);
    if (threadIdx.x == thread.bin) {
        u32 place = 0, index = first;
#pragma unroll 1
        for (int i = first; i < end; ++i)
            if (key_at(row.logits, i) == key && ++place == thread.rest) index = i;
        shared.index = index;
    }
    __syncthreads();
    return shared.index;
}

// Of the keys from ``least`` on that of the wanted-th logit, from 1, and its place among equal ones.
struct Place {
    u32 key;
    u64 rest;
};
__device__ __noinline__ Place place_of(Row row, u64 wanted, u32 least) {
    const Found upper = search(sum_bins(row, {least, HIGHEST_KEY, 8, false, false}, {}), wanted);
    const u32 begin = (BINS - 1 - upper.bin) << 8;
    const Found lower = search(sum_bins(row, {max(least, begin), begin | 0xFFu, 0, false, false}, {}), upper.rest);
    return {begin | (BINS - 1 - lower.bin), lower.rest};
}

// By all threads once nothing of ``joint`` is read any more; true in the block that is the last to say so. That one finds
// what the others wrote before, and clears.
__device__ __forceinline__ bool is_last_of(const Row& row) {
    if (row.row_bits == 0) return true;
    __syncthreads();
    if (threadIdx.x == 0)
        shared.index = add_acq_rel(&row.joint->done, 1);
    __syncthreads();
    if (shared.index + 1 < 1u << row.row_bits) return false;
#pragma unroll
    for (int set = 0; set < SETS; ++set) row.joint->sums[set][threadIdx.x] = 0;
    if (threadIdx.x == 0) row.joint->arrived = row.joint->done = row.joint->largest = row.joint->selected = 0;
    return true;
}
