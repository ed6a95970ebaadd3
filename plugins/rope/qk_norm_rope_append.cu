// The steps between the projections of attention and its cache in one launch: RMS norms of queries and keys, rotary
// positions, and the append of new keys and values. The bits are those of rms_norm, rope_forward and kv_cache_append: a
// norm is rounded to BF16 before the rotation.
//
//   q = rotate(BF16(norm(q) * (weight_offset + q_weight)))       k_cache[slots] = rotate(BF16(norm(k) * ...)),
//                                                                v_cache[slots] = v
//
// A warp has a head. One more warp of each block computes the row's cosines and sines at the same time. In a small head
// (up to 256 values, D and half multiples of 8) a lane has 8 values and gets their partners by shuffle. In other heads
// a lane has both values of a pair, one pair after the other, and reads them again.
//
// The contract rejects negative positions and slots outside the cache. A row with a negative position is not rotated. A
// row with slot -1, or another slot outside the cache, is not appended.
//
// Grid: rows x ceil((Hq + Hk) / heads of a block). A block has a warp for each of its heads, at most MAX_HEADS, and one
// more. Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"
#include "rms_norm.cuh"
#include "rope.cuh"

constexpr int MAX_HEADS = 8, MAX_THREADS = (MAX_HEADS + 1) * warp;  // of a block
constexpr int MAX_PAIRS = MAX_WARP_ROW / 2;                         // of a head

struct Angles {
    alignas(16) float cosine[MAX_PAIRS], sine[MAX_PAIRS];
    int pairs;  // to rotate

    // By the last warp of a block, which then joins the block's barrier.
    __device__ __forceinline__ void make(const int* position, int half, double log2_step) {
        pdl_wait();
        const int lane = threadIdx.x % warp, at = load_now(position);
#pragma unroll 1
        for (int i = lane; i < half; i += warp)
            cosine_and_sine(at, turns_per_token(i, log2_step, NO_YARN), NO_YARN.scale, cosine[i], sine[i]);
        if (lane == 0) pairs = at < 0 ? 0 : half;
        __syncthreads();
    }
};

// The norm of one head: its weight, and the parameters of the launch.
struct Norm {
    const bf16* weight;
    float eps, weight_offset;

    template <int WIDTH>
    __device__ __forceinline__ Raw<WIDTH> of(Raw<WIDTH> value, float r, Raw<WIDTH> by) const {
        return narrow(scaled(widen(value), r, widen(by), weight_offset));
    }
};

__device__ __forceinline__ int heads_of_block() { return blockDim.x / warp - 1; }

// The head of a warp, counted over queries, then keys, and its offset in memory.
struct HeadPosition {
    size_t row, query, key;  // offsets of elements in q, and in k and v
    int index;
    bool exists, is_key;

    __device__ __forceinline__ HeadPosition(int Hq, int Hk, int D) {
        row = blockIdx.x, index = blockIdx.y * heads_of_block() + threadIdx.x / warp;
        exists = index < Hq + Hk, is_key = index >= Hq;
        query = (row * Hq + index) * D, key = (row * Hk + index - Hq) * D;
    }
    // The offset of an element in the cache, or negative for a row that is not kept.
    __device__ __forceinline__ long long cache_offset(int slot, long long places, int Hq, int Hk, int D) const {
        return slot >= 0 && slot < places ? ((long long)slot * Hk + index - Hq) * D : -1;
    }
};

// Not movable over pdl_wait (global_memory.cuh).
__device__ __forceinline__ Raw<8> load_vector(const bf16* row, int vec) {
    return {load_now(reinterpret_cast<const uint4*>(row) + vec)};
}

