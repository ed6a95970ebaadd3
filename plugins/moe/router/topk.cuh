// The router's choice by one warp: the top_k largest of a row of scores, ties to the lowest index, and their weights.
//
//   softmax  chosen by logit, weights exp(logit - largest), renormalised: the sum over all experts cancels
//   sigmoid  chosen by logit, or with a bias by sigmoid(logit) + bias; weights sigmoid(logit), renormalised
//
// Lane i has choice i of up to 32 at a time. Up to 256 experts a lane keeps the keys of eight; a choice takes two
// reductions over the warp, of about 150 cycles. BF16 logits with the expert's place fit one word: up to 32 of them are
// chosen at once. The least of as many groups' largest words as there are choices bounds them from below; what is not
// below it, some twenty of 256, is ranked by counting.
//
// Numerics: FP32; sums in order of choice. NaN is never chosen: what such a row lacks is expert 0 with weight 0, and so
// is a weight whose scores are all zero.
#pragma once
#include "bf16.cuh"
#include "opaque.cuh"
#include "shared_memory.cuh"

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
    const T* logits;    // [E]
    const float* bias;  // [E] or null

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

// Shared memory of a warp that chooses among words.
struct WordSpace {
    uint4 list[HELD_EXPERTS / 4 + 4];
    u32 chosen[32];
};

// Words of the upper half of a BF16 logit's key (the lower one is all zeros or all ones) over 65535 - index: the
// largest is the best; 0 for none. ``bits`` are those of the logit in FP32. No branch: eight words are made side by
// side.
__device__ __forceinline__ u32 word_of(u32 bits, int expert) {
    const u32 magnitude = bits << 1, signed_bits = magnitude == 0 ? 0 : bits;  // -0 is 0
    const u32 key = signed_bits ^ ((u32)((int)signed_bits >> 31) | 0x80000000u);
    const u32 word = (key & 0xffff0000u) | (u32)(0xffff - expert);
    return magnitude > 0xff000000u ? 0 : word;  // NaN
}
__device__ __forceinline__ u32 key_of_word(u32 word) {
    const u32 upper = word & 0xffff0000u;
    return word == 0 ? 0 : upper & 0x80000000u ? upper : upper | 0xffffu;
}

// Chooses ``count`` of up to 256 BF16 logits, at most 32. Lane l has experts 8 l ... 8 l + 7.
__device__ __forceinline__ OwnChoice choose_words(const bf16* logits, int E, int count, u32& largest, WordSpace& space,
                                                  int lane) {
    constexpr u32 NOTHING = 0xffffffffu;  // two NaN
    const int first = lane * HELD;
    u32 pairs[HELD / 2], words[HELD], most = 0;
    if (E % HELD == 0) {  // rows begin at multiples of 16 bytes
        uint4 v = make_uint4(NOTHING, NOTHING, NOTHING, NOTHING);
        if (first < E) v = *reinterpret_cast<const uint4*>(logits + first);
        pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
    } else {
        const unsigned short* bits = reinterpret_cast<const unsigned short*>(logits);
#pragma unroll
        for (int i = 0; i < HELD / 2; ++i) {
            const int at = first + 2 * i;
            pairs[i] = (at < E ? bits[at] : 0xffffu) | (at + 1 < E ? bits[at + 1] : 0xffffu) << 16;
        }
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        words[i] = word_of(i & 1 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16, first + i);
        most = max(most, words[i]);
    }
    // Eight groups of four lanes, 16 of two, or 32: each has a word that is not below the bound.
    if (count <= 16) most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
    if (count <= 8) most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const u32 least = max(__reduce_min_sync(0xffffffffu, most), 1u);
    u32 list = shared_address(space.list), chosen = shared_address(space.chosen);
    make_opaque(list), make_opaque(chosen);  // kept, where they would be made again for every store
    int there = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const u32 mask = __ballot_sync(0xffffffffu, words[i] >= least);
        if (words[i] >= least) store_shared_4(list + 4 * (there + __popc(mask & ((1u << lane) - 1))), words[i]);
        there += __popc(mask);
    }
    if (lane < 16) store_shared_4(list + 4 * (there + lane), 0);
    store_shared_4(chosen + 4 * lane, 0);
    __syncwarp();
#pragma unroll 1
    for (int at = lane; at < there + lane; at += 32) {
        const u32 own = load_shared_4(list + 4 * min(at, there));  // 0 behind the last
        int rank = 0;
#pragma unroll 1
        for (int j = 0; j < there; j += 16) {
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = load_shared_16(list + 4 * j + 16 * i);
#pragma unroll
            for (int i = 0; i < 4; ++i) rank += (v[i].x > own) + (v[i].y > own) + (v[i].z > own) + (v[i].w > own);
        }
        if (own != 0 && rank < count) store_shared_4(chosen + 4 * rank, own);
    }
    __syncwarp();
    const u32 word = load_shared_4(chosen + 4 * lane);
    largest = key_of_word(load_shared_4(chosen));
    OwnChoice own;
    if (word != 0) own.expert = 0xffff - (int)(word & 0xffffu), own.key = key_of_word(word);
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
