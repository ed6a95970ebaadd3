// Radix select: finds a place in the descending order of a row's logits without sorting it. BF16 has only 65536 values.
// Used by candidates.cuh, topk.cu and sample.cu. sm_80 and newer.
//
// The order is measured either by the number of logits, or by their mass: exp((logit - largest) / temperature) as an
// integer, FP32 times 2^k. Integer sums do not depend on their order, so that atomics are exact. A place is found in
// passes over the row. Each pass divides a part of the order into 256 bins: by the upper half of the key, then by its
// lower half, then equal keys by index. Blocks sum bins in shared memory and add them up in L2, where all blocks of the
// row meet once a pass. Each block then searches the bins. All blocks of a row must therefore run at the same time
// (launch.py).
#pragma once
#include "bf16.cuh"
#include "fast_math.cuh"
#include "global_memory.cuh"
#include "logits.cuh"
#include "shared_memory.cuh"

constexpr int BINS = THREADS,
              COPIES = 8;  // a bin a thread; copies, so that the lanes of a warp seldom add to the same word
constexpr int LIST_SIZE = BINS * COPIES, MAX_LISTED_K = 128;

// mass(key) = 2^((logit - largest) * rate) * unit.
struct SoftmaxMass {
    float largest, rate, unit;
    __device__ __forceinline__ u64 mass(u32 key) const {
        return __float2ull_rz(exp2_approx((value_of(key) - largest) * rate) * unit);
    }
};
// The rate of a temperature above 0. It is finite, so that the power of the largest logit is 1.
__device__ __forceinline__ float rate_of(float temperature) { return fminf(1.44269504f / temperature, 3e38f); }

// What the blocks of a row share in global memory: zeros before and after a launch. launch.py has its size.
constexpr int SETS = 3;
struct RowWorkspace {
    u32 arrived, done;
    u32 largest, selected;
    u64 sums[SETS][BINS];
};

struct RadixShared {
    union {
        struct {
            u32 low[BINS * COPIES], high[BINS * COPIES];
        };
        u64 list[LIST_SIZE];
    };
    u64 sorted[MAX_LISTED_K];
    u32 tops[WARPS];
    __align__(16) unsigned short warp_tops[32], warp_top_keys[32];  // the largest logits of each warp
    u64 sums[WARPS][32];                                            // prefix sums of a few entries, in parts
    u64 of_warp[WARPS];
    u64 rest;
    u32 bin, index, listed, has_more;
    u32 barriers_passed, passes;
};
// A global of the block, so that its address is known everywhere and is no parameter.
__shared__ RadixShared shared;

// A logit in the descending order: a larger value comes first. The lower 16 bits are free.
__device__ __forceinline__ u64 order_of(u32 key, u32 index, u32 low = 0xFFFFu) {
    return (u64)key << 48 | (u64)~index << 16 | low;
}
__device__ __forceinline__ u32 key_in(u64 order) { return (u32)(order >> 48); }
__device__ __forceinline__ int index_in(u64 order) { return (int)~(u32)(order >> 16); }

// False if the list is full.
__device__ __forceinline__ bool append(u64 order) {
    const u32 place = increment_shared(shared.listed);
    if (place < LIST_SIZE) shared.list[place] = order;
    return place < LIST_SIZE;
}

// The inclusive prefix sum over the threads of the block, and the total.
__device__ __noinline__ ulonglong2 inclusive_scan_over_block(u64 sum) {
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

// The result of a search over bins, one a thread: the first bin whose prefix sum reaches ``wanted``, the part of
// ``wanted`` inside this bin, and the sum of all bins.
struct Found {
    u32 bin;
    u64 rest, all;
};
__device__ __noinline__ Found search(u64 own, u64 wanted) {
    const ulonglong2 sums = inclusive_scan_over_block(own);
    const u64 up_to = sums.x;
    if (threadIdx.x == BINS - 1) shared.bin = BINS - 1, shared.rest = 1;  // without such a bin, which no valid row has
    __syncthreads();
    if (up_to - own < wanted && wanted <= up_to) shared.bin = threadIdx.x, shared.rest = wanted - (up_to - own);
    __syncthreads();
    return {shared.bin, shared.rest, sums.y};
}

// The logits of a pass, and their bins: keys in ``lowest .. highest``, by their bits from ``shift`` on, complemented,
// or by index. A logit adds 1, or its mass.
struct HistogramPass {
    u32 lowest, highest;
    int shift;
    bool by_index, by_mass;
};

// A row, or this block's part of it.
struct LogitsRow {
    const bf16* logits;
    RowWorkspace* workspace;
    int V, row_bits, block;
};

// A barrier of all blocks of the row.
__device__ __forceinline__ void row_barrier(const LogitsRow& row) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 all = ++shared.barriers_passed << row.row_bits;
        add_release(&row.workspace->arrived, 1);
        u32 arrived = 0;
        while (arrived < all) arrived = load_acquire(&row.workspace->arrived);
    }
    __syncthreads();
}

