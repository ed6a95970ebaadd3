// out[m] = a token of row m, drawn in the falling order of logits, of equal ones the lowest index first.
//
// In this order: the first top_k stay (0: all), softmax of logit / temperature over them, the shortest run of them whose
// sum reaches top_p stays, and the first whose cumulative sum exceeds uniform times their total is the token. Temperature
// 0 takes the largest. With a top_k of up to 128 these are listed and sorted (largest.cuh); else nothing is sorted, and all
// blocks of the row find where the limits lie (ranking.cuh). Both ways give the same token: all sums are exact.
//
// Numerics: exponentials FP32 (2 units in the last place), summed exactly as whole numbers; limits are multiplied in FP64.
// One ``uniform`` always gives one token, whatever other rows there are. Parameters out of range and rows without a finite
// largest logit, which the contract refuses, give the largest logit; NaN is passed over. sm_80 and newer. Launched by
// launch.py.
#include "largest.cuh"

// What bounds the order by mass, one after the other; each is a sum that the last logit within it reaches.
enum { TOP_P, TOKEN, LIMITS };

struct Limits {
    float temperature;
    int top_k;
    float top_p, uniform;

    __device__ __forceinline__ bool are_valid() const {
        return temperature >= 0.0f && isfinite(temperature) && top_k >= 0 && top_p > 0.0f && top_p <= 1.0f &&
               uniform >= 0.0f && uniform < 1.0f;
    }
    __device__ __forceinline__ bool has(int limit) const { return limit == TOKEN || top_p < 1.0f; }
    // ``kept`` is the mass up to the limit before.
    __device__ __forceinline__ u64 wanted(int limit, u64 kept) const {
        const double mass = (double)(limit == TOP_P ? top_p : uniform) * __ull2double_rn(kept);
        return min(limit == TOP_P ? max(__double2ull_ru(mass), 1ull) : __double2ull_rd(mass) + 1, kept);
    }
};

// By a warp: the token, of the ``listed`` logits that top_k keeps, sorted.
__device__ __forceinline__ u32 drawn_of_list(const Limits& limits, const Softmax& softmax, u32 listed) {
    u64* const sums = shared.list;  // of all up to each
    u64 kept = 0, own = 0;
#pragma unroll 1
    for (u32 at = threadIdx.x; at - threadIdx.x < listed; at += 32) {
        u64 sum = at < listed ? softmax.mass(key_in(shared.sorted[at])) : 0;
#pragma unroll
        for (u32 distance = 1; distance < 32; distance *= 2) {
            const u64 lower = __shfl_up_sync(ALL_LANES, sum, distance);
            if (threadIdx.x >= distance) sum += lower;
        }
        sums[at] = own = sum += kept;
        kept = __shfl_sync(ALL_LANES, sum, 31);
    }
    __syncwarp();
    u32 place = 0;
#pragma unroll 1
    for (int limit = TOP_P; limit < LIMITS; ++limit) {
        if (!limits.has(limit)) continue;
        const u64 wanted = limits.wanted(limit, kept);
        if (listed <= 32) {
            place = __ffs(__ballot_sync(ALL_LANES, own >= wanted)) - 1;
            kept = __shfl_sync(ALL_LANES, own, place);
            continue;
        }
        u32 found = 0;
#pragma unroll 1
        for (u32 first = 0; found == 0; first += 32) {
            found = __ballot_sync(ALL_LANES, sums[first + threadIdx.x] >= wanted);
            place = first + __ffs(found) - 1;
        }
        kept = sums[place];
    }
    return index_in(shared.sorted[place]);
}

