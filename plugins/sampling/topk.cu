// The k largest logits of each row in falling order, of equal ones the lowest index first.
//
// Up to 128 are nearly always found as largest.cuh says. Otherwise the k-th is found without sorting (ranking.cuh), by a
// cluster of 8 blocks from sm_90 on, one block below; what is not behind it goes to out_ids in any order, and one block
// sorts it by value and index: in shared memory up to LISTED, else in out_ids itself, which is slow. Values are exact. NaN,
// which the contract refuses, comes last. sm_80 and newer. Launched by launch.py.
#include "largest.cuh"

__device__ __forceinline__ void select(const Row& row, int k, int* ids) {
    Ranking& shared = row.shared;
    // Stage 1: which is the last one.
    const Softmax none{0.0f, 1.0f, 0.0f};
    row.count_bins<false>(none);
    const Found last = row.locate(k, false, none);
    const u32 last_index = row.index_of(last.key, last.place);
    auto is_in = [&](int index, u32 bits) {
        const u32 key = key_of(bits);
        return key > last.key || (key == last.key && (u32)index <= last_index);
    };

    // Stage 2: how many each block has, and so its place in the list; stage 3: the list, in any order.
    u32 place = 0;
#pragma unroll 1
    for (int stage = 2; stage <= 3; ++stage) {
        if (threadIdx.x == 0) shared.selected = place;
        __syncthreads();
        row.each([&](int index, u32 bits) {
            if (!is_in(index, bits)) return;
            const u32 at = atomicAdd(&shared.selected, 1u);
            if (stage == 3) ids[at] = index;
        });
        cluster_barrier();
#pragma unroll 1
        for (u32 other = 0; stage == 2 && other < row.rank; ++other) place += word_of_rank(&shared.selected, other);
        cluster_barrier();
    }
}

// Bitonic, for any length: every exchange puts the smaller one first, so that what is beyond the end may be thought of as
// the largest. By one block. ``at(i)`` reads what is compared, ``exchange(i, j)`` exchanges two.
template <class At, class Exchange>
__device__ __forceinline__ void sort(int length, At at, Exchange exchange) {
#pragma unroll 1
    for (int size = 2; size / 2 < length; size *= 2)
#pragma unroll 1
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

// By one block.
__device__ __forceinline__ void sort_and_write(const bf16* logits, int k, int* ids, float* values, u64* list) {
    if (k <= LISTED) {
#pragma unroll 1
        for (int i = threadIdx.x; i < k; i += THREADS) list[i] = order_of(key_at(logits, ids[i]), ids[i]);
        __syncthreads();
        sort_list(list, k);
#pragma unroll 1
        for (int i = threadIdx.x; i < k; i += THREADS) ids[i] = (int)(u32)list[i];
    } else {
        sort(k, [&](int i) { return order_of(key_at(logits, ids[i]), ids[i]); },
             [&](int i, int j) {
                 const int kept = ids[i];
                 ids[i] = ids[j], ids[j] = kept;
             });
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += THREADS) values[i] = __bfloat162float(logits[ids[i]]);
}

extern "C" __global__ void TEAM_BOUNDS(THREADS) topk_bf16(
    const bf16* logits,  // [M, V], not restrict: the launch before may write it
    float* out_values,   // [M, k]
    int* out_ids,        // [M, k], written and read by all blocks of a row
    u64* posts,          // [M, stride], zeros before and after
    int V, int k, int row_bits, int stride) {
    __shared__ Ranking shared;
    allow_next_launch();
    wait_for_previous_launch();
    const size_t m = blockIdx.x >> row_bits;
    const Row row{logits + m * V, V, team_rank(), shared};
    int* ids = out_ids + m * k;
    float* values = out_values + m * k;
    if (k <= MOST_WANTED) {
        Share share(posts, V, row_bits, stride);
        Pieces last;
        int at;
        const u32 own = largest_key(row.logits, share, last, at, [&] { begin_team(shared); });
        share.want(k);
        const int listed = list_largest(shared, row.logits, share, own, last, at, k, [] {});
        if (!share.is_last_team()) return;
        if (share.merges())
#pragma unroll 1
            for (int i = threadIdx.x; i < k && k <= listed; i += THREADS) {
                const u64 order = shared.list[i];
                ids[i] = (int)(u32)order;
                values[i] = value_of(key_in(order));
            }
        cluster_wait();
        const u32 verdict = k > listed;
        if (told(shared, row.rank, verdict) == 0) return;
    }  // else launch.py gives a row one cluster
    __syncthreads();  // the list is read no more
    select(row, k, ids);
    if (row.rank == 0) sort_and_write(row.logits, k, ids, values, shared.list);
    cluster_barrier();  // no block ends while another reads its shared memory
}