// The sum of this thread's bin over the row. By all threads. Parameters are passed by value, in registers.
__device__ __noinline__ u64 sum_bins(LogitsRow row, HistogramPass pass, SoftmaxMass softmax) {
    const RowSlice slice(row.V, row.row_bits, row.block);
    __syncthreads();
    const u32 set = shared.passes % SETS, copy = threadIdx.x % COPIES;
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS * COPIES; i += THREADS) shared.low[i] = shared.high[i] = 0;
    __syncthreads();
    for_each_four(
        row.logits, slice.width, slice.first, slice.step, slice.vecs, pass.lowest, [&](uint2 bits, int index) {
            constexpr int FOUR = 4;  // independent steps for four logits at a time
            u64 mass[FOUR];
            u32 at[FOUR], before[FOUR];
            u32 any = 0;
#pragma unroll
            for (int i = 0; i < FOUR; ++i) {
                const u32 key = key_of((i < 2 ? bits.x : bits.y) >> 16 * (i % 2) & 0xFFFFu);
                const u32 bin = pass.by_index ? (u32)(index + i) >> pass.shift : ~(key >> pass.shift) & (BINS - 1);
                const bool counts = key >= pass.lowest && key <= pass.highest && i < slice.width;
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
    // Three sets take turns: one is summed, one is read, and one, which all blocks have read, is cleared.
    u64* const own = &row.workspace->sums[set][threadIdx.x];
    if (sum) add_relaxed(own, sum);
    row_barrier(row);
    if (row.block == 0) row.workspace->sums[(set + SETS - 1) % SETS][threadIdx.x] = 0;
    if (threadIdx.x == 0) ++shared.passes;
    return load_relaxed(own);
}

// The index of the wanted-th logit with this key, counted from 1 by rising index. The result is 0 in blocks that do not
// need it.
__device__ __noinline__ u32 index_of(LogitsRow row, u32 key, u64 wanted, bool is_needed) {
    int bits = 0;
#pragma unroll 1
    while (BINS << bits < row.V) ++bits;
    const Found bin = search(sum_bins(row, {key, key, bits, true, false}, {}), wanted);
    if (!is_needed) return 0;
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

// Among the keys from ``least`` on: the key of the wanted-th logit, counted from 1, and its place among equal ones.
struct Selected {
    u32 key;
    u64 rest;
};
__device__ __noinline__ Selected select_k(LogitsRow row, u64 wanted, u32 least) {
    const Found upper = search(sum_bins(row, {least, HIGHEST_KEY, 8, false, false}, {}), wanted);
    const u32 begin = (BINS - 1 - upper.bin) << 8;
    const Found lower = search(sum_bins(row, {max(least, begin), begin | 0xFFu, 0, false, false}, {}), upper.rest);
    return {begin | (BINS - 1 - lower.bin), lower.rest};
}

// By all threads, after the last read of ``workspace``. True in the last block of the row, which sees all writes of the
// others, and clears the workspace.
__device__ __forceinline__ bool is_last_block(const LogitsRow& row) {
    if (row.row_bits == 0) return true;
    __syncthreads();
    if (threadIdx.x == 0) shared.index = add_acq_rel(&row.workspace->done, 1);
    __syncthreads();
    if (shared.index + 1 < 1u << row.row_bits) return false;
#pragma unroll
    for (int set = 0; set < SETS; ++set) row.workspace->sums[set][threadIdx.x] = 0;
    if (threadIdx.x == 0)
        row.workspace->arrived = row.workspace->done = row.workspace->largest = row.workspace->selected = 0;
    return true;
}
