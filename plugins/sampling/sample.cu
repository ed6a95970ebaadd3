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

struct Limits {
    float temperature;
    int top_k;
    float top_p, uniform;

    __device__ __forceinline__ bool are_valid() const {
        return temperature >= 0.0f && isfinite(temperature) && top_k >= 0 && top_p > 0.0f && top_p <= 1.0f &&
               uniform >= 0.0f && uniform < 1.0f;
    }
};

__device__ __forceinline__ u64 mass_up_to_top_p(const Limits& limits, u64 kept) {
    return min(max(__double2ull_ru((double)limits.top_p * __ull2double_rn(kept)), 1ull), kept);
}
__device__ __forceinline__ u64 mass_up_to_token(const Limits& limits, u64 kept) {
    return min(__double2ull_rd((double)limits.uniform * __ull2double_rn(kept)) + 1, kept);
}

// The mass of the whole row, in every thread of block 0.
template <int WIDTH>
__device__ __forceinline__ u64 mass_of_row(const Row<WIDTH>& row, const Softmax& softmax) {
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
    constexpr int EACH = (LISTED + THREADS - 1) / THREADS;
    const int begin = threadIdx.x * EACH;
    u64 own = 0;
    for (int i = begin; i < min(begin + EACH, listed); ++i) own += softmax.mass(key_in(shared.list[i]));
    const u64 before = sum_up_to_thread({0, own}, shared.of_warp).mass - own, listed_mass = shared.of_warp[WARPS - 1].mass;
    // The sum up to and with the first place that ``reaches(place, sum)``; one thread meets it.
    auto find = [&](auto reaches) {
        __syncthreads();
        u64 sum = before;
        for (int i = begin; i < min(begin + EACH, listed); ++i) {
            const u64 with = sum + softmax.mass(key_in(shared.list[i]));
            if (!reaches(i - 1, sum) && reaches(i, with)) shared.ahead_of_bin.mass = with, shared.index = (u32)shared.list[i];
            sum = with;
        }
        __syncthreads();
        return shared.ahead_of_bin.mass;
    };
    u64 kept = mass_of_all;
    if (limits.top_k > 0) {
        if (limits.top_k > listed) return false;
        kept = find([&](int place, u64) { return place + 1 >= limits.top_k; });
    }
    if (limits.top_p < 1.0f) {
        const u64 wanted = mass_up_to_top_p(limits, kept);
        if (wanted > listed_mass) return false;
        kept = find([&](int, u64 sum) { return sum >= wanted; });
    }
    const u64 wanted = mass_up_to_token(limits, kept);
    if (wanted > listed_mass) return false;
    find([&](int, u64 sum) { return sum >= wanted; });
    index = shared.index;
    __syncthreads();  // before it is written again
    return true;
}

template <int WIDTH>
__device__ __forceinline__ u32 drawn_by_bins(const Row<WIDTH>& row, const Limits& limits, const Softmax& softmax) {
    u64 kept = row.template count_bins<true>(softmax).mass;
    auto sum_with = [&](const Found& found) {
        return found.ahead.mass + (u64)(found.place + 1) * softmax.mass(found.key);
    };
    if (limits.top_k > 0) kept = sum_with(row.locate(limits.top_k, false, softmax));
    if (limits.top_p < 1.0f) kept = sum_with(row.locate(mass_up_to_top_p(limits, kept), true, softmax));
    const Found found = row.locate(mass_up_to_token(limits, kept), true, softmax);
    return row.index_of(found.key, found.place);
}

template <int WIDTH>
__device__ __forceinline__ u32 drawn(const Row<WIDTH>& row, const Limits& limits, const Softmax& softmax) {
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

#define SAMPLE(WIDTH)                                                                                            \
    extern "C" __global__ void TEAM_BOUNDS(THREADS) sample_top_k_top_p_w##WIDTH(                                 \
        const bf16* __restrict__ logits,       /* [M, V] */                                                      \
        const float* __restrict__ temperature, /* [M] */                                                         \
        const int* __restrict__ top_k,         /* [M] */                                                         \
        const float* __restrict__ top_p,       /* [M] */                                                         \
        const float* __restrict__ uniform,     /* [M] */                                                         \
        int* __restrict__ out,                 /* [M] */                                                         \
        float unit, int V) {                                                                                     \
        __shared__ Ranking shared;                                                                               \
        allow_next_launch();                                                                                     \
        wait_for_previous_launch();                                                                              \
        const size_t m = blockIdx.x / TEAM;                                                                      \
        const Row<WIDTH> row{logits + m * V, V, team_rank(), shared};                                            \
        Limits limits{temperature[m], top_k[m], top_p[m], uniform[m]};                                           \
        const Best best = best_of_row<WIDTH, THREADS>(row.logits, V, row.rank, shared.best);                     \
        u32 index = best.index;                                                                                  \
        if (limits.top_k >= V) limits.top_k = 0; /* all */                                                       \
        if (limits.are_valid() && limits.temperature > 0.0f && isfinite(best.value))                             \
            index = drawn(row, limits, Softmax{best.value, limits.temperature, unit});                           \
        if (row.rank == 0 && threadIdx.x == 0) out[m] = index;                                                   \
        cluster_barrier(); /* no block ends while another reads its shared memory */                             \
    }

SAMPLE(1)
SAMPLE(8)
