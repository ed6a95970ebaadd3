// RMS norms of BF16 rows: plain, with a residual that x is added to first, and gated.
//
//   rms_norm            out = x * r * (weight_offset + weight),              r = 1 / sqrt(mean(x^2) + eps)
//   rms_norm_residual   residual = BF16(residual + x), out = norm(residual)
//   rms_norm_gated      out = x * r * weight * silu(gate),                   weight FP32 or BF16
//
// One row for a warp up to H = 1024 (heads: many short rows), for a block of 256 threads above. A lane takes vectors of
// 8 values if H is a multiple of 8, else single ones; the first KEPT of them stay in registers between the sum and the
// result, further ones are read again (H > 8192). Weights are read before the launch waits for the one before it.
//
// Numerics: FP32 inside, one rounding to BF16 (two with a residual, the first where it is stored); root and quotients
// err by 2 units in the last place. A lane sums its own
// values in rising order, then lanes by halving, then warps in rising order: the order depends on H only, never on M.
//
// sm_80 and newer. Launched by launch.py.
#include "bf16.cuh"
#include "launch.cuh"
#include "reduce.cuh"

constexpr int KEPT = 4;
constexpr int warp = 32, block = 256;  // lanes of a row; entry points carry the names
constexpr int ROWS_A_BLOCK = 4;  // of a warp each

// --- weights of either type ---

template <int WIDTH>
__device__ __forceinline__ Raw<WIDTH> load_weight(const bf16* weight, int piece) {
    return load_raw<WIDTH>(weight, piece);
}
template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> load_weight(const float* weight, int piece) {
    Values<WIDTH> v;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v.at[i] = weight[(size_t)piece * WIDTH + i];
    return v;
}

template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> widen(const Values<WIDTH>& v) {
    return v;
}

// --- the forms: what is fetched, which value of it the norm is of, and what becomes of that ---

template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> scaled(Raw<WIDTH> value, float r, const Values<WIDTH>& w, float offset) {
    Values<WIDTH> v = widen(value);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v.at[i] = v.at[i] * r * (offset + w.at[i]);
    return v;
}

struct Plain {
    const bf16 *x, *weight;
    bf16* out;
    float weight_offset;

    template <int WIDTH>
    struct Fetched {
        Raw<WIDTH> value;
    };
    template <int WIDTH>
    __device__ __forceinline__ Fetched<WIDTH> fetch(int piece) const { return {load_raw<WIDTH>(x, piece)}; }
    template <int WIDTH>
    __device__ __forceinline__ Fetched<WIDTH> again(int piece) const { return fetch<WIDTH>(piece); }
    template <int WIDTH>
    __device__ __forceinline__ void take(int piece, Fetched<WIDTH>& fetched) const {}
    template <int WIDTH>
    __device__ __forceinline__ void write(int piece, const Fetched<WIDTH>& f, float r, const Values<WIDTH>& w) const {
        store<WIDTH>(out, piece, scaled(f.value, r, w, weight_offset));
    }
};

struct Residual {
    const bf16 *x, *weight;
    bf16 *residual, *out;
    float weight_offset;

    template <int WIDTH>
    struct Fetched {
        Raw<WIDTH> value, added;
    };
    template <int WIDTH>
    __device__ __forceinline__ Fetched<WIDTH> fetch(int piece) const {
        return {load_raw<WIDTH>(residual, piece), load_raw<WIDTH>(x, piece)};
    }
    template <int WIDTH>  // by the thread that stored it
    __device__ __forceinline__ Fetched<WIDTH> again(int piece) const { return {load_raw<WIDTH>(residual, piece), {}}; }
    template <int WIDTH>
    __device__ __forceinline__ void take(int piece, Fetched<WIDTH>& fetched) const {
        Values<WIDTH> v = widen(fetched.value);
        const Values<WIDTH> added = widen(fetched.added);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) v.at[i] += added.at[i];
        fetched.value = narrow(v);
        store_raw<WIDTH>(residual, piece, fetched.value);
    }
    template <int WIDTH>
    __device__ __forceinline__ void write(int piece, const Fetched<WIDTH>& f, float r, const Values<WIDTH>& w) const {
        store<WIDTH>(out, piece, scaled(f.value, r, w, weight_offset));
    }
};

template <class Weight>
struct Gated {
    const bf16 *x, *gate;
    const Weight* weight;
    bf16* out;

    template <int WIDTH>
    struct Fetched {
        Raw<WIDTH> value, gate;
    };
    template <int WIDTH>
    __device__ __forceinline__ Fetched<WIDTH> fetch(int piece) const {
        return {load_raw<WIDTH>(x, piece), load_raw<WIDTH>(gate, piece)};
    }
    template <int WIDTH>
    __device__ __forceinline__ Fetched<WIDTH> again(int piece) const { return fetch<WIDTH>(piece); }
    template <int WIDTH>
    __device__ __forceinline__ void take(int piece, Fetched<WIDTH>& fetched) const {}
    template <int WIDTH>
    __device__ __forceinline__ void write(int piece, const Fetched<WIDTH>& f, float r, const Values<WIDTH>& w) const {
        Values<WIDTH> v = scaled(f.value, r, w, 0.0f);
        const Values<WIDTH> g = widen(f.gate);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) v.at[i] *= g.at[i] * sigmoid(g.at[i]);
        store<WIDTH>(out, piece, v);
    }
};

// --- one row ---

