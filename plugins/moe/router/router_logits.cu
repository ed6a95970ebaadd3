// Router logits in FP32: out[m, e] = sum_h x[m, h] * w[e, h], BF16 weights.
//
// A warp computes one expert for up to eight rows, with one read of its weights. Numerics: exact products, FP32 sums
// in an order that depends on H only, so that rows do not depend on each other. Any H. Grid: (ceil(E / 8), ceil(M /
// 8)). Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "pdl.cuh"
#include "reduce.cuh"

constexpr int WARPS = 8, ROWS = 8;

#define ROUTER_LOGITS(WIDTH)                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) router_logits_w##WIDTH( \
        const bf16* x,                   /* [M, H] */                                \
        const bf16* __restrict__ weight, /* [E, H] */                                \
        float* __restrict__ out,         /* [M, E] */                                \
        int M, int E, int H) {                                                       \
        router_logits<WIDTH>(x, weight, out, M, E, H);                               \
    }

template <int WIDTH>
__device__ __forceinline__ void router_logits(const bf16* x, const bf16* weight, float* out, int M, int E, int H) {
    pdl_launch_dependents();
    pdl_wait();
    const int lane = threadIdx.x & 31, expert = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int first = blockIdx.y * ROWS, rows = min(ROWS, M - first);
    if (expert >= E) return;  // no barrier follows
    float sums[ROWS] = {};
    for (int vec = lane; vec < H / WIDTH; vec += 32) {
        const Values<WIDTH> w = load<WIDTH>(weight + (size_t)expert * H, vec);
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
            if (row < rows) {
                const Values<WIDTH> v = load<WIDTH>(x + (size_t)(first + row) * H, vec);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) sums[row] = fmaf(v.at[i], w.at[i], sums[row]);
            }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float sum = warp_sum(sums[row]);
        if (lane == 0 && row < rows) out[(size_t)(first + row) * E + expert] = sum;
    }
}

ROUTER_LOGITS(1)
ROUTER_LOGITS(8)
