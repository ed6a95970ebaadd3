// Router top-k by one warp: the top_k largest scores of a row, ties to the lowest index, and their weights. Used by
// topk.cu and ../pairwise/fused_shared.cu. sm_80 and newer.
//
//   softmax  chosen by logit, weights exp(logit - largest), renormalised: the sum over all experts cancels
//   sigmoid  chosen by logit, or with a bias by sigmoid(logit) + bias; weights sigmoid(logit), renormalised
//
// Lane i holds choice i of up to 32 at a time. There are three algorithms:
//   any number of experts   streams the scores once for each choice
//   up to 256 experts       8 keys a lane in registers; a choice takes two warp reductions, about 150 cycles
//   up to 256 BF16 logits,  key and expert packed in one word. The warp is cut into at least as many groups as choices;
//   32 choices              the smallest of the groups' largest words is a lower bound. The words that reach it, about
//                           20 of 256, are ranked by counting.
//
// Numerics: FP32; sums in order of choice. NaN is never chosen. A row with fewer candidates than choices gets expert 0
// with weight 0 for the rest, and weights are 0 if all scores are zero.
#pragma once
#include "bf16.cuh"
#include "opaque.cuh"
#include "shared_memory.cuh"

constexpr int KEYS_PER_LANE = 8, MAX_REGISTER_EXPERTS = KEYS_PER_LANE * 32;  // of the register algorithms

__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(bf16 v) { return __bfloat162float(v); }

// A key that orders as the values do. -0 is the key of 0; only NaN has key 0.
__device__ __forceinline__ u32 key_of(float v) {
    const u32 bits = __float_as_uint(v + 0.0f);
    return v != v ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The value of a key.
__device__ __forceinline__ float value_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// No choice: expert -1, key 0.
struct Choice {
    u32 key = 0xffffffffu;
    int expert = -1;

    __device__ __forceinline__ bool comes_before(u32 other, int index) const {
        return other < key || (other == key && index > expert);
    }
};

// The largest key of all lanes, of equal ones that of the lowest index. All lanes get the same result.
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
    // The weight before renormalisation; ``largest`` is the key of the first choice.
    __device__ __forceinline__ float weight(int expert, u32 key, u32 largest) const {
        if (SIGMOID) return sigmoid(bias ? as_float(logits[expert]) : value_of(key));
        return expf(value_of(key) - value_of(largest));
    }
};

// Sources of choices: each call of next() returns the best remaining one.

// Any number of experts: the next one in the order of value, then index.
template <class S>
struct StreamedScores {
    const S& scores;
    int E, lane;
    Choice last;

    __device__ __forceinline__ StreamedScores(const S& scores, int E, int lane) : scores(scores), E(E), lane(lane) {}
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

// Up to 256 experts: lane l holds l, l + 32, ...
template <class S>
struct RegisterScores {
    u32 keys[KEYS_PER_LANE];
    int lane;

    __device__ __forceinline__ RegisterScores(const S& scores, int E, int lane) : lane(lane) {
#pragma unroll
        for (int i = 0; i < KEYS_PER_LANE; ++i) keys[i] = i * 32 + lane < E ? scores.key(i * 32 + lane) : 0;
    }
    __device__ __forceinline__ Choice next() {
        u32 key = 0;
        int at = 0;
#pragma unroll
        for (int i = 0; i < KEYS_PER_LANE; ++i)
            if (keys[i] > key) key = keys[i], at = i;
        const Choice best = best_of(key, at * 32 + lane);
#pragma unroll
        for (int i = 0; i < KEYS_PER_LANE; ++i)
            if (i * 32 + lane == best.expert) keys[i] = 0;
        return best;
    }
};

// The choice of a lane; expert -1 for none.
struct LaneChoice {
    int expert = -1;
    u32 key = 0;
};

// Takes the next ``count`` choices, at most 32, one for each lane. ``largest`` becomes the key of the first choice.
template <class Source>
__device__ __forceinline__ LaneChoice take_choices(Source& source, int count, u32& largest, int lane) {
    LaneChoice choice;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const Choice best = source.next();
        if (best.key == 0) break;
        if (largest == 0) largest = best.key;
        if (lane == i) choice.expert = best.expert, choice.key = best.key;
    }
    return choice;
}

