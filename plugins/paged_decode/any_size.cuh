// Attention for heads of any size up to 8 * 128: a simple kernel. Used by attention.cuh. sm_80 and newer.
#pragma once
#include "bf16.cuh"
#include "fast_math.cuh"
#include "global_memory.cuh"
#include "split_kv.cuh"

// One block of 128 threads has one query head.
constexpr int ANY_THREADS = 128, ANY_COLUMNS = 8, ANY_TOKENS = 32;

__device__ __forceinline__ void attend_any(const PagedCache& cache, const ContextRow& row, float scale, int D) {
    __shared__ float scores[ANY_TOKENS];
    __shared__ int offsets[ANY_TOKENS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const size_t stride = (size_t)cache.key_heads * D, head = (size_t)row.key_head * D;
    float o[ANY_COLUMNS] = {}, largest = neg_infinity(), sum = 0.0f;
    bool is_invalid = false;
    for (int first = 0; first < row.length; first += ANY_TOKENS) {
        const int count = min(ANY_TOKENS, row.length - first);
        __syncthreads();
        if (threadIdx.x < count) {
            const int token = first + threadIdx.x;
            offsets[threadIdx.x] = max(cache.offset(load_now(row.table + cache.page_of(token)), token, is_invalid), 0);
        }
        __syncthreads();
        for (int i = warp; i < count; i += ANY_THREADS / 32) {
            const __nv_bfloat16* k = cache.k + offsets[i] * stride + head;
            float dot = 0.0f;
            for (int d = lane; d < D; d += 32) dot = __fmaf_rn(__bfloat162float(row.q[d]), __bfloat162float(k[d]), dot);
#pragma unroll
            for (int step = 16; step > 0; step >>= 1) dot = __fadd_rn(dot, __shfl_xor_sync(0xffffffffu, dot, step));
            if (lane == 0) scores[i] = __fmul_rn(dot, scale);
        }
        __syncthreads();
        float top = largest;
        for (int i = 0; i < count; ++i) top = fmaxf(top, scores[i]);
        const float alpha = exp2_approx(__fsub_rn(largest, top));
        largest = top;
        sum = __fmul_rn(sum, alpha);
#pragma unroll
        for (int j = 0; j < ANY_COLUMNS; ++j) o[j] = __fmul_rn(o[j], alpha);
        for (int i = 0; i < count; ++i) {
            const float p = exp2_approx(__fsub_rn(scores[i], top));
            const __nv_bfloat16* v = cache.v + offsets[i] * stride + head;
            sum = __fadd_rn(sum, p);
#pragma unroll
            for (int j = 0; j < ANY_COLUMNS; ++j) {
                const int d = threadIdx.x + j * ANY_THREADS;
                if (d < D) o[j] = __fmaf_rn(p, __bfloat162float(v[d]), o[j]);
            }
        }
    }
    const bool is_zero = __syncthreads_or(is_invalid) || row.length == 0;
#pragma unroll
    for (int j = 0; j < ANY_COLUMNS; ++j) {
        const int d = threadIdx.x + j * ANY_THREADS;
        if (d >= D) continue;
        const __nv_bfloat16 result = __float2bfloat16_rn(is_zero ? 0.0f : __fdiv_rn(o[j], sum));
        const float factor = row.gate != nullptr ? sigmoid(__bfloat162float(row.gate[d])) : 1.0f;
        row.out[d] = __float2bfloat16_rn(__fmul_rn(__bfloat162float(result), factor));
    }
}
