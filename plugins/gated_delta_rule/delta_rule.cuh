// The gated delta rule, one row after the other, with a head's state held in registers.
//
//   S [Dk, Dv] of a value head:   S = decay * S;   delta = beta * (v - k . S);   S += k (x) delta;   out = q . S
//
// k and q of the head's key head, scaled to length 1 (q also by Dk^-0.5). Columns of S do not depend on each other: a
// tile of 32 columns belongs to 128 threads, Dk = 128. Lane (rows, quad) = (lane / 8, lane % 8) of warp w holds columns
// 4 quad .. + 3 of rows 32 w + 8 rows .. + 7. Both products of a row are summed before the state moves, as
// q . S_new = q . S_old + (q . k) delta, so that a row takes one barrier.
//
// Numerics: FP32; sums over Dk in an order that depends on nothing, so that a state does not depend on how its rows were
// cut into launches: all forms of many rows are this loop. One rounding of the output. The state is read once and
// written once a launch. Source: Yang et al., Gated Delta Networks (2024), equation 10.
//
// A slot of -1, or outside the pool, is padding: zeros, and no state is touched. A slot that two sequences name holds
// the state of either. Offsets outside the rows are clamped.
#pragma once
#include <cuda_bf16.h>
#include "launch.cuh"

constexpr int KEY_DIM = 128, COLUMNS = 32, TILE_WARPS = 4, TILE_THREADS = TILE_WARPS * 32, ROWS = 8;
constexpr float LENGTH_EPS = 1e-6f;
static_assert(TILE_WARPS * 4 * ROWS == KEY_DIM && COLUMNS == 8 * 4);

// What a launch works on. qkv [M, 2 key_heads Dk + value_heads Dv], decay and beta [M, value_heads], state
// [slots, value_heads, Dk, Dv], out [M, value_heads Dv], states [M, value_heads, Dk, Dv] or null.
struct Heads {
    int key_heads, key_dim, value_heads, value_dim;

    __device__ __forceinline__ size_t width() const { return 2 * (size_t)key_heads * key_dim + (size_t)value_heads * value_dim; }
    __device__ __forceinline__ int key_head(int head) const { return head / (value_heads / key_heads); }
    __device__ __forceinline__ size_t state_size() const { return (size_t)key_dim * value_dim; }
};

// The rows of a sequence: those that cu_rows says, or without it ``rows_each``.
struct Rows {
    int start, stop;

    __device__ __forceinline__ Rows(const int* cu_rows, int rows_each, int sequence, int M) {
        start = cu_rows ? cu_rows[sequence] : sequence * rows_each;
        stop = cu_rows ? cu_rows[sequence + 1] : start + rows_each;
        start = min(max(start, 0), M);
        stop = min(max(stop, start), M);
    }
};

__device__ __forceinline__ float warp_total(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

__device__ __forceinline__ float4 widen(uint2 raw) {
    return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
                       __uint_as_float(raw.y & 0xffff0000u));
}

__device__ __forceinline__ uint2 narrow(float4 v) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
    return make_uint2(*reinterpret_cast<const u32*>(&low), *reinterpret_cast<const u32*>(&high));
}

__device__ __forceinline__ float4 fma4(float a, float4 x, float4 y) {
    return make_float4(fmaf(a, x.x, y.x), fmaf(a, x.y, y.y), fmaf(a, x.z, y.z), fmaf(a, x.w, y.w));
}