// Shared memory of a warp for packed keys.
struct PackedKeys {
    uint4 list[MAX_REGISTER_EXPERTS / 4 + 4];
    u32 chosen[32];
};

// A packed key: the upper half of the key of a BF16 logit (the lower half is all zeros or all ones), then 65535 -
// expert. The largest word is the best choice; 0 is none. ``bits`` is the logit in FP32. Branch-free, for ILP over
// eight words.
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

// Chooses ``count`` of up to 256 BF16 logits, at most 32. Lane l holds experts 8 l ... 8 l + 7.
__device__ __forceinline__ LaneChoice choose_packed(const bf16* logits, int E, int count, u32& largest,
                                                    PackedKeys& packed_keys, int lane) {
    constexpr u32 TWO_NANS = 0xffffffffu;
    const int first = lane * KEYS_PER_LANE;
    u32 pairs[KEYS_PER_LANE / 2], words[KEYS_PER_LANE], most = 0;
    if (E % KEYS_PER_LANE == 0) {  // rows begin at multiples of 16 bytes
        uint4 v = make_uint4(TWO_NANS, TWO_NANS, TWO_NANS, TWO_NANS);
        if (first < E) v = *reinterpret_cast<const uint4*>(logits + first);
        pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
    } else {
        const unsigned short* bits = reinterpret_cast<const unsigned short*>(logits);
#pragma unroll
        for (int i = 0; i < KEYS_PER_LANE / 2; ++i) {
            const int at = first + 2 * i;
            pairs[i] = (at < E ? bits[at] : 0xffffu) | (at + 1 < E ? bits[at + 1] : 0xffffu) << 16;
        }
    }
#pragma unroll
    for (int i = 0; i < KEYS_PER_LANE; ++i) {
        words[i] = word_of(i & 1 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16, first + i);
        most = max(most, words[i]);
    }
    // 8 groups of four lanes, 16 of two, or 32 of one: each has a word that reaches the bound.
    if (count <= 16) most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
    if (count <= 8) most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const u32 least = max(__reduce_min_sync(0xffffffffu, most), 1u);
    u32 list = shared_address(packed_keys.list), chosen = shared_address(packed_keys.chosen);
    make_opaque(list), make_opaque(chosen);  // otherwise recomputed for every store
    int count_in_list = 0;
#pragma unroll
    for (int i = 0; i < KEYS_PER_LANE; ++i) {
        const u32 mask = __ballot_sync(0xffffffffu, words[i] >= least);
        if (words[i] >= least) store_shared_4(list + 4 * (count_in_list + __popc(mask & ((1u << lane) - 1))), words[i]);
        count_in_list += __popc(mask);
    }
    if (lane < 16) store_shared_4(list + 4 * (count_in_list + lane), 0);
    store_shared_4(chosen + 4 * lane, 0);
    __syncwarp();
#pragma unroll 1
    for (int at = lane; at < count_in_list + lane; at += 32) {
        const u32 word = load_shared_4(list + 4 * min(at, count_in_list));  // 0 after the last
        int rank = 0;
#pragma unroll 1
        for (int j = 0; j < count_in_list; j += 16) {
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = load_shared_16(list + 4 * j + 16 * i);
#pragma unroll
            for (int i = 0; i < 4; ++i) rank += (v[i].x > word) + (v[i].y > word) + (v[i].z > word) + (v[i].w > word);
        }
        if (word != 0 && rank < count) store_shared_4(chosen + 4 * rank, word);
    }
    __syncwarp();
    const u32 word = load_shared_4(chosen + 4 * lane);
    largest = key_of_word(load_shared_4(chosen));
    LaneChoice choice;
    if (word != 0) choice.expert = 0xffff - (int)(word & 0xffffu), choice.key = key_of_word(word);
    return choice;
}

// ``sum`` plus the weights of all lanes, added in order. Weights of lanes from ``count`` on are +0, which changes no
// bit.
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
