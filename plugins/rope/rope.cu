// Rotary position embedding of queries [M, Hq, D] and keys [M, Hk, D] in place, BF16: plain, interleaved mrope, YaRN.
//
// Element i of the first half of the 2 * half rotated ones turns with element i of the second half, by the angle
// position * theta^(-i / half); the other D - 2 * half stay. Which position: of height where i % 3 == 1 and
// i < 3 section_h, of width where i % 3 == 2 and i < 3 section_w, else of time. YaRN multiplies the frequency by
// 1 - ramp + ramp * stretch, ramp = clamp((i - ramp_low) * ramp_slope, 0, 1), and cosine and sine by ``scale``; the
// launcher passes the values that change nothing for the other forms. Sources: Su et al., RoFormer (2021), halves as in
// GPT-NeoX; the interleaved layout of Qwen3-VL; Peng et al., YaRN (2023).
//
// Numerics: frequencies in FP64, angles in 2^-64ths of a turn, so that reducing them is exact; cosine and sine, products
// and sum in FP32; one rounding to BF16. A row with a negative position, which the contract refuses, stays as it is.
//
// One block a row: it makes the row's cosines and sines once for all heads. sm_80 and newer. Launched by launch.py.
#include "bf16.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"
#include "rope.cuh"

constexpr int THREADS = 256;  // and frequencies a round
constexpr int MAX_AXES = 3;

// Where they stand, so that they are on their way while angles are made.
__device__ __forceinline__ Raw<8> load_now(const bf16* p, Raw<8>) { return {load_now(reinterpret_cast<const uint4*>(p))}; }
__device__ __forceinline__ Raw<1> load_now(const bf16* p, Raw<1>) { return {*p}; }

template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> load_shared(const float* p) {
    Values<WIDTH> v;
    if constexpr (WIDTH == 8) {
        const float4 low = *reinterpret_cast<const float4*>(p), high = *reinterpret_cast<const float4*>(p + 4);
        v = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    } else {
        v.at[0] = *p;
    }
    return v;
}

// A piece of a head, and the one that it turns with.
template <int WIDTH>
struct Pieces {
    bf16 *low, *high;
    int first;  // of their frequencies
    Raw<WIDTH> a, b;

    __device__ __forceinline__ void load_from(bf16* low_, bf16* high_, int first_) {
        first = first_, low = low_ + first, high = high_ + first;
        a = load_now(low, Raw<WIDTH>{}), b = load_now(high, Raw<WIDTH>{});
    }
    __device__ __forceinline__ void turn(const float* cosine, const float* sine) const {
        const Values<WIDTH> c = load_shared<WIDTH>(cosine + first), s = load_shared<WIDTH>(sine + first);
        Values<WIDTH> x = widen(a), y = widen(b);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float low = x.at[i], high = y.at[i];
            x.at[i] = rotated_low(low, high, c.at[i], s.at[i]);
            y.at[i] = rotated_high(low, high, c.at[i], s.at[i]);
        }
        store<WIDTH>(low, 0, x);
        store<WIDTH>(high, 0, y);
    }
};

#define ROPE(WIDTH)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_w##WIDTH(                                         \
        bf16* q,              /* [M, Hq, D], in and out; not restrict: the launch before may write all */        \
        bf16* k,              /* [M, Hk, D], in and out */                                                       \
        const int* positions, /* [axes, M] */                                                                    \
        int M, int Hq, int Hk, int D, int half, int axes, int section_h, int section_w, double log2_step,        \
        double ramp_low, double ramp_slope, double stretch, double scale) {                                      \
        __shared__ __align__(16) float cosine[THREADS], sine[THREADS];                                           \
        pdl_launch_dependents();                                                                                     \
        const YarnRamp ramp{ramp_low, ramp_slope, stretch, scale};                                                   \
        const size_t row = blockIdx.x;                                                                           \
        for (int begin = 0; begin < half; begin += THREADS) {                                                    \
            /* Of few frequencies, warps that have no piece make the angles. */                                  \
            const int count = min(half - begin, THREADS), own = threadIdx.x ^ THREADS / 2, i = begin + own;      \
            /* Stage 1: what is read, then frequencies while it is on its way, then angles. */                   \
            const int pieces = count / WIDTH, all = (Hq + Hk) * pieces;                                          \
            auto fetch = [&](Pieces<WIDTH>& into, int at) {                                                      \
                /* As at / pieces: below 2^20, which launch.py sees to, a quotient this close is exact. */         \
                const int head = (int)__fdividef((float)at + 0.5f, (float)pieces), piece = at - head * pieces;   \
                bf16* values = (head < Hq ? q + (row * Hq + head) * D : k + (row * Hk + head - Hq) * D) + begin; \
                into.load_from(values, values + half, piece * WIDTH);                                            \
            };                                                                                                   \
            Pieces<WIDTH> now;                                                                                   \
            pdl_wait();                                                                          \
            int places[MAX_AXES];                                                                               \
            _Pragma("unroll") for (int a = 0; a < MAX_AXES; ++a)                                                \
                places[a] = a < axes ? load_now(positions + (size_t)a * M + row) : 0;                       \
            if ((int)threadIdx.x < all) fetch(now, threadIdx.x);                                                 \
            if (own < count) {                                                                                   \
                const double turns = turns_per_token(i, log2_step, ramp);                                       \
                const bool is_height = i % 3 == 1 && i < 3 * section_h, is_width = i % 3 == 2 && i < 3 * section_w; \
                const int place = is_height ? places[1] : is_width ? places[2] : places[0];                      \
                cosine_and_sine(place, turns, ramp.scale, cosine[own], sine[own]);                               \
            }                                                                                                    \
            const bool is_wrong = (places[0] | places[1] | places[2]) < 0;                                       \
            __syncthreads();                                                                                     \
            /* Stage 2: all heads. */                                                                            \
            for (int at = threadIdx.x; !is_wrong && at < all; at += THREADS) {                                   \
                now.turn(cosine, sine);                                                                          \
                if (at + THREADS < all) fetch(now, at + THREADS);                                                \
            }                                                                                                    \
            __syncthreads(); /* before the next round's angles */                                                \
        }                                                                                                        \
    }

ROPE(1)
ROPE(8)
