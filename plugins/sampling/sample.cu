// out[m] = a token of row m, drawn in the descending order of logits, the lower index first among equal ones.
//
// In this order: keep the first top_k (0: all). Take the softmax of logit / temperature over them. Keep the shortest
// run with a sum of at least top_p. The token is the first whose cumulative sum exceeds uniform times the total of the
// run. Temperature 0 takes the largest logit.
//
// With a top_k of up to 128 the logits are listed (candidates.cuh), and sorted unless there are only a few. Otherwise
// nothing is sorted: all blocks of the row search for the limits (radix_select.cuh). Both ways give the same token,
// because all sums are exact.
//
// Numerics: exponentials in FP32 (2 units in the last place), exact integer sums, limits multiplied in FP64. One
// ``uniform`` always gives the same token, whatever the other rows are. The contract rejects parameters out of range
// and rows without a finite largest logit. They give the largest logit here. NaN is ignored.
//
// Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "global_memory.cuh"
#include "candidates.cuh"
#include "pdl.cuh"

// The limits by mass, in their order. Each is a sum that the last logit inside the limit reaches.
enum { TOP_P, TOKEN, LIMITS };

struct Limits {
    float temperature;
    int top_k;
    float top_p, uniform;

    // By a warp: each lane loads one parameter. The compiler would move a load with the same address in all lanes, and
    // wait for it at once.
    __device__ __forceinline__ static u32 loaded(u32 m, const float* temperature, const int* top_k, const float* top_p,
                                                 const float* uniform) {
        const u32 lane = threadIdx.x % 4;
        const void* const even = lane < 2 ? temperature : top_p;
        const void* const odd = lane < 2 ? static_cast<const void*>(top_k) : uniform;
        return static_cast<const u32*>(lane & 1 ? odd : even)[m];
    }
    __device__ __forceinline__ explicit Limits(u32 loaded)
        : temperature(__uint_as_float(__shfl_sync(ALL_LANES, loaded, 0))),
          top_k((int)__shfl_sync(ALL_LANES, loaded, 1)), top_p(__uint_as_float(__shfl_sync(ALL_LANES, loaded, 2))),
          uniform(__uint_as_float(__shfl_sync(ALL_LANES, loaded, 3))) {}

    __device__ __forceinline__ bool are_valid() const {
        return temperature >= 0.0f && isfinite(temperature) && top_k >= 0 && top_p > 0.0f && top_p <= 1.0f &&
               uniform >= 0.0f && uniform < 1.0f;
    }
    __device__ __forceinline__ bool has(int limit) const { return limit == TOKEN || top_p < 1.0f; }
    // ``kept`` is the mass inside the limit before.
    __device__ __forceinline__ u64 wanted(int limit, u64 kept) const {
        const double mass = (double)(limit == TOP_P ? top_p : uniform) * __ull2double_rn(kept);
        return min(limit == TOP_P ? max(__double2ull_ru(mass), 1ull) : __double2ull_rd(mass) + 1, kept);
    }
};

