// What stands between the projections of attention and its cache, in one launch: RMS norms of queries and keys, rotary
// positions, and new rows of keys and values to their places. The bits are those of rms_norm, rope_forward and
// kv_cache_append: a norm is rounded to BF16 before its pairs turn.
//
//   q = turn(BF16(norm(q) * (weight_offset + q_weight)))       k_cache[slots] = turn(BF16(norm(k) * ...)), v_cache[slots] = v
//
// A warp a head, of which 8 are a block, and one warp more that makes the row's cosines and sines meanwhile. A normalised
// row stands in shared memory, where the other half of a pair is found. Values come from and go to memory in vectors of 8
// if D is a multiple of 8. A row with a negative position, which the contract refuses, is not turned; one with slot -1, or
// another one outside the cache, which the contract refuses, is not kept.
//
// Grid: rows * ceil((Hq + Hk) / 8). sm_80 and newer. Launched by launch.py.
#include "bf16.cuh"
#include "rms_norm.cuh"
#include "rope.cuh"

constexpr int HEAD_WARPS = 8, THREADS = (HEAD_WARPS + 1) * warp;
constexpr int MOST_VALUES = WARP_WIDEST;  // of a head

struct Shared {
    float cosine[MOST_VALUES / 2], sine[MOST_VALUES / 2];
    alignas(16) bf16 normalised[HEAD_WARPS][MOST_VALUES];
};

__device__ __forceinline__ void make_angles(Shared& shared, const int* position, int half, double log2_step) {
    const int lane = threadIdx.x % warp;
    const double first = turns_a_position(lane, log2_step, NO_RAMP);
    wait_for_previous_launch();
    const int at = *position;
    for (int i = lane; i < half; i += warp)
        cosine_and_sine(at, i == lane ? first : turns_a_position(i, log2_step, NO_RAMP), NO_RAMP.scale, shared.cosine[i],
                        shared.sine[i]);
}

// One head: where it stands, what it is multiplied by, and where it goes (null: nowhere).
struct Head {
    const bf16 *x, *weight;
    bf16* out;
};

template <int WIDTH>
struct Pieces {
    Raw<WIDTH> weights[KEPT], values[KEPT], copied[KEPT];

    __device__ __forceinline__ static void load(Raw<WIDTH> (&kept)[KEPT], const bf16* from, int pieces) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i)
            if (threadIdx.x % warp + i * warp < pieces) kept[i] = load_raw<WIDTH>(from, threadIdx.x % warp + i * warp);
    }
};

// Norms the head into ``normalised``. Pieces beyond KEPT a lane are read again.
template <int WIDTH>
__device__ __forceinline__ void normalise(bf16* normalised, const Head& head, Pieces<WIDTH>& kept, int pieces, int D,
                                          float eps, float weight_offset) {
    const int lane = threadIdx.x % warp;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (lane + i * warp < pieces) sum = add_squares(widen(kept.values[i]), sum);
    for (int piece = lane + KEPT * warp; piece < pieces; piece += warp) sum = add_squares(load<WIDTH>(head.x, piece), sum);
    const float r = reciprocal_root(warp_sum(sum), D, eps);
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (lane + i * warp < pieces)
            store<WIDTH>(normalised, lane + i * warp,
                         scaled(widen(kept.values[i]), r, widen(kept.weights[i]), weight_offset));
    for (int piece = lane + KEPT * warp; piece < pieces; piece += warp)
        store<WIDTH>(normalised, piece,
                     scaled(load<WIDTH>(head.x, piece), r, load<WIDTH>(head.weight, piece), weight_offset));
}

// Element i of a head, turned with its other half.
__device__ __forceinline__ float turned(const Shared& shared, const bf16* normalised, int i, int half) {
    const int pair = i < half ? i : i - half;
    const float low = __bfloat162float(normalised[pair]), high = __bfloat162float(normalised[pair + half]);
    const float cosine = shared.cosine[pair], sine = shared.sine[pair];
    return i < half ? turned_low(low, high, cosine, sine) : turned_high(low, high, cosine, sine);
}

