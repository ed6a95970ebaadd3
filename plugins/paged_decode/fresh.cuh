// Queries, and the newest token's key and value, as projections leave them: normalised and turned here, and the token put
// into the cache, with the bits of rms_norm, rope_forward and kv_cache_append.
//
// Every block of a row makes the queries for itself while its first keys and values are on their way: two heads a warp.
// The block that has the newest token makes its key too, by the last warp, and works with what stands in its shared
// memory, not with the cache.
#pragma once
#include "attention.cuh"
#include "rms_norm.cuh"
#include "rope.cuh"

// What a row's projections and their norms are: q [heads, D], k and v [D] of its key head, and where the token goes
// (null: nowhere).
struct Projected {
    const bf16 *q, *k, *v, *q_weight, *k_weight;
    bf16 *k_out, *v_out;
    int position;
    float eps, weight_offset;
    int half;
};

// Calls, which compile once for all heads: double precision is much code.
__device__ __noinline__ double turns_of(int i, double log2_step) { return turns_a_position(i, log2_step, NO_RAMP); }
__device__ __noinline__ float2 cosine_and_sine_of(int position, double turns) {
    float2 v;
    cosine_and_sine(position, turns, NO_RAMP.scale, v.x, v.y);
    return v;
}

template <int D, int WARPS>
struct Fresh {
    static constexpr bool IS_FRESH = true;
    static constexpr int PIECES = D / 8, HEADS_A_WARP = HEADS / WARPS, THREADS = 32 * WARPS;
    struct Memory {
        alignas(16) bf16 key[D], value[D];
    };
    Projected row;
    double log2_step, turns;  // a position, of this lane's pair
    Raw<8> q_weight, k_weight, q[HEADS_A_WARP], token;

    // What no launch writes.
    __device__ __forceinline__ Fresh(const bf16* q_weight_, const bf16* k_weight_, double log2_step_)
        : log2_step(log2_step_), turns(turns_of(threadIdx.x % warp, log2_step_)) {
        const int lane = threadIdx.x % warp;
        if (lane < PIECES) q_weight = load_raw<8>(q_weight_, lane), k_weight = load_raw<8>(k_weight_, lane);
    }
    __device__ __forceinline__ bool has_token() const { return row.k_out != nullptr; }

    __device__ __forceinline__ void begin(Queries<D>& queries, const Row& of) {
        const int lane = threadIdx.x % warp, first = threadIdx.x / warp * HEADS_A_WARP;
        const bf16 *const key = row.k, *const value = row.v;
        if (lane >= PIECES) return;
#pragma unroll
        for (int i = 0; i < HEADS_A_WARP; ++i)
            q[i] = load_raw<8>(row.q + (first + i < of.heads ? first + i : 0) * D, lane);
        token = load_raw<8>(threadIdx.x / warp == WARPS - 1 ? key : value, lane);
    }

    // 8 values of a head, normalised.
    __device__ __forceinline__ Raw<8> normalised(Raw<8> x, Raw<8> weight) const {
        const Values<8> values = widen(x);
        const bool exists = threadIdx.x % warp < PIECES;
        const float r = reciprocal_root(warp_sum(exists ? add_squares(values, 0.0f) : 0.0f), D, row.eps);
        return narrow(scaled(values, r, widen(weight), row.weight_offset));
    }

    // Where element i of a query head stands.
    __device__ __forceinline__ static bf16* element(Queries<D>& queries, int head, int i) {
        return reinterpret_cast<bf16*>(&queries.piece(head, i / 8)) + i % 8;
    }
    __device__ __forceinline__ static void turn(bf16* low, bf16* high, float cosine, float sine) {
        const float x = __bfloat162float(*low), y = __bfloat162float(*high);
        *low = __float2bfloat16_rn(turned_low(x, y, cosine, sine));
        *high = __float2bfloat16_rn(turned_high(x, y, cosine, sine));
    }

    template <int PENDING>
    __device__ __forceinline__ void end(Queries<D>& queries, Memory& memory, const Row& of, bool is_owner) {
        const int lane = threadIdx.x % warp, of_block = threadIdx.x / warp, first = of_block * HEADS_A_WARP;
        const bool has_piece = lane < PIECES, makes_token = is_owner && has_token();
        const bool makes_key = makes_token && of_block == WARPS - 1;
#pragma unroll
        for (int i = 0; i < HEADS_A_WARP; ++i) {
            const Raw<8> piece = normalised(q[i], q_weight);
            if (has_piece)
                *reinterpret_cast<uint4*>(element(queries, first + i, 8 * lane)) =
                    first + i < of.heads ? piece.bits : make_uint4(0, 0, 0, 0);
        }
        if (makes_key) {
            const Raw<8> piece = normalised(token, k_weight);
            if (has_piece) store_raw<8>(memory.key, lane, piece);
        }
        if (makes_token && of_block == 0 && has_piece) store_raw<8>(memory.value, lane, token);
        __syncwarp();
        // Each warp makes the angles for itself: a barrier would cost more.
        for (int i = lane; i < row.half && row.position >= 0; i += warp) {
            const float2 angle = cosine_and_sine_of(row.position, i == lane ? turns : turns_of(i, log2_step));
#pragma unroll
            for (int h = 0; h < HEADS_A_WARP; ++h)
                turn(element(queries, first + h, i), element(queries, first + h, i + row.half), angle.x, angle.y);
            if (makes_key) turn(memory.key + i, memory.key + i + row.half, angle.x, angle.y);
        }
        __syncthreads();
        if (makes_token && (int)threadIdx.x < 2 * PIECES) {
            const bool is_key = threadIdx.x < PIECES;
            const int piece = threadIdx.x % PIECES;
            bf16 *const k_out = row.k_out, *const v_out = row.v_out;
            store_raw<8>(is_key ? k_out : v_out, piece, load_raw<8>(is_key ? memory.key : memory.value, piece));
        }
    }
};
