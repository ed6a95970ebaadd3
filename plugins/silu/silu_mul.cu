// out = silu(gate) * up, all BF16 [M, I]. gate and up may be slices of one projection.
//
// Numerics: FP32, silu(x) = x * sigmoid(x), one rounding to BF16. Any size. Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "pdl.cuh"
#include "rowwise.cuh"
#include "silu.cuh"

#define SILU_MUL(WIDTH)                                                                                         \
    extern "C" __global__ void __launch_bounds__(ROWWISE_THREADS) silu_mul_w##WIDTH(                            \
        const bf16* __restrict__ gate, /* [M, I], rows gate_stride apart */                                     \
        const bf16* __restrict__ up,   /* [M, I], rows up_stride apart */                                       \
        bf16* __restrict__ out,        /* [M, I] */                                                             \
        long long gate_stride, long long up_stride, long long columns, int blocks_per_row) {                    \
        pdl_launch_dependents();                                                                                \
        pdl_wait();                                                                                             \
        for_each_vector<WIDTH>(columns, blocks_per_row, [&](auto width, size_t row, size_t vec) {               \
            constexpr int W = decltype(width)::value;                                                           \
            const Values<W> g = load<W>(gate + row * gate_stride, vec), u = load<W>(up + row * up_stride, vec); \
            Values<W> v;                                                                                        \
            for (int i = 0; i < W; ++i) v.at[i] = silu_mul(g.at[i], u.at[i]);                                   \
            store<W>(out + row * columns, vec, v);                                                              \
        });                                                                                                     \
    }

SILU_MUL(1)
SILU_MUL(8)
