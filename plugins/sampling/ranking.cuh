// Where in the falling order of a row's logits something lies, without sorting it: BF16 has 65536 values only.
//
// A logit's key rises with its value (both zeros have one key; NaN has the lowest). The falling order is by key, among
// equal keys by rising index. A place in it is found in two steps, 2048 bins of the key's upper bits, then the 32 keys of
// one bin; and which logits are meant among equal ones by their index. What is summed along the order is either how many
// logits there are, or their mass: exp((logit - largest) / temperature) as a whole number, FP32 times 2^k. Whole numbers
// make every sum the same in any order, so that atomics serve.
//
// All threads of a team call these functions together (logits.cuh). Block 0 adds up what the blocks counted, searches,
// and publishes.
#pragma once
#include "logits.cuh"

using u64 = unsigned long long;

// Where several warps of a scheduler do the same, each waits for the others: half as many threads are faster for one row.
constexpr int THREADS = TEAM > 1 ? 256 : 1024, WARPS = THREADS / 32;
constexpr int BINS = 2048, LOW = 32;  // a key is bin * LOW + low
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

__device__ __forceinline__ u32 key_of(u32 bits) {
    if ((bits & 0x7FFFu) > 0x7F80u) return 0;  // NaN
    if (bits == 0x8000u) bits = 0;             // -0 = 0
    return bits & 0x8000u ? bits ^ 0xFFFFu : bits | 0x8000u;
}
constexpr u32 LOWEST_KEY = 0x7Fu;  // of -infinity
__device__ __forceinline__ u32 bits_of(u32 key) { return key & 0x8000u ? key ^ 0x8000u : key ^ 0xFFFFu; }
__device__ __forceinline__ float value_of(u32 key) { return __uint_as_float(bits_of(key) << 16); }

// 2^((logit - largest) * rate) * unit; 0 for a NaN.
struct Softmax {
    float largest, rate, unit;
    __device__ __forceinline__ u64 mass(u32 key) const { return key == 0 ? 0 : mass_of(bits_of(key)); }
    __device__ __forceinline__ u64 mass_of(u32 bits) const {
        float power;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"((__uint_as_float(bits << 16) - largest) * rate));
        return (bits & 0x7FFFu) > 0x7F80u ? 0 : __float2ull_rz(power * unit);
    }
};
// The rate of a temperature above 0; finite, so that the largest has a power of 1.
__device__ __forceinline__ float rate_of(float temperature) { return fminf(1.44269504f / temperature, 3e38f); }

// How many logits, and what mass.
struct Sum {
    u32 count;
    u64 mass;
    __device__ __forceinline__ u64 of(bool by_mass) const { return by_mass ? mass : count; }
};
__device__ __forceinline__ Sum operator+(const Sum& a, const Sum& b) { return {a.count + b.count, a.mass + b.mass}; }
__device__ __forceinline__ Sum operator-(const Sum& a, const Sum& b) { return {a.count - b.count, a.mass - b.mass}; }

// A place in the order: the place-th (from 0) of the logits with this key, and what lies ahead of all of them.
struct Found {
    u32 key, place;
    Sum ahead;
};

struct Ranking {
    union {
        struct {
            u32 count[BINS], mass_low[BINS], mass_high[BINS];
        };
        u64 list[BINS * 12 / 8];  // what top-k sorts, when nothing is searched any more
    };
    u32 low[LOW];
    __align__(16) u32 buckets[THREADS];
    Sum of_warp[WARPS];
    u32 count_of_warp[WARPS];
    Sum total;
    u32 bin;
    Sum ahead_of_bin;
    Found found;  // read by other blocks until they next meet: not for anything else
    u32 bucket, place, index;
    u32 selected;
    // largest.cuh: of a block, of all blocks of a row, and what the block that merges tells its cluster.
    u32 largest, reached;
    u32 floors[2];  // of the block, of all
    u32 joint_floor, joint_largest, joint_count, is_done;
    float verdict;
    Arrival told;
};

template <class T>
__device__ __forceinline__ T from_rank_0(const T& value) {
    static_assert(sizeof(T) % 4 == 0);
    T copy;
#pragma unroll
    for (int word = 0; word < (int)sizeof(T) / 4; ++word)
        reinterpret_cast<u32*>(&copy)[word] = word_of_rank(reinterpret_cast<const u32*>(&value) + word, 0);
    return copy;
}