// By all blocks of the row: the token, in the block that asks for it.
__device__ __noinline__ u32 drawn_of_all(Row row, Limits limits, float unit, u32 own, bool is_asked) {
    own = __reduce_max_sync(ALL_LANES, own);
    if (threadIdx.x % 32 == 0) shared.tops[threadIdx.x / 32] = own;
    __syncthreads();
#pragma unroll 1
    for (int warp = 0; warp < WARPS; ++warp) own = max(own, shared.tops[warp]);
    if (row.row_bits) {
        if (threadIdx.x == 0) asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(&row.joint->largest), "r"(own) : "memory");
        meet(row);
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(own) : "l"(&row.joint->largest) : "memory");
    }
    if (own <= LOWEST_KEY) return 0;  // nothing above -infinity
    const Softmax softmax{value_of(own), rate_of(limits.temperature), unit};
    if (!isfinite(softmax.largest)) return index_of(row, own, 1, is_asked);
    // What top_k keeps of the last key is not in the row's sums.
    u32 least = 0;
    u64 place = 0, rest = 0;
    if (limits.top_k > 0) {
        const Place last = place_of(row, limits.top_k, 1);
        least = last.key, rest = last.rest * softmax.mass(least);
    }
    const u64 upper = sum_bins(row, {least + 1, HIGHEST_KEY, 8, false, true}, softmax) +
                      (threadIdx.x == BINS - 1 - (least >> 8) ? rest : 0);
    u64 kept = search(upper, 1).all, lower = 0;
    u32 key = own, summed = ~0u;
#pragma unroll 1
    for (int limit = TOP_P; limit < LIMITS; ++limit) {
        if (!limits.has(limit)) continue;
        const u64 wanted = limits.wanted(limit, kept);
        const Found bin = search(upper, wanted);
        const u32 begin = (BINS - 1 - bin.bin) << 8;
        if (begin != summed)
            lower = sum_bins(row, {max(least + 1, begin), begin | 0xFFu, 0, false, false}, softmax) *
                        softmax.mass(begin | (BINS - 1 - threadIdx.x)) +
                    (least == (begin | (BINS - 1 - threadIdx.x)) ? rest : 0);
        summed = begin;
        const Found found = search(lower, bin.rest);
        key = begin | (BINS - 1 - found.bin);
        const u64 mass = softmax.mass(key);
        place = (found.rest - 1) / max(mass, 1ull) + 1;
        kept = wanted - found.rest + place * mass;
    }
    return index_of(row, key, place, is_asked);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) sample_top_k_top_p(
    // Not restrict: the launch before may write them, and loads of what is restrict may be moved before the wait.
    const bf16* logits,        // [M, V]
    const float* temperature,  // [M]
    const int* top_k,          // [M]
    const float* top_p,        // [M]
    const float* uniform,      // [M]
    int* out,                  // [M]
    u64* posts,                // [M, blocks * WARPS * SLOTS], zeros before and after
    Joint* joint,              // [M], zeros before and after
    float unit, int V, int row_bits) {
    allow_next_launch();
    wait_for_previous_launch();
    const size_t m = blockIdx.x >> row_bits;
    const int block = blockIdx.x & ((1 << row_bits) - 1);
    const bf16* row = logits + m * V;
    const Share share(V, row_bits, block);
    posts += m * (WARPS * SLOTS) << row_bits;
    Limits limits{temperature[m], top_k[m], top_p[m], uniform[m]};
    Pieces last;
    int at;
    if (threadIdx.x == 0) shared.listed = shared.has_more = shared.meetings = shared.passes = 0;
    const u32 own = largest_key(row, V, share, block, last, at);
    const bool is_drawn = limits.are_valid() && limits.temperature > 0.0f;
    if (limits.top_k >= V) limits.top_k = 0;  // all
    const int wanted = is_drawn ? limits.top_k : 1;
    const bool is_last = block + 1 == share.blocks();
    if (wanted == 0 || wanted > MOST_WANTED) {
        const Row all{row, joint + m, V, row_bits, block};
        const u32 token = drawn_of_all(all, limits, unit, own, is_last);
        if (is_last && threadIdx.x == 0) out[m] = token;
        is_last_of(all);
        return;
    }
    post_largest(posts, row, V, share, block, own, last, at);
    // Where blocks begin in order, all that the last of a row waits for have begun.
    if (!is_last) return;
    const float rate = rate_of(limits.temperature);
    const u32 listed = list_largest(posts, row, V, share, wanted);
    each_listed(listed, [&](u32 place, u64 order) {
        if (place < (u32)wanted) shared.sorted[place] = order;
    });
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const Softmax softmax{value_of(key_in(shared.sorted[0])), rate, unit};
    u32 token = index_in(shared.sorted[0]);
    if (is_drawn && isfinite(softmax.largest)) token = drawn_of_list(limits, softmax, wanted);
    if (threadIdx.x == 0) out[m] = token;
}
