// Splits the output of fused projections into its parts, copied as BF16.
//
//   deinterleave_qg      qg [M, 2Q], by head [q (D) | gate (D)]            -> query [M, Q], gate [M, Q]
//   deinterleave_qkvz    qkvz [M, ...], by key head [q | k | v | z]        -> qkv [M, q of all | k of all | v of all],
//                        z
//
// v and z of a key head have group_values = value_heads / key_heads * value_dim values each. The input may be a slice
// of a wider tensor. A thread has one vector of 8 values, or one value if the size of a part is no multiple of 8.
// Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "pdl.cuh"
#include "rowwise.cuh"

#define DEINTERLEAVE_QG(WIDTH)                                                                             \
    extern "C" __global__ void __launch_bounds__(ROWWISE_THREADS) deinterleave_qg_w##WIDTH(                \
        const bf16* __restrict__ qg, /* [M, 2Q], rows stride apart */                                      \
        bf16* __restrict__ query,    /* [M, Q] */                                                          \
        bf16* __restrict__ gate,     /* [M, Q] */                                                          \
        long long stride, int Q, int head_dim, int blocks_per_row) {                                       \
        pdl_launch_dependents();                                                                           \
        pdl_wait();                                                                                        \
        const int part = head_dim / WIDTH;                                                                 \
        for_each_vector<WIDTH>(2 * (long long)Q, blocks_per_row, [&](auto width, size_t row, size_t vec) { \
            if constexpr (decltype(width)::value == WIDTH) { /* whole vectors only: no remainder */        \
                const int head = (int)vec / (2 * part), at = (int)vec - head * 2 * part;                   \
                bf16* to = at < part ? query : gate;                                                       \
                const int place = head * part + (at < part ? at : at - part);                              \
                store_raw<WIDTH>(to + row * Q, place, load_raw<WIDTH>(qg + row * stride, vec));            \
            }                                                                                              \
        });                                                                                                \
    }

#define DEINTERLEAVE_QKVZ(WIDTH)                                                                              \
    extern "C" __global__ void __launch_bounds__(ROWWISE_THREADS) deinterleave_qkvz_w##WIDTH(                 \
        const bf16* __restrict__ qkvz, /* [M, key_heads * (2 key_dim + 2 group_values)], rows stride apart */ \
        bf16* __restrict__ qkv,        /* [M, key_heads * (2 key_dim + group_values)] */                      \
        bf16* __restrict__ z,          /* [M, key_heads * group_values] */                                    \
        long long stride, int key_heads, int key_dim, int group_values, int blocks_per_row) {                 \
        pdl_launch_dependents();                                                                              \
        pdl_wait();                                                                                           \
        const int key = key_dim / WIDTH, value = group_values / WIDTH, group = 2 * (key + value);             \
        const size_t keys = (size_t)key_heads * key_dim, values = (size_t)key_heads * group_values;           \
        const long long columns = 2 * (long long)(keys + values);                                             \
        for_each_vector<WIDTH>(columns, blocks_per_row, [&](auto width, size_t row, size_t vec) {             \
            if constexpr (decltype(width)::value == WIDTH) { /* whole vectors only: no remainder */           \
                const int head = (int)vec / group;                                                            \
                int at = (int)vec - head * group;                                                             \
                bf16* to = qkv + row * (2 * keys + values);                                                   \
                int part = key;                                                                               \
                if (at >= 2 * key + value) {                                                                  \
                    to = z + row * values, at -= 2 * key + value, part = value;                               \
                } else if (at >= 2 * key) {                                                                   \
                    to += 2 * keys, at -= 2 * key, part = value;                                              \
                } else if (at >= key) {                                                                       \
                    to += keys, at -= key;                                                                    \
                }                                                                                             \
                store_raw<WIDTH>(to, head * part + at, load_raw<WIDTH>(qkvz + row * stride, vec));            \
            }                                                                                                 \
        });                                                                                                   \
    }

DEINTERLEAVE_QG(1)
DEINTERLEAVE_QG(8)
DEINTERLEAVE_QKVZ(1)
DEINTERLEAVE_QKVZ(8)
