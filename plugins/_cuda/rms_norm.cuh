// RMS norm of one BF16 row, for the norm kernels and for kernels that end in a norm with the same bits.
//
// Two functions:
//   norm_row               a warp has a row of up to 1024 values (heads: many short rows), a block of 256 threads a
//                          longer one. The first vectors of a lane stay in registers between the sum and the result.
//                          The others are read again.
//   norm_row_in_registers  up to 8192 values: a lane has one vector, or two, which are summed as if two lanes had them.
//                          The row has as many warps as it needs, in one block or in a cluster of four.
//
// A vector is 8 values if H is a multiple of 8, else one. Weights are read before pdl_wait.
//
// Numerics: FP32 inside, one rounding to BF16. With a residual there are two: the first is that of the stored residual.
// Root and quotient have an error of 2 units in the last place. A lane sums its values in rising order, then lanes are
// summed pairwise, then warps in rising order, or pairwise in norm_row_in_registers. The order depends on H only, never
// on M.
#pragma once
#include "bf16.cuh"
#include "cluster.cuh"
#include "global_memory.cuh"
#include "mbarrier.cuh"
#include "pdl.cuh"
#include "reduce.cuh"
#include "shared_memory.cuh"
#include "silu.cuh"

constexpr int REGISTER_VECTORS = 4;
constexpr int warp = 32, block = 256;  // lanes of a row; they are part of the names of entry points
constexpr int MAX_WARP_ROW = REGISTER_VECTORS * 8 * warp;

// --- weights of both types ---

template <int WIDTH>
__device__ __forceinline__ Raw<WIDTH> load_weight(const bf16* weight, int vec) {
    if constexpr (WIDTH == 8) return {load_now(reinterpret_cast<const uint4*>(weight) + vec)};
    else return load_raw<WIDTH>(weight, vec);
}
template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> load_weight(const float* weight, int vec) {
    Values<WIDTH> v;
    if constexpr (WIDTH % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4) {
            const float4 part = load_now(reinterpret_cast<const float4*>(weight + (size_t)vec * WIDTH + i));
            v.at[i] = part.x, v.at[i + 1] = part.y, v.at[i + 2] = part.z, v.at[i + 3] = part.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) v.at[i] = weight[(size_t)vec * WIDTH + i];
    }
    return v;
}

template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> widen(const Values<WIDTH>& v) {
    return v;
}

// --- operations: how the values of a row are loaded, normalised and stored ---

template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> scaled(Values<WIDTH> v, float r, const Values<WIDTH>& w, float offset) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v.at[i] = v.at[i] * r * (offset + w.at[i]);
    return v;
}

// The factors of a gated norm.
template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> silu(Values<WIDTH> g) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) g.at[i] = silu(g.at[i]);
    return g;
}

template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> gated(Values<WIDTH> v, float r, const Values<WIDTH>& w,
                                               const Values<WIDTH>& by) {
    v = scaled(v, r, w, 0.0f);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v.at[i] *= by.at[i];
    return v;
}

struct Plain {
    static constexpr int VECTORS = REGISTER_VECTORS;  // in registers, of a lane of a warp
    const bf16 *x, *weight;
    bf16* out;
    float weight_offset;

    template <int WIDTH>
    struct Fetched {
        Raw<WIDTH> value;
    };
    template <int WIDTH>
    __device__ __forceinline__ Fetched<WIDTH> fetch(int vec) const {
        return {load_raw<WIDTH>(x, vec)};
    }
    template <int WIDTH>
    __device__ __forceinline__ Fetched<WIDTH> again(int vec) const {
        return fetch<WIDTH>(vec);
    }
    template <int WIDTH>
    __device__ __forceinline__ void take(int vec, Fetched<WIDTH>& fetched) const {}
    template <int WIDTH>
    __device__ __forceinline__ void write(int vec, const Fetched<WIDTH>& f, float r, const Values<WIDTH>& w) const {
        store<WIDTH>(out, vec, scaled(widen(f.value), r, w, weight_offset));
    }
};