// counts[i] of block 0 += those of the other blocks.
__device__ __forceinline__ void gather_counts(u32* counts, int size) {
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS)
#pragma unroll 1
        for (u32 other = 1; other < TEAM; ++other) counts[i] += word_of_rank(counts + i, other);
}

__device__ __forceinline__ Sum sum_up_to_lane(Sum sum) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int distance = 1; distance < 32; distance *= 2) {
        const Sum lower{__shfl_up_sync(ALL_LANES, sum.count, distance), __shfl_up_sync(ALL_LANES, sum.mass, distance)};
        if (lane >= distance) sum = sum + lower;
    }
    return sum;
}

// The sum over all threads up to and with this one; ``of_warp[WARPS - 1]`` ends up with that over all of them.
__device__ __forceinline__ Sum sum_up_to_thread(Sum sum, Sum (&of_warp)[WARPS]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __syncthreads();
    sum = sum_up_to_lane(sum);
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        const Sum up_to = sum_up_to_lane(lane < WARPS ? of_warp[lane] : Sum{0, 0});
        if (lane < WARPS) of_warp[lane] = up_to;
    }
    __syncthreads();
    return warp > 0 ? sum + of_warp[warp - 1] : sum;
}

// One row, for the team of blocks that works on it.
struct Row {
    const bf16* logits;
    int V;
    u32 rank;
    Ranking& shared;

    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for_each_logit<THREADS>(logits, V, rank, visit);
    }

    // Counts bins, once for a row. Ends with the sum over the row in every thread.
    template <bool HAS_MASS>
    __device__ __forceinline__ Sum count_bins(const Softmax& softmax) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < BINS; i += THREADS) shared.count[i] = shared.mass_low[i] = shared.mass_high[i] = 0;
        __syncthreads();
        each([&](int, u32 bits) {
            const u32 key = key_of(bits), bin = key / LOW;
            atomicAdd(&shared.count[bin], 1u);
            if constexpr (HAS_MASS) {
                const u64 mass = softmax.mass(key);
                const u32 low = (u32)mass, before = low ? atomicAdd(&shared.mass_low[bin], low) : 0;
                const u32 high = (u32)(mass >> 32) + (before + low < before);
                if (high) atomicAdd(&shared.mass_high[bin], high);
            }
        });
        cluster_barrier();
        if (rank == 0) {
#pragma unroll 1
            for (int i = threadIdx.x; i < BINS; i += THREADS) {
                u64 mass = bin_sum(i).mass;
#pragma unroll 1
                for (u32 other = 1; other < TEAM; ++other) {
                    shared.count[i] += word_of_rank(&shared.count[i], other);
                    mass += word_of_rank(&shared.mass_low[i], other) + ((u64)word_of_rank(&shared.mass_high[i], other) << 32);
                }
                shared.mass_low[i] = (u32)mass, shared.mass_high[i] = (u32)(mass >> 32);
            }
            __syncthreads();
            Sum mine{0, 0};
#pragma unroll 1
            for (int i = threadIdx.x; i < BINS; i += THREADS) mine = mine + bin_sum(i);
            sum_up_to_thread(mine, shared.of_warp);
            if (threadIdx.x == 0) shared.total = shared.of_warp[WARPS - 1];
        }
        cluster_barrier();
        return from_rank_0(shared.total);
    }

    __device__ __forceinline__ Sum bin_sum(int bin) const {
        return {shared.count[bin], shared.mass_low[bin] + ((u64)shared.mass_high[bin] << 32)};
    }

    // The first place whose sum, with itself, reaches ``wanted``: at least 1, at most the row's.
    __device__ __forceinline__ Found locate(u64 wanted, bool by_mass, const Softmax& softmax) const {
        if (rank == 0) find_bin(wanted, by_mass);
        cluster_barrier();
        const u32 bin = from_rank_0(shared.bin);
        if (threadIdx.x < LOW) shared.low[threadIdx.x] = 0;
        __syncthreads();
        each([&](int, u32 bits) {
            const u32 key = key_of(bits);
            if (key / LOW == bin) atomicAdd(&shared.low[key % LOW], 1u);
        });
        cluster_barrier();
        if (rank == 0) find_key(wanted, by_mass, softmax, bin);
        cluster_barrier();
        return from_rank_0(shared.found);
    }

    // By block 0; a thread has EACH bins.
    __device__ __forceinline__ void find_bin(u64 wanted, bool by_mass) const {
        constexpr int EACH = BINS / THREADS;
        static_assert(BINS == EACH * THREADS);
        const int upper = BINS - 1 - EACH * (int)threadIdx.x;
        Sum own{0, 0};
#pragma unroll
        for (int i = 0; i < EACH; ++i) own = own + bin_sum(upper - i);
        const Sum up_to = sum_up_to_thread(own, shared.of_warp);
        if ((up_to - own).of(by_mass) < wanted && wanted <= up_to.of(by_mass)) {
            Sum ahead = up_to - own;
            int bin = upper;
#pragma unroll 1
            for (; (ahead + bin_sum(bin)).of(by_mass) < wanted; --bin) ahead = ahead + bin_sum(bin);
            shared.bin = bin;
            shared.ahead_of_bin = ahead;
        }
    }

    // By block 0.
    __device__ __forceinline__ void find_key(u64 wanted, bool by_mass, const Softmax& softmax, u32 bin) const {
        gather_counts(shared.low, LOW);
        __syncthreads();
        if (threadIdx.x < 32) {  // a warp; LOW keys, falling
            static_assert(LOW == 32);
            const u32 low = LOW - 1 - threadIdx.x, key = bin * LOW + low, count = shared.low[low];
            const u64 mass = softmax.mass(key);
            const Sum own{count, count * mass};
            const Sum up_to = shared.ahead_of_bin + sum_up_to_lane(own), ahead = up_to - own;
            if (ahead.of(by_mass) < wanted && wanted <= up_to.of(by_mass)) {
                const u64 place = (wanted - ahead.of(by_mass) - 1) / (by_mass ? mass : 1);
                shared.found = {key, (u32)place, ahead};
            }
        }
    }

    // The index of the place-th logit with this key, by rising index.
    __device__ __forceinline__ u32 index_of(u32 key, u32 place) const {
        const int width = (V + THREADS - 1) / THREADS;
        shared.buckets[threadIdx.x] = 0;
        __syncthreads();
        each([&](int index, u32 bits) {
            if (key_of(bits) == key) atomicAdd(&shared.buckets[index / width], 1u);
        });
        cluster_barrier();
        if (rank == 0) {
            gather_counts(shared.buckets, THREADS);
            const u32 own = shared.buckets[threadIdx.x];
            const u32 up_to = sum_up_to_thread({own, 0}, shared.of_warp).count;
            if (up_to - own <= place && place < up_to) shared.bucket = threadIdx.x, shared.place = place - (up_to - own);
            __syncthreads();
            const int begin = (int)shared.bucket * width;
            find_index(key, shared.place, begin, min(begin + width, V));
        }
        cluster_barrier();
        return from_rank_0(shared.index);
    }

    // By block 0: the place-th logit with this key in begin .. end - 1.
    __device__ __forceinline__ void find_index(u32 key, u32 place, int begin, int end) const {
        u32 before = 0;
#pragma unroll 1
        for (int first = begin; first < end; first += THREADS) {
            const int index = first + threadIdx.x, lane = threadIdx.x & 31;
            const bool is_one =
                index < end && key_of(*reinterpret_cast<const unsigned short*>(logits + index)) == key;
            const u32 ones = __ballot_sync(ALL_LANES, is_one);
            __syncthreads();
            if (lane == 0) shared.count_of_warp[threadIdx.x >> 5] = __popc(ones);
            __syncthreads();
            u32 rank_of_one = before + __popc(ones & ((1u << lane) - 1));
#pragma unroll 1
            for (int warp = 0; warp < WARPS; ++warp) {
                if (warp < (int)threadIdx.x >> 5) rank_of_one += shared.count_of_warp[warp];
                before += shared.count_of_warp[warp];
            }
            if (is_one && rank_of_one == place) shared.index = index;
        }
        __syncthreads();
    }
};