template <int LANES>
__device__ __forceinline__ float sum_over_lanes(float value) {
    if constexpr (LANES == warp) {
        return warp_sum(value);
    } else {
        __shared__ float partial[LANES / warp];
        return block_sum(value, partial);
    }
}

template <int WIDTH>
__device__ __forceinline__ float add_squares(const Values<WIDTH>& v, float sum) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum = fmaf(v.at[i], v.at[i], sum);
    return sum;
}

// ``exists`` is false for a warp without a row: it takes part in nothing but the shuffles.
template <int LANES, int WIDTH, class Form>
__device__ __forceinline__ void norm_row(const Form& form, bool exists, int H, float eps) {
    const int lane = threadIdx.x % LANES, pieces = exists ? H / WIDTH : 0;

    // Stage 1: weights, then all values of the row, and the sum of their squares.
    decltype(load_weight<WIDTH>(form.weight, 0)) weights[KEPT];
    typename Form::template Fetched<WIDTH> kept[KEPT];
    allow_next_launch();
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (lane + i * LANES < pieces) weights[i] = load_weight<WIDTH>(form.weight, lane + i * LANES);
    wait_for_previous_launch();
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (lane + i * LANES < pieces) kept[i] = form.template fetch<WIDTH>(lane + i * LANES);
    float sum = 0.0f;
    auto take = [&](int piece, auto& fetched) {
        form.template take<WIDTH>(piece, fetched);
        sum = add_squares(widen(fetched.value), sum);
    };
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (lane + i * LANES < pieces) take(lane + i * LANES, kept[i]);
    for (int piece = lane + KEPT * LANES; piece < pieces; piece += LANES) {
        auto fetched = form.template fetch<WIDTH>(piece);
        take(piece, fetched);
    }

    // Stage 2: over lanes.
    const float r = rsqrtf(__fdividef(sum_over_lanes<LANES>(sum), H) + eps);

    // Stage 3: results.
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (lane + i * LANES < pieces) form.template write<WIDTH>(lane + i * LANES, kept[i], r, widen(weights[i]));
    for (int piece = lane + KEPT * LANES; piece < pieces; piece += LANES)
        form.template write<WIDTH>(piece, form.template again<WIDTH>(piece), r,
                                   widen(load_weight<WIDTH>(form.weight, piece)));
}

#define BOUNDS(LANES) __launch_bounds__(LANES == warp ? ROWS_A_BLOCK * warp : LANES, LANES == warp ? 4 : 2)

template <int LANES>
__device__ __forceinline__ size_t row_of_thread() {
    return LANES == warp ? (size_t)blockIdx.x * ROWS_A_BLOCK + threadIdx.x / warp : blockIdx.x;
}

#define RMS_NORM(LANES, WIDTH)                                                                                   \
    extern "C" __global__ void BOUNDS(LANES) rms_norm_##LANES##_w##WIDTH(                                        \
        const bf16* __restrict__ x,      /* [M, H] */                                                            \
        const bf16* __restrict__ weight, /* [H] */                                                               \
        bf16* __restrict__ out,          /* [M, H] */                                                            \
        float eps, float weight_offset, int M, int H) {                                                          \
        const size_t row = row_of_thread<LANES>();                                                               \
        norm_row<LANES, WIDTH>(Plain{x + row * H, weight, out + row * H, weight_offset}, row < M, H, eps);       \
    }

#define RMS_NORM_RESIDUAL(LANES, WIDTH)                                                                          \
    extern "C" __global__ void BOUNDS(LANES) rms_norm_residual_##LANES##_w##WIDTH(                               \
        const bf16* __restrict__ x,      /* [M, H] */                                                            \
        bf16* __restrict__ residual,     /* [M, H], in and out */                                                \
        const bf16* __restrict__ weight, /* [H] */                                                               \
        bf16* __restrict__ out,          /* [M, H] */                                                            \
        float eps, float weight_offset, int M, int H) {                                                          \
        const size_t row = row_of_thread<LANES>(), at = row * H;                                                 \
        norm_row<LANES, WIDTH>(Residual{x + at, weight, residual + at, out + at, weight_offset}, row < M, H, eps); \
    }

#define RMS_NORM_GATED(LANES, WIDTH, WEIGHT, NAME)                                                               \
    extern "C" __global__ void BOUNDS(LANES) rms_norm_gated_##NAME##_##LANES##_w##WIDTH(                         \
        const bf16* __restrict__ x,        /* [M, H] */                                                          \
        const bf16* __restrict__ gate,     /* [M, H] */                                                          \
        const WEIGHT* __restrict__ weight, /* [H] */                                                             \
        bf16* __restrict__ out,            /* [M, H] */                                                          \
        float eps, int M, int H) {                                                                               \
        const size_t row = row_of_thread<LANES>(), at = row * H;                                                 \
        norm_row<LANES, WIDTH>(Gated<WEIGHT>{x + at, gate + at, weight, out + at}, row < M, H, eps);             \
    }

#define FORMS(LANES, WIDTH)                                                                                      \
    RMS_NORM(LANES, WIDTH)                                                                                       \
    RMS_NORM_RESIDUAL(LANES, WIDTH)                                                                              \
    RMS_NORM_GATED(LANES, WIDTH, float, f32)                                                                     \
    RMS_NORM_GATED(LANES, WIDTH, bf16, bf16)

FORMS(warp, 1)
FORMS(warp, 8)
FORMS(block, 1)
FORMS(block, 8)
