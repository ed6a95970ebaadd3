// Elementwise steps between layers, all BF16 [M, H]: the sum with the residual, and the output gate of attention.
//
//   residual = BF16(residual + x)                 out = BF16(x * sigmoid(gate))
//
// x and gate may be slices of a wider tensor. Numerics: FP32, one rounding. Any size. Launched by launch.py. sm_80 and
// newer.
#include "bf16.cuh"
#include "pdl.cuh"
#include "rowwise.cuh"

#define RESIDUAL_ADD(WIDTH)                                                                       \
    extern "C" __global__ void __launch_bounds__(ROWWISE_THREADS) bf16_residual_add_w##WIDTH(     \
        const bf16* __restrict__ x,  /* [M, H], rows x_stride apart */                            \
        bf16* __restrict__ residual, /* [M, H], in and out */                                     \
        long long x_stride, long long columns, int blocks_per_row) {                              \
        pdl_launch_dependents();                                                                  \
        pdl_wait();                                                                               \
        for_each_vector<WIDTH>(columns, blocks_per_row, [&](auto width, size_t row, size_t vec) { \
            constexpr int W = decltype(width)::value;                                             \
            const Values<W> a = load<W>(x + row * x_stride, vec);                                 \
            Values<W> v = load<W>(residual + row * columns, vec);                                 \
            for (int i = 0; i < W; ++i) v.at[i] += a.at[i];                                       \
            store<W>(residual + row * columns, vec, v);                                           \
        });                                                                                       \
    }

#define SIGMOID_GATE_MUL(WIDTH)                                                                   \
    extern "C" __global__ void __launch_bounds__(ROWWISE_THREADS) sigmoid_gate_mul_w##WIDTH(      \
        const bf16* __restrict__ x,    /* [M, H], rows x_stride apart */                          \
        const bf16* __restrict__ gate, /* [M, H], rows gate_stride apart */                       \
        bf16* __restrict__ out,        /* [M, H] */                                               \
        long long x_stride, long long gate_stride, long long columns, int blocks_per_row) {       \
        pdl_launch_dependents();                                                                  \
        pdl_wait();                                                                               \
        for_each_vector<WIDTH>(columns, blocks_per_row, [&](auto width, size_t row, size_t vec) { \
            constexpr int W = decltype(width)::value;                                             \
            const Values<W> g = load<W>(gate + row * gate_stride, vec);                           \
            Values<W> v = load<W>(x + row * x_stride, vec);                                       \
            for (int i = 0; i < W; ++i) v.at[i] *= sigmoid(g.at[i]);                              \
            store<W>(out + row * columns, vec, v);                                                \
        });                                                                                       \
    }

RESIDUAL_ADD(1)
RESIDUAL_ADD(8)
SIGMOID_GATE_MUL(1)
SIGMOID_GATE_MUL(8)
