// RMS norms of one BF16 row, and what other kernels that end in a norm need to make the same bits.
//
// One row for a warp up to H = 1024 (heads: many short rows), for a block of 256 threads above. A lane takes vectors of
// 8 values if H is a multiple of 8, else single ones; the first vectors of a warp's lane, one or four, stay in registers
// between the sum and the result, of other forms a lane's first; all others are read again. Or, up to 8192, a lane has one
// vector, and the row as many warps as it needs, in one block or in a cluster of four; or two, summed as if they were of two
// lanes. Weights are read before the launch waits for the one before it.
//
// Numerics: FP32 inside, one rounding to BF16 (two with a residual, the first where it is stored); root and quotients
// err by 2 units in the last place. A lane sums its own values in rising order, then lanes by halving, then warps in
// rising order or, one vector a lane, by halving: the order depends on H only, never on M.
#pragma once
#include "bf16.cuh"
#include "cluster.cuh"
#include "global_memory.cuh"
#include "mbarrier.cuh"
#include "pdl.cuh"
#include "reduce.cuh"
#include "shared_memory.cuh"
#include "silu.cuh"

constexpr int KEPT = 4;
constexpr int warp = 32, block = 256;        // lanes of a row; entry points carry the names
constexpr int WARP_WIDEST = KEPT * 8 * warp;  // up to here a warp has a row; norm/launch.py says the same

// --- weights of either type ---

template <int WIDTH>
__device__ __forceinline__ Raw<WIDTH> load_weight(const bf16* weight, int piece) {
    if constexpr (WIDTH == 8) return {load_now(reinterpret_cast<const uint4*>(weight) + piece)};
    else return load_raw<WIDTH>(weight, piece);
}
template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> load_weight(const float* weight, int piece) {
    Values<WIDTH> v;
    if constexpr (WIDTH % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4) {
            const float4 part = load_now(reinterpret_cast<const float4*>(weight + (size_t)piece * WIDTH + i));
            v.at[i] = part.x, v.at[i + 1] = part.y, v.at[i + 2] = part.z, v.at[i + 3] = part.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) v.at[i] = weight[(size_t)piece * WIDTH + i];
    }
    return v;
}

template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> widen(const Values<WIDTH>& v) {
    return v;
}

// --- the forms: what is fetched, which value of it the norm is of, and what becomes of that ---

template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> scaled(Values<WIDTH> v, float r, const Values<WIDTH>& w, float offset) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v.at[i] = v.at[i] * r * (offset + w.at[i]);
    return v;
}

// What the values of a gated norm are multiplied by.
template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> silu(Values<WIDTH> g) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) g.at[i] = silu(g.at[i]);
    return g;
}

template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> gated(Values<WIDTH> v, float r, const Values<WIDTH>& w, const Values<WIDTH>& by) {
    v = scaled(v, r, w, 0.0f);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v.at[i] *= by.at[i];
    return v;
}

struct Plain {
    static constexpr int VECTORS = KEPT;  // of a warp's lane that stay in registers
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
        store<WIDTH>(out, piece, scaled(widen(f.value), r, w, weight_offset));
    }
};

struct Residual {
    static constexpr int VECTORS = KEPT;
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
        store<WIDTH>(out, piece, scaled(widen(f.value), r, w, weight_offset));
    }
};