// Writes the head, its pairs turned.
template <int WIDTH>
__device__ __forceinline__ void write_turned(const Shared& shared, const bf16* normalised, bf16* out, int pieces, int half) {
    for (int piece = threadIdx.x % warp; piece < pieces; piece += warp) {
        Values<WIDTH> values = load<WIDTH>(normalised, piece);
        const int first = piece * WIDTH;
        if (first < 2 * half)
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (first + i < 2 * half) values.at[i] = turned(shared, normalised, first + i, half);
        store<WIDTH>(out, piece, values);
    }
}

// Copies a head of v, whose first pieces are here.
template <int WIDTH>
__device__ __forceinline__ void copy(bf16* to, const bf16* from, const Raw<WIDTH> (&kept)[KEPT], int pieces) {
    const int lane = threadIdx.x % warp;
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (lane + i * warp < pieces) store_raw<WIDTH>(to, lane + i * warp, kept[i]);
    for (int piece = lane + KEPT * warp; piece < pieces; piece += warp)
        store_raw<WIDTH>(to, piece, load_raw<WIDTH>(from, piece));
}

#define QK_NORM_ROPE_APPEND(WIDTH)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) qk_norm_rope_append_w##WIDTH(                          \
        bf16* q,                           /* [M, Hq, D], in and out */                                          \
        const bf16* k,                     /* [M, Hk, D] */                                                      \
        const bf16* v,                     /* [M, Hk, D] */                                                      \
        const bf16* __restrict__ q_weight, /* [D] */                                                             \
        const bf16* __restrict__ k_weight, /* [D] */                                                             \
        const int* positions,              /* [M] */                                                             \
        const int* slots,                  /* [M] */                                                             \
        bf16* __restrict__ k_cache,        /* [P * B, Hk, D] */                                                  \
        bf16* __restrict__ v_cache,        /* [P * B, Hk, D] */                                                  \
        float eps, float weight_offset, long long places, int Hq, int Hk, int D, int half, double log2_step) {   \
        __shared__ Shared shared;                                                                                \
        allow_next_launch();                                                                                     \
        const int groups = (Hq + Hk + HEAD_WARPS - 1) / HEAD_WARPS, of_block = threadIdx.x / warp;               \
        const size_t row = blockIdx.x / groups;                                                                  \
        if (of_block == HEAD_WARPS) {                                                                            \
            make_angles(shared, positions + row, half, log2_step);                                               \
            __syncthreads();                                                                                     \
            return;                                                                                              \
        }                                                                                                        \
        /* Stage 1: the norm of this warp's head. */                                                             \
        const int index = blockIdx.x % groups * HEAD_WARPS + of_block, pieces = index < Hq + Hk ? D / WIDTH : 0; \
        const bool is_key = index >= Hq;                                                                         \
        bf16* const own = q + (row * Hq + index) * D;                                                            \
        const size_t of_key = (row * Hk + index - Hq) * D;                                                       \
        Head head{is_key ? k + of_key : own, is_key ? k_weight : q_weight, is_key ? nullptr : own};              \
        Pieces<WIDTH> kept;                                                                                      \
        kept.load(kept.weights, head.weight, pieces);                                                            \
        wait_for_previous_launch();                                                                              \
        const int position = positions[row], slot = slots[row];                                                  \
        kept.load(kept.values, head.x, pieces);                                                                  \
        if (is_key) kept.load(kept.copied, v + of_key, pieces);                                                  \
        if (is_key && slot >= 0 && slot < places) {                                                              \
            const size_t to = ((size_t)slot * Hk + index - Hq) * D;                                              \
            head.out = k_cache + to;                                                                             \
            copy<WIDTH>(v_cache + to, v + of_key, kept.copied, pieces);                                          \
        }                                                                                                        \
        bf16* const normalised = shared.normalised[of_block];                                                    \
        normalise<WIDTH>(normalised, head, kept, pieces, D, eps, weight_offset);                                 \
        __syncthreads();                                                                                         \
        /* Stage 2: pairs turn. */                                                                               \
        if (head.out != nullptr) write_turned<WIDTH>(shared, normalised, head.out, pieces, position < 0 ? 0 : half); \
    }

QK_NORM_ROPE_APPEND(1)
QK_NORM_ROPE_APPEND(8)
