// The router's choice by one warp: the top_k largest of a row of scores, ties to the lowest index, and their weights.
//
//   softmax  chosen by logit, weights exp(logit - largest), renormalised: the sum over all experts cancels
//   sigmoid  chosen by logit, or with a bias by sigmoid(logit) + bias; weights sigmoid(logit), renormalised
//
// Lane i has choice i of up to 32 at a time. Up to 256 experts a lane keeps the keys of eight. BF16 logits with the
// expert's place fit one word: a choice is one reduction over the warp, and a lane keeps its words sorted, so that the
// next one is ready behind the one that was taken. Other scores take two reductions a choice.
//
// Numerics: FP32; sums in order of choice. NaN is never chosen: what such a row lacks is expert 0 with weight 0, and so is
// a weight whose scores are all zero.
#pragma once
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

// Expert -1 and key 0 stand for none.
struct Choice {
    u32 key = 0xffffffffu;
    int expert = -1;

    __device__ __forceinline__ bool comes_before(u32 other, int index) const {
        return other < key || (other == key && index > expert);
    }
};

// The largest of all lanes' keys, of equal ones that of the lowest index. All lanes get the same.
__device__ __forceinline__ Choice best_of(u32 key, int expert) {
    Choice best;
    best.key = __reduce_max_sync(0xffffffffu, key);
    best.expert = (int)~__reduce_max_sync(0xffffffffu, key == best.key ? ~(u32)expert : 0u);
    return best;
}

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

// Where choices come from: each call of next() gives the best one that is left.

// Any number of experts: the largest that comes after the last one in the order (value, then index).
template <class S>
struct AllExperts {
    const S& scores;
    int E, lane;
    Choice last;

    __device__ __forceinline__ AllExperts(const S& scores, int E, int lane) : scores(scores), E(E), lane(lane) {}
    __device__ __forceinline__ Choice next() {
        u32 key = 0;
        int expert = 0;
        for (int index = lane; index < E; index += 32) {
            const u32 other = scores.key(index);
            if (other > key && last.comes_before(other, index)) key = other, expert = index;
        }
        const Choice best = best_of(key, expert);
        if (best.key != 0) last = best;
        return best;
    }
};

// Up to 256 experts: lane l has l, l + 32, ...
template <class S>
struct HeldExperts {
    u32 keys[HELD];
    int lane;

    __device__ __forceinline__ HeldExperts(const S& scores, int E, int lane) : lane(lane) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) keys[i] = i * 32 + lane < E ? scores.key(i * 32 + lane) : 0;
    }
    __device__ __forceinline__ Choice next() {
        u32 key = 0;
        int at = 0;
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (keys[i] > key) key = keys[i], at = i;
        const Choice best = best_of(key, at * 32 + lane);
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (i * 32 + lane == best.expert) keys[i] = 0;
        return best;
    }
};

// Up to 256 BF16 logits: words of the key's upper half (the lower one is all zeros or all ones) over 65535 - index, the
// largest first; 0 for none. Lane l has experts 8 l ... 8 l + 7.
struct PackedExperts {
    u32 words[HELD];

    __device__ __forceinline__ PackedExperts(const bf16* logits, int E, int lane) {
        const int first = lane * HELD;
        if (E % HELD == 0) {  // rows begin at multiples of 16 bytes
            uint4 v = make_uint4(0, 0, 0, 0);
            if (first < E) v = *reinterpret_cast<const uint4*>(logits + first);
            const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < HELD; ++i)
                words[i] = first < E ? word(i & 1 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16, first + i) : 0;
        } else {
#pragma unroll
            for (int i = 0; i < HELD; ++i)
                words[i] = first + i < E ? word(__float_as_uint(as_float(logits[first + i])), first + i) : 0;
        }
        sort();
    }
    __device__ __forceinline__ Choice next() {
        const u32 best = __reduce_max_sync(0xffffffffu, words[0]);
        if (words[0] == best) {
#pragma unroll
            for (int i = 0; i + 1 < HELD; ++i) words[i] = words[i + 1];
            words[HELD - 1] = 0;
        }
        Choice choice;
        const u32 upper = best & 0xffff0000u;
        choice.key = best == 0 ? 0 : upper & 0x80000000u ? upper : upper | 0xffffu;
        choice.expert = 0xffff - (int)(best & 0xffffu);
        return choice;
    }

private:
    static __device__ __forceinline__ u32 word(u32 bits, int expert) {
        const u32 key = key_of(__uint_as_float(bits));
        return key == 0 ? 0 : (key & 0xffff0000u) | (u32)(0xffff - expert);
    }
    // Batcher's odd-even merge sort of eight.
    __device__ __forceinline__ void sort() {
        constexpr int FIRST[19] = {0, 2, 4, 6, 0, 1, 4, 5, 1, 5, 0, 1, 2, 3, 2, 3, 1, 3, 5};
        constexpr int SECOND[19] = {1, 3, 5, 7, 2, 3, 6, 7, 2, 6, 4, 5, 6, 7, 4, 5, 2, 4, 6};
#pragma unroll
        for (int i = 0; i < 19; ++i) {
            u32 &a = words[FIRST[i]], &b = words[SECOND[i]];
            const u32 larger = max(a, b);
            b = min(a, b);
            a = larger;
        }
    }
};

// What a lane has of the choices at hand; expert -1 for none.
struct OwnChoice {
    int expert = -1;
    u32 key = 0;
};

// Takes the next ``count`` choices, at most 32, one a lane. ``largest`` is the key of the first one of all, 0 before.
template <class Source>
__device__ __forceinline__ OwnChoice take(Source& source, int count, u32& largest, int lane) {
    OwnChoice own;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const Choice best = source.next();
        if (best.key == 0) break;
        if (largest == 0) largest = best.key;
        if (lane == i) own.expert = best.expert, own.key = best.key;
    }
    return own;
}

// ``sum`` and the lanes' weights, added in order; those of lanes from ``count`` on are 0, and never negative, so that
// adding them changes no bit.
__device__ __forceinline__ float sum_in_order(float sum, float weight, int count) {
#pragma unroll 1
    for (int first = 0; first < count; first += 8)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += __shfl_sync(0xffffffffu, weight, first + i);
    return sum;
}

__device__ __forceinline__ float renormalised(float weight, float sum) {
    return sum > 0.0f ? __fdiv_rn(weight, sum) : 0.0f;
}