struct Residual {
    static constexpr int VECTORS = REGISTER_VECTORS;
    const bf16 *x, *weight;
    bf16 *residual, *out;
    float weight_offset;

    template <int WIDTH>
    struct Fetched {
        Raw<WIDTH> value, added;
    };
    template <int WIDTH>
    __device__ __forceinline__ Fetched<WIDTH> fetch(int vec) const {
        return {load_raw<WIDTH>(residual, vec), load_raw<WIDTH>(x, vec)};
    }
    template <int WIDTH>  // by the thread that stored the residual
    __device__ __forceinline__ Fetched<WIDTH> again(int vec) const {
        return {load_raw<WIDTH>(residual, vec), {}};
    }
    template <int WIDTH>
    __device__ __forceinline__ void take(int vec, Fetched<WIDTH>& fetched) const {
        Values<WIDTH> v = widen(fetched.value);
        const Values<WIDTH> added = widen(fetched.added);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) v.at[i] += added.at[i];
        fetched.value = narrow(v);
        store_raw<WIDTH>(residual, vec, fetched.value);
    }
    template <int WIDTH>
    __device__ __forceinline__ void write(int vec, const Fetched<WIDTH>& f, float r, const Values<WIDTH>& w) const {
        store<WIDTH>(out, vec, scaled(widen(f.value), r, w, weight_offset));
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
    __device__ __forceinline__ Fetched<WIDTH> fetch(int vec) const {
        return {load_raw<WIDTH>(x, vec), load_raw<WIDTH>(gate, vec)};
    }
    template <int WIDTH>
    __device__ __forceinline__ Fetched<WIDTH> again(int vec) const {
        return fetch<WIDTH>(vec);
    }
    template <int WIDTH>
    __device__ __forceinline__ void take(int vec, Fetched<WIDTH>& fetched) const {}
    template <int WIDTH>
    __device__ __forceinline__ void write(int vec, const Fetched<WIDTH>& f, float r, const Values<WIDTH>& w) const {
        store<WIDTH>(out, vec, gated(widen(f.value), r, w, silu(widen(f.gate))));
    }
};

// --- one row ---

