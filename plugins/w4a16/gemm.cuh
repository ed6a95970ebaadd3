// W4A16 tile GEMM: NVFP4 weights x BF16 activations on mma.sync, one block for each tile of BM x BN outputs. Launched
// by launch.py. sm_80 and newer.
//
//   out[m, n] = BF16(global_scale * sum_k x[m, k] * E2M1[n, k] * E4M3[n, k / 16])
//
// Activations are the A operand of mma.sync.m16n8k16, weights its B operand: a register of B is two adjacent k of one
// feature, which is one byte of the checkpoint. Shared memory holds packed codes; each warp decodes them in registers
// during the mma of the previous step. Large WM is faster: every instruction besides the mma costs about a cycle, and a
// weight is decoded once for all rows of the warp. Of the WN features of a warp, lane (g, t) = (lane / 4, lane % 4) has
// the NT adjacent ones NT g .. NT g + NT - 1, one for each of NT mma: it reads them as one word, and writes 2 NT
// adjacent outputs.
//
// Numerics: exact products; each output has one FP32 accumulator over k in rising steps of 16, without split-K. All
// tile configurations, pipelines and layouts of this file therefore have the same bits. Steps beyond K add exact zeros.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "copies.cuh"
#include "operands.cuh"
#include "pdl.cuh"

// The epilogue: a lane's 2 NT adjacent outputs of each of its rows. ``wide``: rows of ``out`` are aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void store_tile(__nv_bfloat16* __restrict__ out, const float (&c)[T::MT][T::NT][4],
                                           float scale, const Problem& p, int warp_m, int warp_n, int lane, bool wide) {
    const int first = p.feature + warp_n * T::WN + 2 * T::NT * (lane & 3);
#pragma unroll
    for (int i = 0; i < T::MT; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int m = p.row + warp_m * T::WM + i * 16 + half * 8 + (lane >> 2);
            if (m >= p.M) continue;
            __nv_bfloat16* to = out + (size_t)m * p.N + first;
            float value[2 * T::NT];
#pragma unroll
            for (int j = 0; j < T::NT; ++j) {
                value[j] = c[i][j][2 * half] * scale;
                value[T::NT + j] = c[i][j][2 * half + 1] * scale;
            }
            constexpr int VECTOR = T::NT == 2 ? 4 : 8;
#pragma unroll
            for (int j = 0; j < 2 * T::NT; j += VECTOR) {
                if (wide && first + j < p.N) {
                    u32 word[VECTOR / 2];
#pragma unroll
                    for (int e = 0; e < VECTOR / 2; ++e) word[e] = bf16_pair(value[j + 2 * e], value[j + 2 * e + 1]);
                    if constexpr (VECTOR == 4) *reinterpret_cast<uint2*>(to + j) = make_uint2(word[0], word[1]);
                    else
                        *reinterpret_cast<uint4*>(to + j) =
                            make_uint4(word[0], word[1], word[VECTOR / 2 - 2], word[VECTOR / 2 - 1]);
                }
                if (!wide) {
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e)
                        if (first + j + e < p.N) to[j + e] = __float2bfloat16_rn(value[j + e]);
                }
            }
        }
}

// Grouped rasterisation: GROUP_M row tiles, then the next feature tile, so that concurrent blocks share both operands.
constexpr int GROUP_M = 8;

template <class T>
__device__ __forceinline__ void rasterize(Problem& p) {
    const int rows = (p.M + T::BM - 1) / T::BM, features = (p.N + T::BN - 1) / T::BN;
    const int group = blockIdx.x / (GROUP_M * features), in_group = blockIdx.x - group * GROUP_M * features;
    const int height = min(GROUP_M, rows - group * GROUP_M);
    p.row = (group * GROUP_M + in_group % height) * T::BM;
    p.feature = in_group / height * T::BN;
}

