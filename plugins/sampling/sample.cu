// One token a row by inverse CDF over the logits in falling order, of equal ones the lowest index first.
//
// In this order: the first top_k stay (0: all), softmax of logit / temperature over them, the shortest run of them whose
// sum reaches top_p stays, and the first whose cumulative sum exceeds uniform times their total is the token. Temperature
// 0 takes the largest. Where all of this happens among the largest few hundred, these are listed and sorted (largest.cuh)
// by as many blocks as are at hand; else nothing is sorted (ranking.cuh), by a cluster of 8 blocks from sm_90 on, one block
// below: the row is read once for the bins, and once or twice for each limit that is set. Both ways give the same token:
// all sums are exact.
//
// Numerics: exponentials FP32 (2 units in the last place), summed exactly as whole numbers; limits are multiplied in FP64.
// One ``uniform`` always gives one token, whatever other rows there are. Parameters out of range and rows without a finite
// largest logit, which the contract refuses, give the largest logit; NaN is passed over. sm_80 and newer. Launched by
// launch.py.
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

// What is listed where top_k is off, or wants more than a list: enough for nearly every top_p.
constexpr int ALL_WANTED = 64;

// The sum over a warp, in all lanes.
__device__ __forceinline__ u64 sum_of_warp(u64 sum) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    return sum;
}

// The mass of the whole row, in every thread of the merging block. By all blocks of a row, after they have posted.
__device__ __forceinline__ u64 mass_of_row(Ranking& shared, const bf16* row, const Share& share, Pieces pieces, int at,
                                           Softmax softmax) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp == 0) {
        const u32 largest = lane < share.blocks ? (u32)await_post(share.posts + lane * share.places) & 0xFFFFu : 0;
        shared.joint_largest = __reduce_max_sync(ALL_LANES, largest);
    }
    __syncthreads();
    softmax.largest = value_of(shared.joint_largest);
    u64 mass = 0;
#pragma unroll 1
    for (; at >= share.first; at -= PARALLEL * share.step) {
        pieces.load_from(row, share, at);
#pragma unroll 1
        for (int i = 0; i < PARALLEL; ++i) {
            const unsigned short* bits = reinterpret_cast<const unsigned short*>(&pieces.raw[0]);
#pragma unroll
            for (int e = 0; e < 8; ++e) mass += softmax.mass_of((u32)bits[e]);
#pragma unroll
            for (int j = 1; j < PARALLEL; ++j) pieces.raw[j - 1] = pieces.raw[j];
        }
    }
    mass = sum_of_warp(mass);
    if (lane == 0) shared.of_warp[warp].mass = mass;
    __syncthreads();
    // Whatever becomes of a row that is not finite, a post is not 0.
    constexpr u64 MOST = (1ull << 62) - 1;
    if (warp == 0) {
        mass = sum_of_warp(lane < WARPS ? shared.of_warp[lane].mass : 0);
        if (lane == 0) post(share.mass(share.block), (mass & MOST) + 1);
    }
    if (!share.merges()) return 0;
    if (warp == 0) {
        mass = 0;
        if (lane < share.blocks) mass = await_post(share.mass(lane)) - 1, *share.mass(lane) = 0;
        mass = sum_of_warp(mass);
        if (lane == 0) shared.total.mass = mass;
    }
    __syncthreads();
    return shared.total.mass;
}

// By a warp: the token, if it is among ``listed`` logits of ``list``, with top_k all that it keeps; false if it is not, or that
// cannot be said.
__device__ __forceinline__ bool draw_listed(const u64* list, const Limits& limits, const Softmax& softmax, int listed,
                                            u64 mass_of_all, u32& index) {
    const int each = (listed + 31) / 32, begin = threadIdx.x * each, end = min(begin + each, listed);
    u64 own = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) own += softmax.mass(key_in(list[i]));
    u64 up_to = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u64 lower = __shfl_up_sync(ALL_LANES, up_to, distance);
        if ((int)threadIdx.x >= distance) up_to += lower;
    }
    const u64 listed_mass = __shfl_sync(ALL_LANES, up_to, 31);
    u64 kept = limits.top_k > 0 ? listed_mass : mass_of_all;