template <int LANES>
__device__ __forceinline__ float sum_of_row(float value) {
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

// The reciprocal of a row's root mean square, from the sum of its squares.
__device__ __forceinline__ float reciprocal_root(float squares, int H, float eps) {
    return rsqrtf(__fdividef(squares, H) + eps);
}

// ``exists`` is false for a warp without a row: it takes part in the shuffles only.
template <int LANES, int WIDTH, class Op>
__device__ __forceinline__ void norm_row(const Op& op, bool exists, int H, float eps) {
    // Long rows and rows of single values are rare: only their first vector stays in registers, for a quarter of the
    // code.
    constexpr int COUNT = LANES == warp && WIDTH > 1 ? Op::VECTORS : 1;
    const int lane = threadIdx.x % LANES, vecs = exists ? H / WIDTH : 0;

    // Stage 1: the weights, then all values of the row and the sum of their squares.
    decltype(load_weight<WIDTH>(op.weight, 0)) weights[COUNT];
    typename Op::template Fetched<WIDTH> held[COUNT];
    pdl_launch_dependents();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (lane + i * LANES < vecs) weights[i] = load_weight<WIDTH>(op.weight, lane + i * LANES);
    pdl_wait();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (lane + i * LANES < vecs) held[i] = op.template fetch<WIDTH>(lane + i * LANES);
    float sum = 0.0f;
    auto take = [&](int vec, auto& fetched) {
        op.template take<WIDTH>(vec, fetched);
        sum = add_squares(widen(fetched.value), sum);
    };
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (lane + i * LANES < vecs) take(lane + i * LANES, held[i]);
#pragma unroll 1
    for (int vec = lane + COUNT * LANES; vec < vecs; vec += LANES) {
        auto fetched = op.template fetch<WIDTH>(vec);
        take(vec, fetched);
    }

    // Stage 2: the sum over lanes.
    const float r = reciprocal_root(sum_of_row<LANES>(sum), H, eps);

    // Stage 3: the results.
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (lane + i * LANES < vecs) op.template write<WIDTH>(lane + i * LANES, held[i], r, widen(weights[i]));
#pragma unroll 1
    for (int vec = lane + COUNT * LANES; vec < vecs; vec += LANES)
        op.template write<WIDTH>(vec, op.template again<WIDTH>(vec), r, widen(load_weight<WIDTH>(op.weight, vec)));
}

// --- one row in registers ---

constexpr int MAX_WARPS = 32;  // of vectors of a row

// H is a multiple of 8. RANKS blocks have together a thread for each VECTORS vectors.
template <int RANKS, int VECTORS, class Op>
__device__ __forceinline__ void norm_row_in_registers(const Op& op, int H, float eps) {
    __shared__ float4 sums[MAX_WARPS / 4];
    __shared__ Mbarrier mbarrier;
    const int lane = threadIdx.x % warp, first = blockIdx.x % RANKS * VECTORS * blockDim.x + threadIdx.x;
    const int warps = RANKS * VECTORS * blockDim.x / warp;
    auto vec = [&](int j) { return first + j * (int)blockDim.x; };
    auto exists = [&](int j) { return vec(j) < H / 8; };

    // Stage 1: the weights, then the values and the sums of their squares.
    pdl_launch_dependents();
    if ((int)threadIdx.x < MAX_WARPS - warps) reinterpret_cast<float*>(sums)[warps + threadIdx.x] = 0.0f;
    if constexpr (RANKS > 1) {
        if (threadIdx.x == 0) mbarrier_init_expect_tx(&mbarrier, warps * sizeof(float));
        cluster_arrive_relaxed();
    }
    decltype(load_weight<8>(op.weight, 0)) weights[VECTORS] = {};
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
        if (exists(j)) weights[j] = load_weight<8>(op.weight, vec(j));
    pdl_wait();
    typename Op::template Fetched<8> fetched[VECTORS] = {};
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
        if (exists(j)) fetched[j] = op.template fetch<8>(vec(j));
    if constexpr (RANKS > 1) cluster_wait();
    float squares[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        if (exists(j)) op.template take<8>(vec(j), fetched[j]);
        squares[j] = warp_sum(add_squares(widen(fetched[j].value), 0.0f));
    }

    // Stage 2: the sum over the warps of all blocks.
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        float* const place = reinterpret_cast<float*>(sums) + vec(j) / warp;
        if constexpr (RANKS > 1) {
            if (lane < RANKS) dsmem_store_async(place, squares[j], &mbarrier, lane);
        } else if (lane == 0) {
            *place = squares[j];
        }
    }
    __syncthreads();
    if constexpr (RANKS > 1) dsmem_wait(&mbarrier);
    float4 totals[MAX_WARPS / 4];
#pragma unroll
    for (int i = 0; i < MAX_WARPS / 4; ++i) totals[i] = sums[i];
#pragma unroll
    for (int step = 1; step < MAX_WARPS / 4; step *= 2)
#pragma unroll
        for (int i = 0; i < MAX_WARPS / 4; i += 2 * step) {
            totals[i].x += totals[i + step].x, totals[i].y += totals[i + step].y;
            totals[i].z += totals[i + step].z, totals[i].w += totals[i + step].w;
        }
    const float r = reciprocal_root((totals[0].x + totals[0].y) + (totals[0].z + totals[0].w), H, eps);

    // Stage 3: the results.
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
        if (exists(j)) op.template write<8>(vec(j), fetched[j], r, widen(weights[j]));
}
