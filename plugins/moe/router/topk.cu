// Entry points of the router's top-k (topk.cuh): ids and weights that sum to 1, one warp for each token. Launched by
// launch.py. Grid: M. sm_80 and newer.
#include "bf16.cuh"
#include "pdl.cuh"
#include "topk.cuh"

// By a warp whose lane i holds choice i, for at most 32 choices.
template <class S>
__device__ __forceinline__ void store_choices(const S& scores, const LaneChoice& choice, u32 largest, int* ids,
                                              float* weights, int top_k, int lane) {
    const float weight = choice.expert >= 0 ? scores.weight(choice.expert, choice.key, largest) : 0.0f;
    const float sum = sum_in_order(0.0f, weight, top_k);
    if (lane >= top_k) return;
    ids[lane] = max(choice.expert, 0);
    weights[lane] = renormalised(weight, sum);
}

template <class S, class Source>
__device__ __forceinline__ void choose(const S& scores, Source& source, int* ids, float* weights, int top_k, int lane) {
    float sum = 0.0f, weight = 0.0f;
    u32 largest = 0;
    for (int first = 0; first < top_k; first += 32) {  // 32 choices at a time, one in each lane
        const int count = min(32, top_k - first);
        const LaneChoice choice = take_choices(source, count, largest, lane);
        weight = choice.expert >= 0 ? scores.weight(choice.expert, choice.key, largest) : 0.0f;
        sum = sum_in_order(sum, weight, count);
        if (lane < count) ids[first + lane] = max(choice.expert, 0);
        if (lane < count && top_k > 32) weights[first + lane] = weight;
    }
    for (int i = lane; i < top_k; i += 32)  // those that this lane has written
        weights[i] = renormalised(top_k > 32 ? weights[i] : weight, sum);
}

template <class T, bool SIGMOID>
__device__ __forceinline__ void choose_row(const T* logits, const float* bias, int* ids, float* weights, int E,
                                           int top_k) {
    const int lane = threadIdx.x;
    const Scores<T, SIGMOID> scores{logits, bias};
    if constexpr (sizeof(T) == sizeof(bf16)) {
        if (E <= MAX_REGISTER_EXPERTS && top_k <= 32 && (!SIGMOID || !bias)) {
            __shared__ PackedKeys packed_keys;
            u32 largest = 0;
            const LaneChoice choice = choose_packed(logits, E, top_k, largest, packed_keys, lane);
            store_choices(scores, choice, largest, ids, weights, top_k, lane);
            return;
        }
    }
    if (E <= MAX_REGISTER_EXPERTS) {
        RegisterScores<Scores<T, SIGMOID>> source(scores, E, lane);
        choose(scores, source, ids, weights, top_k, lane);
    } else {
        StreamedScores<Scores<T, SIGMOID>> source(scores, E, lane);
        choose(scores, source, ids, weights, top_k, lane);
    }
}

#define TOPK(NAME, T, SIGMOID)                                                                              \
    extern "C" __global__ void __launch_bounds__(32) NAME(                                                  \
        const T* logits,                /* [M, E] */                                                        \
        const float* __restrict__ bias, /* [E] or null */                                                   \
        int* __restrict__ ids,          /* [M, top_k] */                                                    \
        float* __restrict__ weights,    /* [M, top_k] */                                                    \
        int E, int top_k) {                                                                                 \
        pdl_launch_dependents();                                                                            \
        pdl_wait();                                                                                         \
        const size_t row = blockIdx.x;                                                                      \
        choose_row<T, SIGMOID>(logits + row * E, bias, ids + row * top_k, weights + row * top_k, E, top_k); \
    }

TOPK(topk_softmax_bf16, bf16, false)
TOPK(topk_softmax_f32, float, false)
TOPK(topk_sigmoid_bf16, bf16, true)
TOPK(topk_sigmoid_f32, float, true)
