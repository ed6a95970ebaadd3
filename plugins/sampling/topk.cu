// The k largest logits of each row in falling order, of equal ones the lowest index first.
//
// Up to 128 are found as largest.cuh says. Otherwise the k-th is found without sorting (ranking.cuh), by all blocks of the
// row; what is not behind it goes to out_ids in any order, and the last block sorts it by value and index: in shared
// memory up to LISTED, else in out_ids itself, which is slow. Values are exact. NaN, which the contract refuses, comes
// last. sm_80 and newer. Launched by launch.py.
#include "bf16.cuh"
#include "largest.cuh"
#include "pdl.cuh"

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

// By one block; ``list`` has room for LISTED.
__device__ __forceinline__ void sort_and_write(const bf16* logits, int k, int* ids, float* values, u64* list) {
    auto order = [&](int i) { return order_of(key_at(logits, ids[i]), ids[i]); };
    const bool is_listed = k <= LISTED;
    if (is_listed) {
#pragma unroll 1
        for (int i = threadIdx.x; i < k; i += THREADS) list[i] = order(i);
        __syncthreads();
    }
    sort(k, [&](int i) { return is_listed ? list[i] : order(i); },
         [&](int i, int j) {
             if (is_listed) {
                 const u64 kept = list[i];
                 list[i] = list[j], list[j] = kept;
             } else {
                 const int kept = ids[i];
                 ids[i] = ids[j], ids[j] = kept;
             }
         });
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += THREADS) {
        if (is_listed) ids[i] = index_in(list[i]);
        values[i] = __bfloat162float(logits[ids[i]]);
    }
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
        const ulonglong2 sums = sums_up_to_thread(own);
        at = (u32)sums.x - own;
        if (threadIdx.x == 0) shared.listed = row.row_bits ? atomicAdd(&row.joint->selected, (u32)sums.y) : 0;
        __syncthreads();
        at += shared.listed;
    }
    if (!is_last_of(row)) return;
    __syncthreads();
    sort_and_write(row.logits, k, ids, values, shared.list);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) topk_bf16(
    const bf16* logits,  // [M, V], not restrict: the launch before may write it
    u64* all_posts,      // [M, lanes * WARPS * WORDS] with up to 32 lanes, one a block, zeros before and after
    int row_bits, int V, int k,
    float* out_values,   // [M, k]
    int* out_ids,        // [M, k], written and read by all blocks of a row
    Joint* joint) {      // [M], zeros before and after; only where k > MOST_WANTED
    pdl_launch_dependents();
    pdl_wait();
    const u32 m = blockIdx.x >> row_bits;
    const int block = blockIdx.x & ((1 << row_bits) - 1);
    const bf16* row = logits + (size_t)m * V;
    int* ids = out_ids + (size_t)m * k;
    float* values = out_values + (size_t)m * k;
    const Share share(V, row_bits, block);
    if (threadIdx.x == 0) shared.listed = shared.has_more = shared.meetings = shared.passes = 0;
    if (k > MOST_WANTED) {
        select({row, joint + m, V, row_bits, block}, k, ids, values);
        return;
    }
    u64* const posts = posts_of_row(all_posts, m, row_bits);
    const bool merges = block + 1 == share.blocks();
    if (merges) fetch_posts(posts, row_bits);
    post_largest(posts, row, V, share, block, [] {});
    // The last of a row: where blocks begin in order, all that it waits for have begun.
    if (!merges) return;
    const u32 listed = list_largest(posts, row, V, row_bits, k);
    each_listed(listed, [&](int place, u64 order) {
        if (place < k) ids[place] = index_in(order), values[place] = value_of(key_in(order));
    });
}
