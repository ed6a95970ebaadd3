// The k largest logits of each row in descending order, the lower index first among equal ones.
//
// Up to 128 come from candidates.cuh. For more, all blocks of the row find the k-th without sorting (radix_select.cuh),
// and write everything up to it to out_ids in any order. The last block sorts that by value and index: in shared memory
// up to LIST_SIZE entries, else in out_ids itself, which is slow. Values are exact. NaN, which the contract rejects,
// comes last.
//
// Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "candidates.cuh"
#include "pdl.cuh"

// A bitonic sort of any length, by one block. Every exchange puts the larger one first, so that missing entries count
// as the last. ``at(i)`` reads an entry, ``exchange(i, j)`` exchanges two.
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

// By one block; ``list`` has room for LIST_SIZE.
__device__ __forceinline__ void sort_and_write(const bf16* logits, int k, int* ids, float* values, u64* list) {
    auto order = [&](int i) { return order_of(key_at(logits, ids[i]), ids[i]); };
    const bool is_listed = k <= LIST_SIZE;
    if (is_listed) {
#pragma unroll 1
        for (int i = threadIdx.x; i < k; i += THREADS) list[i] = order(i);
        __syncthreads();
    }
    sort(
        k, [&](int i) { return is_listed ? list[i] : order(i); },
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

__device__ __forceinline__ void select(const LogitsRow& row, int k, int* ids, float* values) {
    const RowSlice slice(row.V, row.row_bits, row.block);
    // Stage 1: the k-th logit.
    const Selected last = select_k(row, k, 0);
    const u32 last_index = index_of(row, last.key, last.rest, true);
    // Stage 2: how many this block has, and so its places. Stage 3: the list, in any order.
    u32 at = 0;
#pragma unroll 1
    for (int stage = 2; stage <= 3; ++stage) {
        u32 own = 0;
        for_each_logit(row.logits, slice.width, slice.first, slice.step, slice.vecs, last.key, [&](u32 key, int index) {
            if (key < last.key || (key == last.key && (u32)index > last_index)) return;
            if (stage == 3) ids[at + own] = index;
            ++own;
        });
        if (stage == 3) break;
        const ulonglong2 sums = inclusive_scan_over_block(own);
        at = (u32)sums.x - own;
        if (threadIdx.x == 0) shared.listed = row.row_bits ? atomicAdd(&row.workspace->selected, (u32)sums.y) : 0;
        __syncthreads();
        at += shared.listed;
    }
    if (!is_last_block(row)) return;
    __syncthreads();
    sort_and_write(row.logits, k, ids, values, shared.list);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) topk_bf16(
    const bf16* logits,   // [M, V], not __restrict__: the kernel before may write it
    u64* all_candidates,  // [M, lanes * WARPS * CANDIDATES], a lane for each of up to 32 blocks, zeros before and after
    int row_bits, int V, int k,
    float* out_values,          // [M, k]
    int* out_ids,               // [M, k], written and read by all blocks of a row
    RowWorkspace* workspace) {  // [M], zeros before and after; only where k > MAX_LISTED_K
    pdl_launch_dependents();
    pdl_wait();
    const u32 m = blockIdx.x >> row_bits;
    const int block = blockIdx.x & ((1 << row_bits) - 1);
    const bf16* row = logits + (size_t)m * V;
    int* ids = out_ids + (size_t)m * k;
    float* values = out_values + (size_t)m * k;
    const RowSlice slice(V, row_bits, block);
    if (threadIdx.x == 0) shared.listed = shared.has_more = shared.barriers_passed = shared.passes = 0;
    if (k > MAX_LISTED_K) {
        select({row, workspace + m, V, row_bits, block}, k, ids, values);
        return;
    }
    u64* const candidates = candidates_of_row(all_candidates, m, row_bits);
    const bool is_merger = block + 1 == slice.blocks();
    if (is_merger) prefetch_candidates(candidates, row_bits);
    post_candidates(candidates, row, V, slice, block, [] {});
    // Blocks start in order, so that all blocks that the last of a row waits for have started.
    if (!is_merger) return;
    const u32 listed = collect_largest(candidates, row, V, row_bits, k);
    for_each_ranked(listed, [&](int place, u64 order) {
        if (place < k) ids[place] = index_in(order), values[place] = value_of(key_in(order));
    });
}
