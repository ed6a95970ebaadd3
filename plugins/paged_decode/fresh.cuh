// Queries, and the newest token's key and value, from projections: normalised and rotated here, with the bits of
// rms_norm and rope_forward. The token is appended to the cache, as in kv_cache_append. Used by fresh.cu. sm_80 and
// newer.
//
// Every block of a row computes the queries while its first keys and values are in flight, each warp some heads. The
// block of the newest token also computes its key, in the last warp. It reads that token from shared memory, not from
// the cache.
#pragma once
#include "attention.cuh"
#include "bf16.cuh"
#include "rms_norm.cuh"
#include "rope.cuh"

// The projections of a row and their norms: q [heads, D], k and v [D] of its key head. ``cache_row`` is the token's row
// in the caches, or -1 for none.
struct Projections {
    const bf16 *q, *k, *v;
    bf16 *k_cache, *v_cache;
    long long cache_row;
    int position;
    float eps, weight_offset;
    int half;
};

// A function call, which compiles once for all heads: double precision is much code.
__device__ __noinline__ float2 angle_of(int i, int position, double log2_step) {
    float2 v;
    cosine_and_sine(position, turns_per_token(i, log2_step, NO_YARN), NO_YARN.scale, v.x, v.y);
    return v;
}

template <int D, int WARPS>
struct ProjectedQueries {
    static constexpr bool FROM_PROJECTIONS = true;
    static constexpr int VECS = D / 8, HEADS_PER_WARP = HEADS_PER_BLOCK / WARPS, THREADS = 32 * WARPS;
    struct Memory {
        alignas(16) bf16 key[D], value[D];
    };
    Projections row;
    double log2_step;
    Raw<8> q_weight, k_weight, q[HEADS_PER_WARP], token;

    // Loads weights, which no kernel writes.
    __device__ __forceinline__ ProjectedQueries(const bf16* q_weight_, const bf16* k_weight_, double log2_step_)
        : log2_step(log2_step_) {
        const int lane = threadIdx.x % warp;
        if (lane < VECS) q_weight = load_raw<8>(q_weight_, lane), k_weight = load_raw<8>(k_weight_, lane);
    }
    __device__ __forceinline__ bool has_new_token() const { return row.cache_row >= 0; }

    __device__ __forceinline__ void begin(Queries<D>& queries, const ContextRow& of) {
        const int lane = threadIdx.x % warp, first = threadIdx.x / warp * HEADS_PER_WARP;
        const bf16 *const key = row.k, *const value = row.v;
        if (lane >= VECS) return;
#pragma unroll
        for (int i = 0; i < HEADS_PER_WARP; ++i)
            q[i] = load_raw<8>(row.q + (first + i < of.heads ? first + i : 0) * D, lane);
        token = load_raw<8>(threadIdx.x / warp == WARPS - 1 ? key : value, lane);
    }

    // 8 values of a head after the norm.
    __device__ __forceinline__ Raw<8> normalised(Raw<8> x, Raw<8> weight) const {
        const Values<8> values = widen(x);
        const bool exists = threadIdx.x % warp < VECS;
        const float r = reciprocal_root(warp_sum(exists ? add_squares(values, 0.0f) : 0.0f), D, row.eps);
        return narrow(scaled(values, r, widen(weight), row.weight_offset));
    }
    __device__ __forceinline__ static void rotate(bf16* low, bf16* high, float2 angle) {
        const float x = __bfloat162float(*low), y = __bfloat162float(*high);
        *low = __float2bfloat16_rn(rotated_low(x, y, angle.x, angle.y));
        *high = __float2bfloat16_rn(rotated_high(x, y, angle.x, angle.y));
    }

    // Computes the heads of a warp, and in the last warp the key. The first warp has the value. There is no barrier:
    // each warp computes its own angles.
    __device__ __forceinline__ void make(Queries<D>& queries, Memory& memory, const ContextRow& of, bool is_owner) {
        const int lane = threadIdx.x % warp, of_block = threadIdx.x / warp, first = of_block * HEADS_PER_WARP;
        const bool has_vec = lane < VECS, makes_token = is_owner && has_new_token();
        const bool makes_key = makes_token && of_block == WARPS - 1;
        const int count = HEADS_PER_WARP + makes_key;
        // Element i of the n-th head. The key is the last one.
        auto element = [&](int n, int i) {
            const int head = first + n;
            bf16* const of_query = reinterpret_cast<bf16*>(&queries.vec(head % HEADS_PER_BLOCK, i / 8)) + i % 8;
            return n == HEADS_PER_WARP ? memory.key + i : of_query;
        };
        if (makes_token && of_block == 0 && has_vec) {
            store_raw<8>(memory.value, lane, token);
            store_raw<8>(row.v_cache + row.cache_row * D, lane, token);
        }
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            const bool is_key = n == HEADS_PER_WARP;
            Raw<8> x = is_key ? token : q[0];
#pragma unroll
            for (int i = 1; i < HEADS_PER_WARP; ++i)
                if (n == i) x = q[i];
            const Raw<8> values = normalised(x, is_key ? k_weight : q_weight);
            if (has_vec)
                *reinterpret_cast<uint4*>(element(n, 8 * lane)) =
                    is_key || first + n < of.heads ? values.bits : make_uint4(0, 0, 0, 0);
        }
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < row.half && row.position >= 0; i += warp) {
            const float2 angle = angle_of(i, row.position, log2_step);
#pragma unroll 1
            for (int n = 0; n < count; ++n) rotate(element(n, i), element(n, i + row.half), angle);
        }
        if (makes_key) {
            __syncwarp();
            if (has_vec) store_raw<8>(row.k_cache + row.cache_row * D, lane, load_raw<8>(memory.key, lane));
        }
    }
    template <int PENDING>
    __device__ __forceinline__ void end() {
        __syncthreads();
    }
};
