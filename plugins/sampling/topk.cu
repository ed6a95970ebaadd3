// The k largest logits of each row in falling order, of equal ones the lowest index first.
//
// Up to 128 are found as largest.cuh says. Otherwise the k-th is found without sorting (ranking.cuh), by all blocks of the
// row; what is not behind it goes to out_ids in any order, and the last block sorts it by value and index: in shared
// memory up to LISTED, else in out_ids itself, which is slow. Values are exact. NaN, which the contract refuses, comes
// last. sm_80 and newer. Launched by launch.py.
#include "largest.cuh"

// Bitonic, for any length: every exchange puts the one that is ahead first, so that what is beyond the end may be thought of
// as the last. By one block. ``at(i)`` reads what is compared, ``exchange(i, j)`` exchanges two.
template <class At, class Exchange>
__device__ __forceinline__ void sort(int length, At at, Exchange exchange) {
#pragma unroll 1
    for (int size = 2; size / 2 < length; size *= 2)
#pragma unroll 1
        for (int flip = size - 1, distance = size / 4; flip > 0; flip = distance, distance /= 2) {
#pragma unroll 1
            for (int i = threadIdx.x; i < length; i += THREADS) {
                const int other = i ^ flip;
                if (other > i && other < length && at(other) > at(i)) exchange(i, other);
            }
            __syncthreads();
        }
}

// By one block.
__device__ __forceinline__ void sort_and_write(const bf16* logits, int k, int* ids, float* values, u64* list) {
    auto order = [&](int i) { return order_of(key_at(logits, ids[i]), ids[i]); };
    if (k <= LISTED) {
#pragma unroll 1
        for (int i = threadIdx.x; i < k; i += THREADS) list[i] = order(i);
        __syncthreads();
        sort(k, [&](int i) { return list[i]; },
             [&](int i, int j) {
                 const u64 kept = list[i];
                 list[i] = list[j], list[j] = kept;
             });
#pragma unroll 1
        for (int i = threadIdx.x; i < k; i += THREADS) ids[i] = index_in(list[i]);
    } else {
        sort(k, order, [&](int i, int j) {
            const int kept = ids[i];
            ids[i] = ids[j], ids[j] = kept;
        });
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += THREADS) values[i] = __bfloat162float(logits[ids[i]]);
}

__device__ __forceinline__ void select(const Row& row, int k, int* ids, float* values) {
    const Share share(row.V, row.row_bits, row.block);
    // Stage 1: which is the last one.
    const Place last = place_of(row, k, 0);
    const u32 last_index = index_of(row, last.key, last.rest, true);
    // Stage 2: how many this block has, and so its places; stage 3: the list, in any order.
    u32 at = 0;
#pragma unroll 1
    for (int stage = 2; stage <= 3; ++stage) {
        u32 own = 0;
        each_logit(row.logits, share.width, share.first, share.step, share.pieces, last.key, [&](u32 key, int index) {
            if (key < last.key || (key == last.key && (u32)index > last_index)) return;
            if (stage == 3) ids[at + own] = index;
            ++own;
        });
        if (stage == 3) break;
        u64 all;
        at = (u32)sum_up_to_thread(own, all) - own;
        if (threadIdx.x == 0) shared.listed = row.row_bits ? atomicAdd(&row.joint->selected, (u32)all) : 0;
        __syncthreads();
        at += shared.listed;
    }
    if (!is_last_of(row)) return;
    __syncthreads();
    sort_and_write(row.logits, k, ids, values, shared.list);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) topk_bf16(
    const bf16* logits,  // [M, V], not restrict: the launch before may write it
    float* out_values,   // [M, k]
    int* out_ids,        // [M, k], written and read by all blocks of a row
    u64* posts,          // [M, blocks * WARPS * SLOTS], zeros before and after
    Joint* joint,        // [M], zeros before and after; only where k > MOST_WANTED
    int V, int k, int row_bits) {
    allow_next_launch();
    wait_for_previous_launch();
    const size_t m = blockIdx.x >> row_bits;
    const int block = blockIdx.x & ((1 << row_bits) - 1);
    const bf16* row = logits + m * V;
    int* ids = out_ids + m * k;
    float* values = out_values + m * k;
    const Share share(V, row_bits, block);
    if (threadIdx.x == 0) shared.listed = shared.has_more = shared.meetings = shared.passes = 0;
    if (k > MOST_WANTED) {
        select({row, joint + m, V, row_bits, block}, k, ids, values);
        return;
    }
    posts += m * (WARPS * SLOTS) << row_bits;
    Pieces last;
    int at;
    const u32 own = largest_key(row, V, share, block, last, at);
    post_largest(posts, row, V, share, block, own, last, at);
    // The last of a row: where blocks begin in order, all that it waits for have begun.
    if (block + 1 < share.blocks()) return;
    const u32 listed = list_largest(posts, row, V, share, k);
    each_listed(listed, [&](int place, u64 order) {
        if (place < k) ids[place] = index_in(order), values[place] = value_of(key_in(order));
    });
}
