// Rotary position embedding of queries [M, Hq, D] and keys [M, Hk, D] in place, BF16: plain, interleaved mrope, YaRN.
//
// The first 2 * half elements of a head are rotated. Element i of their first half forms a pair with element i of the
// second half. The angle is position * theta^(-i / half). With mrope, the position is that of the height if i % 3 == 1
// and i < 3 section_h, that of the width if i % 3 == 2 and i < 3 section_w, else that of the time. YaRN multiplies the
// frequency by 1 - ramp + ramp * stretch, ramp = clamp((i - ramp_low) * ramp_slope, 0, 1), and cosine and sine by
// ``scale``. For the other variants the launcher passes neutral values. Sources: Su et al., RoFormer (2021), halves as
// in GPT-NeoX; the interleaved layout of Qwen3-VL; Peng et al., YaRN (2023).
//
// Numerics: frequencies in FP64, angles in 2^-64 turns, so that their reduction is exact. Cosine, sine, products and
// sum in FP32, one rounding to BF16. The contract rejects negative positions. Such a row stays as it is.
//
// One block a row computes the cosines and sines once for all heads. Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"
#include "rope.cuh"

constexpr int THREADS = 256;  // also the frequencies of a round
constexpr int MAX_AXES = 3;

// Not movable, so that they are in flight while angles are computed.
__device__ __forceinline__ Raw<8> load_now(const bf16* p, Raw<8>) {
    return {load_now(reinterpret_cast<const uint4*>(p))};
}
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

// A vector of a head, and its partner.
template <int WIDTH>
struct RotatedVectors {
    bf16 *low, *high;
    int first;  // of their frequencies
    Raw<WIDTH> a, b;

    __device__ __forceinline__ void load_from(bf16* low_, bf16* high_, int first_) {
        first = first_, low = low_ + first, high = high_ + first;
        a = load_now(low, Raw<WIDTH>{}), b = load_now(high, Raw<WIDTH>{});
    }
    __device__ __forceinline__ void rotate(const float* cosine, const float* sine) const {
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

#define ROPE(WIDTH)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_w##WIDTH(                                             \
        bf16* q,              /* [M, Hq, D], in and out; not restrict: the previous kernel may write all */          \
        bf16* k,              /* [M, Hk, D], in and out */                                                           \
        const int* positions, /* [axes, M] */                                                                        \
        int M, int Hq, int Hk, int D, int half, int axes, int section_h, int section_w, double log2_step,            \
        double ramp_low, double ramp_slope, double stretch, double scale) {                                          \
        __shared__ __align__(16) float cosine[THREADS], sine[THREADS];                                               \
        pdl_launch_dependents();                                                                                     \
        const YarnRamp ramp{ramp_low, ramp_slope, stretch, scale};                                                   \
        const size_t row = blockIdx.x;                                                                               \
        for (int begin = 0; begin < half; begin += THREADS) {                                                        \
            /* With few frequencies, warps without a vector compute the angles. */                                   \
            const int count = min(half - begin, THREADS), vector = threadIdx.x ^ THREADS / 2, i = begin + vector;    \
            /* Stage 1: loads, then frequencies while they are in flight, then angles. */                            \
            const int vecs = count / WIDTH, all = (Hq + Hk) * vecs;                                                  \
            auto fetch = [&](RotatedVectors<WIDTH>& into, int at) {                                                  \
                /* at / vecs: the quotient is exact below 2^20, which launch.py checks. */                           \
                const int head = (int)__fdividef((float)at + 0.5f, (float)vecs), vec = at - head * vecs;             \
                bf16* values = (head < Hq ? q + (row * Hq + head) * D : k + (row * Hk + head - Hq) * D) + begin;     \
                into.load_from(values, values + half, vec * WIDTH);                                                  \
            };                                                                                                       \
            RotatedVectors<WIDTH> now;                                                                               \
            pdl_wait();                                                                                              \
            int places[MAX_AXES];                                                                                    \
            _Pragma("unroll")                                                                                        \
            for (int a = 0; a < MAX_AXES; ++a) places[a] = a < axes ? load_now(positions + (size_t)a * M + row) : 0; \
            if ((int)threadIdx.x < all) fetch(now, threadIdx.x);                                                     \
            if (vector < count) {                                                                                    \
                const double turns = turns_per_token(i, log2_step, ramp);                                            \
                const bool is_height = i % 3 == 1 && i < 3 * section_h, is_width = i % 3 == 2 && i < 3 * section_w;  \
                const int place = is_height ? places[1] : is_width ? places[2] : places[0];                          \
                cosine_and_sine(place, turns, ramp.scale, cosine[vector], sine[vector]);                             \
            }                                                                                                        \
            const bool is_wrong = (places[0] | places[1] | places[2]) < 0;                                           \
            __syncthreads();                                                                                         \
            /* Stage 2: all heads. */                                                                                \
            for (int at = threadIdx.x; !is_wrong && at < all; at += THREADS) {                                       \
                now.rotate(cosine, sine);                                                                            \
                if (at + THREADS < all) fetch(now, at + THREADS);                                                    \
            }                                                                                                        \
            __syncthreads(); /* before the next round's angles */                                                    \
        }                                                                                                            \
    }

ROPE(1)
ROPE(8)