template <class Weight>
struct Gated {
    static constexpr int VECTORS = 1;  // heads are short
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
        store<WIDTH>(out, piece, gated(widen(f.value), r, w, silu(widen(f.gate))));
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

// The reciprocal of a row's root mean square, of the sum of its squares.
__device__ __forceinline__ float reciprocal_root(float squares, int H, float eps) {
    return rsqrtf(__fdividef(squares, H) + eps);
}

// ``exists`` is false for a warp without a row: it takes part in nothing but the shuffles.
template <int LANES, int WIDTH, class Form>
__device__ __forceinline__ void norm_row(const Form& form, bool exists, int H, float eps) {
    // Long rows and rows of single values are rare: of those only the first is kept, for a quarter of the code.
    constexpr int COUNT = LANES == warp && WIDTH > 1 ? Form::VECTORS : 1;
    const int lane = threadIdx.x % LANES, pieces = exists ? H / WIDTH : 0;

    // Stage 1: weights, then all values of the row, and the sum of their squares.
    decltype(load_weight<WIDTH>(form.weight, 0)) weights[COUNT];
    typename Form::template Fetched<WIDTH> kept[COUNT];
    pdl_launch_dependents();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (lane + i * LANES < pieces) weights[i] = load_weight<WIDTH>(form.weight, lane + i * LANES);
    pdl_wait();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (lane + i * LANES < pieces) kept[i] = form.template fetch<WIDTH>(lane + i * LANES);
    float sum = 0.0f;
    auto take = [&](int piece, auto& fetched) {
        form.template take<WIDTH>(piece, fetched);
        sum = add_squares(widen(fetched.value), sum);
    };
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (lane + i * LANES < pieces) take(lane + i * LANES, kept[i]);
#pragma unroll 1
    for (int piece = lane + COUNT * LANES; piece < pieces; piece += LANES) {
        auto fetched = form.template fetch<WIDTH>(piece);
        take(piece, fetched);
    }

    // Stage 2: over lanes.
    const float r = reciprocal_root(sum_over_lanes<LANES>(sum), H, eps);

    // Stage 3: results.
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (lane + i * LANES < pieces) form.template write<WIDTH>(lane + i * LANES, kept[i], r, widen(weights[i]));
#pragma unroll 1
    for (int piece = lane + COUNT * LANES; piece < pieces; piece += LANES)
        form.template write<WIDTH>(piece, form.template again<WIDTH>(piece), r,
                                   widen(load_weight<WIDTH>(form.weight, piece)));
}

// --- one row of a vector a lane, or of several that are summed as if each were a lane's own ---

constexpr int MOST_WARPS = 32;  // of vectors of a row

// H is a multiple of 8, and RANKS blocks have VECTORS times a thread for each vector.
template <int RANKS, int VECTORS, class Form>
__device__ __forceinline__ void norm_wide_row(const Form& form, int H, float eps) {
    __shared__ float4 sums[MOST_WARPS / 4];
    __shared__ Mbarrier mbarrier;
    const int lane = threadIdx.x % warp, first = blockIdx.x % RANKS * VECTORS * blockDim.x + threadIdx.x;
    const int warps = RANKS * VECTORS * blockDim.x / warp;
    auto piece = [&](int j) { return first + j * (int)blockDim.x; };
    auto exists = [&](int j) { return piece(j) < H / 8; };

    // Stage 1: the weights, then the values and the sums of their squares.
    pdl_launch_dependents();
    if ((int)threadIdx.x < MOST_WARPS - warps) reinterpret_cast<float*>(sums)[warps + threadIdx.x] = 0.0f;
    if constexpr (RANKS > 1) {
        if (threadIdx.x == 0) mbarrier_init_expect_tx(&mbarrier, warps * sizeof(float));
        cluster_arrive_relaxed();
    }
    decltype(load_weight<8>(form.weight, 0)) weights[VECTORS] = {};
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
        if (exists(j)) weights[j] = load_weight<8>(form.weight, piece(j));
    pdl_wait();
    typename Form::template Fetched<8> fetched[VECTORS] = {};
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
        if (exists(j)) fetched[j] = form.template fetch<8>(piece(j));
    if constexpr (RANKS > 1) cluster_wait();
    float own[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        if (exists(j)) form.template take<8>(piece(j), fetched[j]);
        own[j] = warp_sum(add_squares(widen(fetched[j].value), 0.0f));
    }

    // Stage 2: over warps, those of all blocks.
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        float* const place = reinterpret_cast<float*>(sums) + piece(j) / warp;
        if constexpr (RANKS > 1) {
            if (lane < RANKS) dsmem_store_async(place, own[j], &mbarrier, lane);
        } else if (lane == 0) {
            *place = own[j];
        }
    }
    __syncthreads();
    if constexpr (RANKS > 1) dsmem_wait(&mbarrier);
    float4 parts[MOST_WARPS / 4];
#pragma unroll
    for (int i = 0; i < MOST_WARPS / 4; ++i) parts[i] = sums[i];
#pragma unroll
    for (int step = 1; step < MOST_WARPS / 4; step *= 2)
#pragma unroll
        for (int i = 0; i < MOST_WARPS / 4; i += 2 * step) {
            parts[i].x += parts[i + step].x, parts[i].y += parts[i + step].y;
            parts[i].z += parts[i + step].z, parts[i].w += parts[i + step].w;
        }
    const float r = reciprocal_root((parts[0].x + parts[0].y) + (parts[0].z + parts[0].w), H, eps);

    // Stage 3: results.
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
        if (exists(j)) form.template write<8>(piece(j), fetched[j], r, widen(weights[j]));
}
