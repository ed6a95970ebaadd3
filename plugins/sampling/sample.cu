// One token a row by inverse CDF over the logits in falling order, of equal ones the lowest index first.
//
// In this order: the first top_k stay (0: all), softmax of logit / temperature over them, the shortest run of them whose
// sum reaches top_p stays, and the first whose cumulative sum exceeds uniform times their total is the token. Temperature
// 0 takes the largest. A cluster of 8 blocks a row from sm_90 on, one block below. Where all of this happens among the
// largest few hundred, these are listed and sorted (largest.cuh); else nothing is sorted (ranking.cuh): the row is read once
// for the bins, and once or twice for each limit that is set. Both ways give the same token: all sums are exact.
//
// Numerics: exponentials FP32, summed exactly as whole numbers; limits are multiplied in FP64. One ``uniform`` always
// gives one token, whatever other rows there are. Parameters out of range and rows without a finite largest logit, which
// the contract refuses, give the largest logit; NaN is passed over. sm_80 and newer. Launched by launch.py.
#include "largest.cuh"

// What bounds the order, one after the other; each is a sum that the last logit within it reaches.
enum { TOP_K, TOP_P, TOKEN, LIMITS };

struct Limits {
    float temperature;
    int top_k;
    float top_p, uniform;

    __device__ __forceinline__ bool are_valid() const {
        return temperature >= 0.0f && isfinite(temperature) && top_k >= 0 && top_p > 0.0f && top_p <= 1.0f &&
               uniform >= 0.0f && uniform < 1.0f;
    }
    __device__ __forceinline__ bool has(int limit) const {
        return limit == TOP_K ? top_k > 0 : limit == TOP_P ? top_p < 1.0f : true;
    }
    // A count for TOP_K, else a mass; ``kept`` is the mass up to the limit before.
    __device__ __forceinline__ u64 wanted(int limit, u64 kept) const {
        if (limit == TOP_K) return top_k;
        const double mass = (double)(limit == TOP_P ? top_p : uniform) * __ull2double_rn(kept);
        return min(limit == TOP_P ? max(__double2ull_ru(mass), 1ull) : __double2ull_rd(mass) + 1, kept);
    }
};

// The mass of the whole row, in every thread of block 0.
__device__ __forceinline__ u64 mass_of_row(const Row& row, const Softmax& softmax) {
    Ranking& shared = row.shared;
    u64 mass = 0;
    row.each([&](int, u32 bits) { mass += softmax.mass(key_of(bits)); });
    sum_up_to_thread({0, mass}, shared.of_warp);
    if (threadIdx.x == 0) shared.total = shared.of_warp[WARPS - 1];
    cluster_barrier();
    u64 total = 0;
    for (u32 other = 0; other < TEAM; ++other) {
        const u32* place = reinterpret_cast<const u32*>(&shared.total.mass);
        total += word_of_rank(place, other) | (u64)word_of_rank(place + 1, other) << 32;
    }
    return total;
}

// By block 0: the token, if it is among ``listed`` logits of ``list``; false if it is not, or that cannot be said.
__device__ __forceinline__ bool draw_listed(Ranking& shared, const Limits& limits, const Softmax& softmax, int listed,
                                            u64 mass_of_all, u32& index) {
    const int each = (listed + THREADS - 1) / THREADS, begin = threadIdx.x * each, end = min(begin + each, listed);
    u64 own = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) own += softmax.mass(key_in(shared.list[i]));
    const u64 before = sum_up_to_thread({0, own}, shared.of_warp).mass - own, listed_mass = shared.of_warp[WARPS - 1].mass;
    u64 kept = mass_of_all;
#pragma unroll 1
    for (int limit = 0; limit < LIMITS; ++limit) {
        if (!limits.has(limit)) continue;
        const bool by_mass = limit != TOP_K;
        const u64 wanted = limits.wanted(limit, kept);
        if (wanted > (by_mass ? listed_mass : listed)) return false;
        __syncthreads();
        u64 sum = before;
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
            const u64 with = sum + softmax.mass(key_in(shared.list[i]));
            // One thread meets it.
            if (by_mass ? sum < wanted && wanted <= with : i + 1 == wanted)
                shared.ahead_of_bin.mass = with, shared.index = (u32)shared.list[i];
            sum = with;
        }
        __syncthreads();
        kept = shared.ahead_of_bin.mass;
    }
    index = shared.index;
    __syncthreads();  // before it is written again
    return true;
}

__device__ __forceinline__ u32 drawn_by_bins(const Row& row, const Limits& limits, const Softmax& softmax) {
    u64 kept = row.count_bins<true>(softmax).mass;
    Found found;
#pragma unroll 1
    for (int limit = 0; limit < LIMITS; ++limit) {
        if (!limits.has(limit)) continue;
        found = row.locate(limits.wanted(limit, kept), limit != TOP_K, softmax);
        kept = found.ahead.mass + (u64)(found.place + 1) * softmax.mass(found.key);
    }
    return row.index_of(found.key, found.place);
}

__device__ __forceinline__ u32 drawn(const Row& row, const Limits& limits, const Softmax& softmax) {
    Ranking& shared = row.shared;
    const bool has_top_k = limits.top_k > 0;
    const u64 mass_of_all = has_top_k ? 0 : mass_of_row(row, softmax);
    const u32 least = has_top_k ? min(limits.top_k, MOST_WANTED) : MOST_WANTED;
    const int listed = list_largest(row, least);
    if (row.rank == 0) {
        u32 index = 0;
        const bool is_done = listed > 0 && draw_listed(shared, limits, softmax, listed, mass_of_all, index);
        if (threadIdx.x == 0) shared.is_done = is_done, shared.index = index;
    }
    cluster_barrier();
    const bool is_done = word_of_rank(&shared.is_done, 0) != 0;
    const u32 index = word_of_rank(&shared.index, 0);
    if (is_done) return index;
    cluster_barrier();  // block 0 writes what others have read
    return drawn_by_bins(row, limits, softmax);
}

extern "C" __global__ void TEAM_BOUNDS(THREADS) sample_top_k_top_p(
    // Not restrict: the launch before may write them, and loads of what is restrict may be moved before the wait.
    const bf16* logits,        // [M, V]
    const float* temperature,  // [M]
    const int* top_k,          // [M]
    const float* top_p,        // [M]
    const float* uniform,      // [M]
    int* out,                  // [M]
    float unit, int V) {
    __shared__ Ranking shared;
    allow_next_launch();
    wait_for_previous_launch();
    const size_t m = blockIdx.x / TEAM;
    const Row row{logits + m * V, V, team_rank(), shared};
    Limits limits{temperature[m], top_k[m], top_p[m], uniform[m]};
    const Best best = best_of_row<THREADS>(row.logits, V, row.rank, shared.best);
    u32 index = best.index;
    if (limits.top_k >= V) limits.top_k = 0;  // all
    if (limits.are_valid() && limits.temperature > 0.0f && isfinite(best.value))
        index = drawn(row, limits, Softmax{best.value, limits.temperature, unit});
    if (row.rank == 0 && threadIdx.x == 0) out[m] = index;
    cluster_barrier();  // no block ends while another reads its shared memory
}