// By a warp: the token, from the sorted list of the top_k logits.
__device__ __forceinline__ u32 draw_from_list(const Limits& limits, const SoftmaxMass& softmax, u32 listed) {
    u64* const sums = shared.list;  // inclusive prefix sums
    u64 kept = 0;
#pragma unroll 1
    for (u32 at = threadIdx.x; at - threadIdx.x < listed; at += 32) {
        u64 sum = at < listed ? softmax.mass(key_in(shared.sorted[at])) : 0;
#pragma unroll 1
        for (u32 distance = 1; distance < 32; distance *= 2) {
            const u64 lower = __shfl_up_sync(ALL_LANES, sum, distance);
            if (threadIdx.x >= distance) sum += lower;
        }
        sums[at] = sum += kept;
        kept = __shfl_sync(ALL_LANES, sum, 31);
    }
    __syncwarp();
    u32 place = 0;
#pragma unroll 1
    for (int limit = TOP_P; limit < LIMITS; ++limit) {
        if (!limits.has(limit)) continue;
        const u64 wanted = limits.wanted(limit, kept);
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

// By all blocks of the row: the token, in the block that needs it.
__device__ __noinline__ u32 draw_from_whole_row(LogitsRow row, Limits limits, float unit, u32 own, bool is_needed) {
    own = __reduce_max_sync(ALL_LANES, own);
    if (threadIdx.x % 32 == 0) shared.tops[threadIdx.x / 32] = own;
    __syncthreads();
#pragma unroll 1
    for (int warp = 0; warp < WARPS; ++warp) own = max(own, shared.tops[warp]);
    if (row.row_bits) {
        if (threadIdx.x == 0) max_relaxed(&row.workspace->largest, own);
        row_barrier(row);
        own = load_relaxed(&row.workspace->largest);
    }
    if (own <= LOWEST_KEY) return 0;  // no logit above -infinity
    const SoftmaxMass softmax{value_of(own), rate_of(limits.temperature), unit};
    if (!isfinite(softmax.largest)) return index_of(row, own, 1, is_needed);
    // The row's sums leave out the last key, of which top_k keeps a part.
    u32 least = 0;
    u64 place = 0, rest = 0;
    if (limits.top_k > 0) {
        const Selected last = select_k(row, limits.top_k, 1);
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
    return index_of(row, key, place, is_needed);
}

// From so many logits on, the masses of MAX_UNSORTED logits have a sum of at most 2^53, which FP64 holds exactly. Sums
// hold a count above the mass.
constexpr int MIN_EXACT = 8192, MAX_UNSORTED = 32;
constexpr u64 ONE = 1ull << 58;

// By the merging block: the token, from up to MAX_UNSORTED listed logits, without sorting. A lane has one logit. A warp
// adds, for all lanes, EACH of the logits that may be larger.
__device__ __forceinline__ void draw_unsorted(u32 listed, const Limits& limits, const SoftmaxMass& softmax,
                                              bool is_drawn, u32 wanted, int* out) {
    constexpr u32 EACH = MAX_UNSORTED / WARPS;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 order = lane < listed ? shared.list[lane] : 0;
    const u64 mass = lane < listed && is_drawn ? softmax.mass(key_in(order)) : 0;
    u64 sum = 0;
#pragma unroll
    for (u32 i = warp * EACH; i < warp * EACH + EACH; ++i) {
        const u64 more = __shfl_sync(ALL_LANES, mass, i) + ONE;
        if (i < listed && shared.list[i] > order) sum += more;
    }
    shared.sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0) return;
    u64 sums[2] = {};
#pragma unroll
    for (u32 i = 0; i < WARPS; ++i) sums[i % 2] += shared.sums[i][lane];
    sum = sums[0] + sums[1];
    const u32 ahead = (u32)(sum / ONE);
    if (!is_drawn) {
        if (lane < listed && ahead == 0) *out = index_in(order);
        return;
    }
    const double before = __ull2double_rn(sum % ONE), up_to = __ull2double_rn(sum % ONE + mass);
    double kept = __shfl_sync(ALL_LANES, up_to, __ffs(__ballot_sync(ALL_LANES, ahead + 1 == wanted)) - 1);
    if (limits.has(TOP_P)) {
        const double least = (double)limits.top_p * kept;
        kept = __shfl_sync(ALL_LANES, up_to, __ffs(__ballot_sync(ALL_LANES, before < least && least <= up_to)) - 1);
    }
    const double passed = (double)limits.uniform * kept;
    if (before <= passed && passed < up_to) *out = index_in(order);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) sample_top_k_top_p(
    // Not __restrict__: the kernel before may write them, and such loads could move before the wait.
    const bf16* logits,   // [M, V]
    u64* all_candidates,  // [M, lanes * WARPS * CANDIDATES], a lane for each of up to 32 blocks, zeros before and after
    int row_bits, int V, float unit,
    const float* temperature,   // [M]
    const int* top_k,           // [M]
    const float* top_p,         // [M]
    const float* uniform,       // [M]
    int* out,                   // [M]
    RowWorkspace* workspace) {  // [M], zeros before and after
    pdl_launch_dependents();
    pdl_wait();
    const u32 m = blockIdx.x >> row_bits;
    const int block = blockIdx.x & ((1 << row_bits) - 1);
    const bf16* row = logits + (size_t)m * V;
    const RowSlice slice(V, row_bits, block);
    u64* const candidates = candidates_of_row(all_candidates, m, row_bits);
    const bool is_merger = block + 1 == slice.blocks();
    if (threadIdx.x == 0) shared.listed = shared.has_more = shared.barriers_passed = shared.passes = 0;
    if (is_merger) prefetch_candidates(candidates, row_bits);
    u32 loaded;
    const u32 own = post_candidates(
        candidates, row, V, slice, block, [&] { loaded = Limits::loaded(m, temperature, top_k, top_p, uniform); });
    Limits limits(loaded);
    bool is_drawn = limits.are_valid() && limits.temperature > 0.0f;
    if (limits.top_k >= V) limits.top_k = 0;  // all
    const int wanted = is_drawn ? limits.top_k : 1;
    if (wanted == 0 || wanted > MAX_LISTED_K) {
        if (is_merger) drop_candidates(candidates, row_bits);
        const LogitsRow all{row, workspace + m, V, row_bits, block};
        const u32 token = draw_from_whole_row(all, limits, unit, own, is_merger);
        if (is_merger && threadIdx.x == 0) out[m] = token;
        is_last_block(all);
        return;
    }
    // Blocks start in order, so that all blocks that the last of a row waits for have started.
    if (!is_merger) return;
    const float rate = rate_of(limits.temperature);
    u32 largest;
    const u32 listed = collect_largest(candidates, row, V, row_bits, wanted, &largest);
    if (listed <= MAX_UNSORTED && wanted <= MAX_FAST_K && V >= MIN_EXACT) {
        const SoftmaxMass softmax{value_of(largest), rate, unit};
        return draw_unsorted(listed, limits, softmax, is_drawn && isfinite(softmax.largest), wanted, out + m);
    }
    for_each_ranked(listed, [&](u32 place, u64 order) {
        if (place < (u32)wanted) shared.sorted[place] = order;
    });
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const SoftmaxMass softmax{value_of(key_in(shared.sorted[0])), rate, unit};
    u32 token = index_in(shared.sorted[0]);
    if (is_drawn && isfinite(softmax.largest)) token = draw_from_list(limits, softmax, wanted);
    if (threadIdx.x == 0) out[m] = token;
}
