// The router's choice: the top_k largest of each row's scores, ties to the lowest index, with weights that sum to 1. One
// warp a token.
//
//   softmax  chosen by logit, weights exp(logit - largest), renormalised: the sum over all experts cancels
//   sigmoid  chosen by logit, or with a bias by sigmoid(logit) + bias; weights sigmoid(logit), renormalised
//
// The next choice is the largest that comes after the last one in the order (value, then index), so that nothing is
// marked. Numerics: FP32; sums in order of choice. NaN is never chosen: what such a row lacks is expert 0 with weight 0,
// and so is a weight whose scores are all zero. Launched by router_launch.py. Grid: M.
#include "bf16.cuh"
#include "launch.cuh"

constexpr int HELD = 8, HELD_EXPERTS = HELD * 32;  // so many experts' keys are kept in registers

__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(bf16 v) { return __bfloat162float(v); }

// Rises with the value; -0 is 0; 0 for NaN only.
__device__ __forceinline__ u32 key_of(float v) {
    const u32 bits = __float_as_uint(v + 0.0f);
    return v != v ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The value that a key was made of.
__device__ __forceinline__ float value_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

struct Choice {
    u32 key = 0xffffffffu;
    int expert = -1;

    __device__ __forceinline__ bool comes_before(u32 other, int index) const {
        return other < key || (other == key && index > expert);
    }
};

template <class T, bool SIGMOID>
struct Scores {
    const T* logits;     // [E]
    const float* bias;   // [E] or null

    __device__ __forceinline__ u32 key(int expert) const {
        const float logit = as_float(logits[expert]);
        return key_of(SIGMOID && bias ? sigmoid(logit) + bias[expert] : logit);
    }
    // The weight before it is renormalised; ``largest`` is the key of the first choice.
    __device__ __forceinline__ float weight(int expert, u32 key, u32 largest) const {
        if (SIGMOID) return sigmoid(bias ? as_float(logits[expert]) : value_of(key));
        return expf(value_of(key) - value_of(largest));
    }
};

// The best choice after ``last``; key 0 if there is none. All lanes get the same.
template <bool IS_HELD, class S>
__device__ __forceinline__ Choice next_choice(const S& scores, const u32 (&held)[HELD], int E, const Choice& last, int lane) {
    u32 key = 0;
    int expert = 0;
    auto consider = [&](u32 other, int index) {
        if (other > key && last.comes_before(other, index)) key = other, expert = index;
    };
    if constexpr (IS_HELD) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) consider(held[i], i * 32 + lane);
    } else {
        for (int index = lane; index < E; index += 32) consider(scores.key(index), index);
    }
    Choice best;
    best.key = __reduce_max_sync(0xffffffffu, key);
    best.expert = (int)~__reduce_max_sync(0xffffffffu, key == best.key ? ~(u32)expert : 0u);
    return best;
}

template <class T, bool SIGMOID, bool IS_HELD>
__device__ __forceinline__ void choose(const T* logits, const float* bias, int* ids, float* weights, int E, int top_k) {
    const int lane = threadIdx.x;
    const Scores<T, SIGMOID> scores{logits, bias};
    u32 held[HELD] = {};
    if constexpr (IS_HELD) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) held[i] = i * 32 + lane < E ? scores.key(i * 32 + lane) : 0;
    }
    Choice last;
    float sum = 0.0f, weight = 0.0f;
    u32 largest = 0;
    for (int first = 0; first < top_k; first += 32) {  // 32 choices at a time, one a lane
        const int count = min(32, top_k - first);
        int own = -1;
        u32 own_key = 0;
        for (int i = 0; i < count; ++i) {
            const Choice best = next_choice<IS_HELD>(scores, held, E, last, lane);
            if (best.key == 0) continue;
            last = best;
            if (largest == 0) largest = best.key;
            if (lane == i) own = best.expert, own_key = best.key;
        }
        weight = own >= 0 ? scores.weight(own, own_key, largest) : 0.0f;
        for (int i = 0; i < count; ++i) sum += __shfl_sync(0xffffffffu, weight, i);
        if (lane < count) ids[first + lane] = own >= 0 ? own : 0;
        if (lane < count && top_k > 32) weights[first + lane] = weight;
    }
    for (int i = lane; i < top_k; i += 32) {  // its own ones
        const float own = top_k > 32 ? weights[i] : weight;
        weights[i] = sum > 0.0f ? __fdiv_rn(own, sum) : 0.0f;
    }
}

#define TOPK(NAME, T, SIGMOID)                                                                                     \
    extern "C" __global__ void __launch_bounds__(32) NAME(                                                         \
        const T* __restrict__ logits,    /* [M, E] */                                                              \
        const float* __restrict__ bias,  /* [E] or null */                                                         \
        int* __restrict__ ids,           /* [M, top_k] */                                                          \
        float* __restrict__ weights,     /* [M, top_k] */                                                          \
        int E, int top_k) {                                                                                        \
        allow_next_launch();                                                                                       \
        wait_for_previous_launch();                                                                                \
        const T* row = logits + (size_t)blockIdx.x * E;                                                            \
        int* own_ids = ids + (size_t)blockIdx.x * top_k;                                                           \
        float* own_weights = weights + (size_t)blockIdx.x * top_k;                                                 \
        if (E <= HELD_EXPERTS) choose<T, SIGMOID, true>(row, bias, own_ids, own_weights, E, top_k);                \
        else choose<T, SIGMOID, false>(row, bias, own_ids, own_weights, E, top_k);                                 \
    }

TOPK(topk_softmax_bf16, bf16, false)
TOPK(topk_softmax_f32, float, false)
TOPK(topk_sigmoid_bf16, bf16, true)
TOPK(topk_sigmoid_f32, float, true)
