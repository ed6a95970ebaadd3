// The step for any Dk and Dv: a thread has a column, and the state stays in memory. No model has such sizes. The aim is
// little code, not speed. Used by gated_delta_rule.cu and decode_norm.cu. sm_80 and newer.
#pragma once
#include "delta_rule.cuh"

constexpr int ANY_WARPS = 8, ANY_THREADS = ANY_WARPS * 32;

// One row of one head. All threads of the block construct it. ``sums`` is shared memory without another use.
struct AnyRow {
    const __nv_bfloat16 *q, *k, *v;
    float decay, beta, unit_q, unit_k, qk;

    __device__ __forceinline__ AnyRow(const Heads& heads, const __nv_bfloat16* qkv, int row, int head, float decay_,
                                      float beta_, float (&sums)[3][ANY_WARPS])
        : decay(decay_), beta(beta_) {
        const size_t keys = (size_t)heads.key_heads * heads.key_dim;
        q = qkv + row * heads.width() + (size_t)heads.key_head(head) * heads.key_dim;
        k = q + keys;
        v = qkv + row * heads.width() + 2 * keys + (size_t)head * heads.value_dim;
        float qq = 0.0f, kk = 0.0f, both = 0.0f;
#pragma unroll 1
        for (int i = threadIdx.x; i < heads.key_dim; i += ANY_THREADS) {
            const float x = __bfloat162float(q[i]), y = __bfloat162float(k[i]);
            qq += x * x, kk += y * y, both += x * y;
        }
        qq = total(qq, sums[0]), kk = total(kk, sums[1]), both = total(both, sums[2]);
        unit_q = 1.0f / sqrtf(qq + LENGTH_EPS) * (1.0f / sqrtf((float)heads.key_dim));
        unit_k = 1.0f / sqrtf(kk + LENGTH_EPS);
        qk = both * unit_q * unit_k;
        __syncthreads();  // the next row may use this memory
    }

    __device__ __noinline__ static float total(float value, float (&parts)[ANY_WARPS]) {
        value = warp_total(value);
        if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = value;
        __syncthreads();
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < ANY_WARPS; ++w) sum += parts[w];
        return sum;
    }

    // Updates one column of ``state [Dk, Dv]`` and returns its output. A copy goes to ``after``, if that is not null.
    __device__ __forceinline__ float step(const Heads& heads, float* state, int column, float* after) const {
        float read_k = 0.0f, read_q = 0.0f;
#pragma unroll 1
        for (int i = 0; i < heads.key_dim; ++i) {
            const float s = state[(size_t)i * heads.value_dim + column] * decay;
            read_k = fmaf(__bfloat162float(k[i]) * unit_k, s, read_k);
            read_q = fmaf(__bfloat162float(q[i]) * unit_q, s, read_q);
        }
        const float delta = (__bfloat162float(v[column]) - read_k) * beta;
#pragma unroll 1
        for (int i = 0; i < heads.key_dim; ++i) {
            const size_t at = (size_t)i * heads.value_dim + column;
            const float s = fmaf(__bfloat162float(k[i]) * unit_k, delta, state[at] * decay);
            state[at] = s;
            if (after) after[at] = s;
        }
        return fmaf(qk, delta, read_q);
    }
};
