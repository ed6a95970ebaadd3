// One token a row by inverse CDF over the logits in falling order, of equal ones the lowest index first.
//
// In this order: the first top_k stay (0: all), softmax of logit / temperature over them, the shortest run of them whose
// sum reaches top_p stays, and the first whose cumulative sum exceeds uniform times their total is the token. Temperature
// 0 takes the largest. A cluster of 8 blocks a row from sm_90 on, one block below; nothing is sorted (ranking.cuh): the
// row is read once for the largest, once for the bins, and once or twice for each limit that is set.
//
// Numerics: exponentials FP32, summed exactly as whole numbers; limits are multiplied in FP64. One ``uniform`` always
// gives one token, whatever other rows there are. Parameters out of range and rows without a finite largest logit, which
// the contract refuses, give the largest logit; NaN is passed over. sm_80 and newer. Launched by launch.py.
#include "ranking.cuh"

struct Limits {
    float temperature;
    int top_k;
    float top_p, uniform;

    __device__ __forceinline__ bool are_valid() const {
        return temperature >= 0.0f && isfinite(temperature) && top_k >= 0 && top_p > 0.0f && top_p <= 1.0f &&
               uniform >= 0.0f && uniform < 1.0f;
    }
};

template <int WIDTH>
__device__ __forceinline__ u32 drawn(const Row<WIDTH>& row, const Limits& limits, const Softmax& softmax) {
    u64 kept = row.template count_bins<true>(softmax).mass;
    auto sum_with = [&](const Found& found) {
        return found.ahead.mass + (u64)(found.place + 1) * softmax.mass(found.key);
    };
    if (limits.top_k > 0 && limits.top_k < row.V) kept = sum_with(row.locate(limits.top_k, false, softmax));
    if (limits.top_p < 1.0f) {
        const u64 wanted = __double2ull_ru((double)limits.top_p * __ull2double_rn(kept));
        kept = sum_with(row.locate(min(max(wanted, 1ull), kept), true, softmax));
    }
    const u64 wanted = __double2ull_rd((double)limits.uniform * __ull2double_rn(kept)) + 1;
    const Found found = row.locate(min(wanted, kept), true, softmax);
    return row.index_of(found.key, found.place);
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
        const Limits limits{temperature[m], top_k[m], top_p[m], uniform[m]};                                     \
        const Best best = best_of_row<WIDTH, THREADS>(row.logits, V, row.rank, shared.best);                     \
        u32 index = best.index;                                                                                  \
        if (limits.are_valid() && limits.temperature > 0.0f && isfinite(best.value))                             \
            index = drawn(row, limits, Softmax{best.value, limits.temperature, unit});                           \
        if (row.rank == 0 && threadIdx.x == 0) out[m] = index;                                                   \
        cluster_barrier(); /* no block ends while another reads its shared memory */                             \
    }

SAMPLE(1)
SAMPLE(8)