__device__ __forceinline__ Values<8> load_eight(const float* p) {
    const float4 low = *reinterpret_cast<const float4*>(p), high = *reinterpret_cast<const float4*>(p + 4);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

#define PARAMETERS                                                                                          \
    bf16 *q,                  /* [M, Hq, D], in and out; not restrict: the previous kernel may write all */ \
        const bf16 *k,        /* [M, Hk, D] */                                                              \
        const bf16 *v,        /* [M, Hk, D] */                                                              \
        const bf16 *q_weight, /* [D] */                                                                     \
        const bf16 *k_weight, /* [D] */                                                                     \
        const int *positions, /* [M] */                                                                     \
        const int *slots,     /* [M] */                                                                     \
        bf16 *k_cache,        /* [P * B, Hk, D] */                                                          \
        bf16 *v_cache,        /* [P * B, Hk, D] */                                                          \
        float eps, float weight_offset, long long places, int Hq, int Hk, int D, int half, double log2_step

extern "C" __global__ void __launch_bounds__(MAX_THREADS) qk_norm_rope_append_small_d(PARAMETERS) {
    __shared__ Angles angles;
    pdl_launch_dependents();
    if (threadIdx.x / warp == heads_of_block()) return angles.make(positions + blockIdx.x, half, log2_step);
    const HeadPosition at(Hq, Hk, D);

    // Stage 1: all loads.
    const int lane = threadIdx.x % warp, lanes = half / 8;  // that have one half of the pairs
    const bool has_vec = at.exists && lane < D / 8;
    const Norm norm{at.is_key ? k_weight : q_weight, eps, weight_offset};
    Raw<8> weight = {}, vector = {}, value = {}, other;
    int slot = -1;
    if (has_vec) weight = load_vector(norm.weight, lane);
    pdl_wait();
    if (has_vec) vector = load_vector(at.is_key ? k + at.key : q + at.query, lane);
    if (has_vec && at.is_key) {
        slot = load_now(slots + at.row);
        value = load_vector(v + at.key, lane);
    }

    // Stage 2: the norm, and the partners of this lane's values.
    vector = norm.of<8>(vector, reciprocal_root(warp_sum(add_squares(widen(vector), 0.0f)), D, eps), weight);
    const bool is_high = lane >= lanes;
    const int from = is_high ? lane - lanes : lane + lanes;
    other.bits.x = __shfl_sync(0xFFFFFFFFu, vector.bits.x, from),
    other.bits.y = __shfl_sync(0xFFFFFFFFu, vector.bits.y, from);
    other.bits.z = __shfl_sync(0xFFFFFFFFu, vector.bits.z, from),
    other.bits.w = __shfl_sync(0xFFFFFFFFu, vector.bits.w, from);
    const long long to = at.cache_offset(slot, places, Hq, Hk, D);
    __syncthreads();

    // Stage 3: the rotation.
    if (!has_vec) return;
    if (lane < 2 * lanes) {
        const int first = 8 * min(lane, from);
        const Values<8> cosines = load_eight(angles.cosine + first), sines = load_eight(angles.sine + first);
        Values<8> x = widen(vector);
        const Values<8> y = widen(other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x.at[i] = rotated(is_high, x.at[i], y.at[i], cosines.at[i], sines.at[i]);
        if (angles.pairs > 0) vector = narrow(x);
    }
    if (!at.is_key) {
        store_raw<8>(q + at.query, lane, vector);
    } else if (to >= 0) {
        store_raw<8>(k_cache + to, lane, vector);
        store_raw<8>(v_cache + to, lane, value);
    }
}

// A head of any size, summed in vectors of WIDTH.
template <int WIDTH>
__device__ __forceinline__ void norm_rotate_append(PARAMETERS) {
    __shared__ Angles angles;
    pdl_launch_dependents();
    if (threadIdx.x / warp == heads_of_block()) return angles.make(positions + blockIdx.x, half, log2_step);
    const HeadPosition at(Hq, Hk, D);
    pdl_wait();

    // Stage 1: the norm, and the append of v.
    const int lane = threadIdx.x % warp, vecs = at.exists ? D / WIDTH : 0;
    const Norm norm{at.is_key ? k_weight : q_weight, eps, weight_offset};
    const bf16* const x = at.is_key ? k + at.key : q + at.query;
    const long long to = at.is_key && at.exists ? at.cache_offset(slots[at.row], places, Hq, Hk, D) : -1;
    float sum = 0.0f;
#pragma unroll 1
    for (int vec = lane; vec < vecs; vec += warp) {
        sum = add_squares(load<WIDTH>(x, vec), sum);
        if (to >= 0) store_raw<WIDTH>(v_cache + to, vec, load_raw<WIDTH>(v + at.key, vec));
    }
    const float r = reciprocal_root(warp_sum(sum), D, eps);
    __syncthreads();

    // Stage 2: the rotation.
    if (!at.exists || (at.is_key && to < 0)) return;
    bf16* const out = at.is_key ? k_cache + to : q + at.query;
    auto normed = [&](int i) {
        return __bfloat162float(norm.of<1>(load_raw<1>(x, i), r, load_raw<1>(norm.weight, i)).bits);
    };
#pragma unroll 1
    for (int i = lane; i < angles.pairs; i += warp) {
        const int j = i + angles.pairs;
        const float low = normed(i), high = normed(j), cosine = angles.cosine[i], sine = angles.sine[i];
        out[i] = __float2bfloat16_rn(rotated(false, low, high, cosine, sine));
        out[j] = __float2bfloat16_rn(rotated(true, high, low, cosine, sine));
    }
#pragma unroll 1
    for (int i = lane + 2 * angles.pairs; i < D; i += warp) out[i] = __float2bfloat16_rn(normed(i));
}

#define ANY_HEADS(WIDTH)                                                                                               \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS) qk_norm_rope_append_w##WIDTH(PARAMETERS) {               \
        norm_rotate_append<WIDTH>(q, k, v, q_weight, k_weight, positions, slots, k_cache, v_cache, eps, weight_offset, \
                                  places, Hq, Hk, D, half, log2_step);                                                 \
    }

ANY_HEADS(1)
ANY_HEADS(8)