template <class T, bool WIDE>
__device__ __forceinline__ void gemm_tile(Problem p, __nv_bfloat16* __restrict__ out, float global_scale) {
    extern __shared__ __align__(128) u8 shared[];
    pdl_launch_dependents();
    rasterize<T>(p);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warp_n = warp % T::WARPS_N, warp_m = warp / T::WARPS_N;
    const int stages = (p.K + T::BK - 1) / T::BK;
    auto stage_buffer = [&](int s) { return shared + s * T::STAGE_BYTES; };
    auto pairs = [&](int s) { return reinterpret_cast<u32*>(shared + T::STAGES * T::STAGE_BYTES + s * T::PAIR_BYTES); };
    float c[T::MT][T::NT][4] = {};

    // Prologue: fill the pipeline. The previous kernel may write x, never weights. Scales are one stage ahead.
    load_scales<T, WIDE>(stage_buffer(0), p, 0);
#pragma unroll WIDE ? T::STAGES - 1 : 1
    for (int s = 0; s < T::STAGES - 1; ++s) {
        if (s < stages) load_codes<T, WIDE>(stage_buffer(s), p, s * T::BK);
        if (s + 1 < stages) load_scales<T, WIDE>(stage_buffer(s + 1), p, (s + 1) * T::BK);
    }
    pdl_wait();
#pragma unroll
    for (int s = 0; s < T::STAGES - 1; ++s) {
        if (s < stages) load_x<T>(stage_buffer(s), p, s * T::BK);
        cp_async_commit();
    }
    cp_async_wait<T::STAGES - 2>();
    decode_scales<T>(pairs(0), stage_buffer(0));
    decode_scales<T>(pairs(1), stage_buffer(1));
    __syncthreads();
    RegisterPipeline<T> pipeline;
    pipeline.x_base = x_offset<T>(warp_m * T::WM + (lane & 15), lane >> 4);
    pipeline.warp_n = warp_n, pipeline.lane = lane;
    pipeline.start(stage_buffer(0), pairs(0));

    // Main loop.
    int stage = 0, scales = 0;  // buffer of the stage, and of its decoded scales
    auto next_index = [](int i, int count) { return i + 1 == count ? 0 : i + 1; };
#pragma unroll 1
    for (int s = 0; s < stages; ++s) {
        const int next = next_index(stage, T::STAGES), next_scales = next_index(scales, 3),
                  last_scales = next_index(next_scales, 3);
        cp_async_wait<T::STAGES - 3>();
        __syncthreads();  // the next stage and its scales have arrived; the buffer of the last one is free
        // After the last stage, zeros are copied to unused buffers: a branch would cost more.
        const int load_stage = s + T::STAGES - 1, free = stage == 0 ? T::STAGES - 1 : stage - 1;
        auto between = [&](auto at) {
            if constexpr (at.INDEX == 0) load_codes<T, WIDE>(stage_buffer(free), p, load_stage * T::BK);
            if constexpr (at.INDEX == 1) load_scales<T, WIDE>(stage_buffer(stage), p, (load_stage + 1) * T::BK);
            if constexpr (at.INDEX == 2) load_x<T>(stage_buffer(free), p, load_stage * T::BK), cp_async_commit();
            if constexpr (at.INDEX == RegisterPipeline<T>::BLOCKS / 2)
                decode_scales<T>(pairs(last_scales), stage_buffer(next_index(next, T::STAGES)));
        };
        pipeline.template multiply<0>(
            c, stage_buffer(stage), pairs(scales), stage_buffer(next), pairs(next_scales), between);
        stage = next, scales = next_scales;
    }

    cp_async_wait<0>();

    // Epilogue: one rounding for each output.
    const bool wide = (WIDE && T::WEIGHTS == Weights::TRANSPOSED) || p.N % 8 == 0;
    store_tile<T>(out, c, global_scale * EXPONENT_GAP, p, warp_m, warp_n, lane, wide);
}

#define W4A16_ENTRY(NAME, TILE, WIDE)                                                        \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, TILE::BLOCKS) NAME(          \
        const u8* __restrict__ codes,        /* [K/2, N] or [N, K/2] */                      \
        const u8* __restrict__ scales,       /* [K/16, N] or [N, K/16] E4M3 */               \
        const __nv_bfloat16* __restrict__ x, /* [M, K], rows ``stride`` elements apart */    \
        __nv_bfloat16* __restrict__ out,     /* [M, N] */                                    \
        float global_scale, int stride, int M, int N, int K) {                               \
        gemm_tile<TILE, WIDE>({codes, scales, x, stride, M, N, K, 0, 0}, out, global_scale); \
    }