#pragma unroll 1
    for (int limit = TOP_P; limit < LIMITS; ++limit) {
        if (!limits.has(limit)) continue;
        const u64 wanted = limits.wanted(limit, kept);
        if (wanted > listed_mass) return false;
        u64 sum = up_to - own, found_sum = 0;
        u32 found = 0;
        bool is_found = false;
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
            const u64 order = list[i], with = sum + softmax.mass(key_in(order));
            // One lane meets it, once.
            if (sum < wanted && wanted <= with) found_sum = with, found = (u32)order, is_found = true;
            sum = with;
        }
        const int lane = __ffs(__ballot_sync(ALL_LANES, is_found)) - 1;
        kept = __shfl_sync(ALL_LANES, found_sum, lane), index = __shfl_sync(ALL_LANES, found, lane);
    }
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

extern "C" __global__ void TEAM_BOUNDS(THREADS) sample_top_k_top_p(
    // Not restrict: the launch before may write them, and loads of what is restrict may be moved before the wait.
    const bf16* logits,        // [M, V]
    const float* temperature,  // [M]
    const int* top_k,          // [M]
    const float* top_p,        // [M]
    const float* uniform,      // [M]
    int* out,                  // [M]
    u64* posts,                // [M, stride], zeros before and after
    float unit, int V, int row_bits, int stride) {
    __shared__ Ranking shared;
    allow_next_launch();
    wait_for_previous_launch();
    const size_t m = blockIdx.x >> row_bits;
    const Row row{logits + m * V, V, team_rank(), shared};
    Limits limits{temperature[m], top_k[m], top_p[m], uniform[m]};

    // Stage 1: the largest of every block, and where all can be drawn the mass of all. What waits for the limits comes after
    // the loads.
    Share share(posts, V, row_bits, stride);
    Pieces last;
    int at;
    const u32 own = largest_key(row.logits, share, last, at, [&] { begin_team(shared); });
    if (limits.top_k >= V) limits.top_k = 0;  // all
    bool is_drawn = limits.are_valid() && limits.temperature > 0.0f;
    const bool has_top_k = limits.top_k > 0, has_few = has_top_k && limits.top_k <= MOST_WANTED;
    share.want(!is_drawn ? 1 : has_few ? limits.top_k : min(ALL_WANTED, V));
    const int asked = !is_drawn ? 1 : has_few ? limits.top_k : 0;
    Softmax softmax{0.0f, rate_of(limits.temperature), unit};
    u64 mass_of_all = 0;
    const int listed = list_largest(shared, row.logits, share, own, last, at, asked, [&] {
        if (is_drawn && !has_top_k) mass_of_all = mass_of_row(shared, row.logits, share, last, at, softmax);
    });
    if (!share.is_last_team()) return;

    // Stage 2: the token, if it is among these.
    u32 verdict = 0;
    if (share.merges()) {
        const u32 key = shared.joint_largest;
        softmax.largest = value_of(key);
        is_drawn = is_drawn && isfinite(softmax.largest);
        if (threadIdx.x < 32) {
            u32 index = 0;
            bool is_done = key <= LOWEST_KEY;  // nothing above -infinity: then the first
            if (!is_done && listed > 0) {
                index = (u32)shared.list[0], is_done = true;
                if (is_drawn)
                    is_done = limits.top_k <= listed &&
                              draw_listed(shared.list, limits, softmax, has_top_k ? limits.top_k : listed, mass_of_all, index);
            }
            if (threadIdx.x == 0 && is_done) out[m] = index;
            if (threadIdx.x == 0) shared.is_done = is_done;
        }
        __syncthreads();
        verdict = shared.is_done ? 0 : 1 << 16 | key;
    }
    cluster_wait();
    verdict = told(shared, row.rank, verdict);
    if (verdict == 0) return;

    // Stage 3: else by ranking all.
    softmax.largest = value_of(verdict & 0xFFFFu);
    const bool can_draw = is_drawn && isfinite(softmax.largest);
    const u32 index = can_draw ? drawn_by_bins(row, limits, softmax) : row.index_of(verdict & 0xFFFFu, 0);
    if (row.rank == 0 && threadIdx.x == 0) out[m] = index;
    cluster_barrier();  // no block ends while another reads its shared memory
}