__device__ __forceinline__ float4 add4(float4 x, float4 y) {
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

__device__ __forceinline__ float4 over_rows(float4 v) {  // the sum over the four row groups of a warp
#pragma unroll
    for (int distance = 8; distance <= 16; distance <<= 1)
        v = add4(v, make_float4(__shfl_xor_sync(0xffffffffu, v.x, distance), __shfl_xor_sync(0xffffffffu, v.y, distance),
                                __shfl_xor_sync(0xffffffffu, v.z, distance), __shfl_xor_sync(0xffffffffu, v.w, distance)));
    return v;
}

// One row as a thread loads it: q and k at 4 lane .. + 3, v of its columns.
struct RowInputs {
    uint2 q, k, v;
    float decay, beta;

    __device__ __forceinline__ void load(const Heads& heads, const __nv_bfloat16* qkv, const float* decays,
                                         const float* betas, int row, int head, int column, int lane) {
        const __nv_bfloat16* at = qkv + row * heads.width();
        const size_t keys = (size_t)heads.key_heads * KEY_DIM, key = (size_t)heads.key_head(head) * KEY_DIM + 4 * lane;
        q = *reinterpret_cast<const uint2*>(at + key);
        k = *reinterpret_cast<const uint2*>(at + keys + key);
        v = *reinterpret_cast<const uint2*>(at + 2 * keys + (size_t)head * heads.value_dim + column);
        decay = decays[(size_t)row * heads.value_heads + head];
        beta = betas[(size_t)row * heads.value_heads + head];
    }
};

// A thread's part of a tile of the state.
struct StatePart {
    float4 rows[ROWS];

    __device__ __forceinline__ void load(const float* at, int value_dim) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rows[r] = *reinterpret_cast<const float4*>(at + (size_t)r * value_dim);
    }
    __device__ __forceinline__ void store(float* at, int value_dim) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) *reinterpret_cast<float4*>(at + (size_t)r * value_dim) = rows[r];
    }
};

// Sums over warps, of one row while the one before may still be read.
struct Exchange {
    float4 parts[2][TILE_WARPS][2][COLUMNS / 4];
};

// Moves a tile of the state by one row and returns the output of this thread's columns, before rounding. All threads of
// the block come here.
__device__ __forceinline__ float4 step(StatePart& state, const RowInputs& in, Exchange& exchange, int parity, int warp,
                                       int lane) {
    const float4 q = widen(in.q), k = widen(in.k), v = widen(in.v);
    const float qq = warp_total(q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w);
    const float kk = warp_total(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w);
    const float qk = warp_total(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w);
    const float unit_q = 1.0f / sqrtf(qq + LENGTH_EPS) * rsqrtf((float)KEY_DIM), unit_k = 1.0f / sqrtf(kk + LENGTH_EPS);
    const float qs[4] = {q.x * unit_q, q.y * unit_q, q.z * unit_q, q.w * unit_q};
    const float ks[4] = {k.x * unit_k, k.y * unit_k, k.z * unit_k, k.w * unit_k};
    const int source = warp * 8 + (lane >> 3) * 2, quad = lane & 7;

    float4 read_k = make_float4(0, 0, 0, 0), read_q = read_k;
    float own_k[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        own_k[r] = __shfl_sync(0xffffffffu, ks[r & 3], source + (r >> 2));
        const float own_q = __shfl_sync(0xffffffffu, qs[r & 3], source + (r >> 2));
        float4& s = state.rows[r];
        s = make_float4(s.x * in.decay, s.y * in.decay, s.z * in.decay, s.w * in.decay);
        read_k = fma4(own_k[r], s, read_k);
        read_q = fma4(own_q, s, read_q);
    }
    read_k = over_rows(read_k);
    read_q = over_rows(read_q);
    if (lane < 8) {
        exchange.parts[parity][warp][0][quad] = read_k;
        exchange.parts[parity][warp][1][quad] = read_q;
    }
    __syncthreads();
    read_k = exchange.parts[parity][0][0][quad];
    read_q = exchange.parts[parity][0][1][quad];
#pragma unroll
    for (int w = 1; w < TILE_WARPS; ++w) {
        read_k = add4(read_k, exchange.parts[parity][w][0][quad]);
        read_q = add4(read_q, exchange.parts[parity][w][1][quad]);
    }
    const float4 delta = make_float4((v.x - read_k.x) * in.beta, (v.y - read_k.y) * in.beta, (v.z - read_k.z) * in.beta,
                                     (v.w - read_k.w) * in.beta);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) state.rows[r] = fma4(own_k[r], delta, state.rows[r]);
    return fma4(qk * unit_q * unit_k, delta, read_q);
}
