// The gated delta rule, row by row, with the state of a head in registers. Used by gated_delta_rule.cu, any_size.cuh
// and chunked.cuh. sm_80 and newer.
//
//   S [Dk, Dv] of a value head:   S = decay * S;   delta = beta * (v - k . S);   S += k (x) delta;   out = q . S
//
// k and q belong to the head's key head and are scaled to length 1 (q also by Dk^-0.5). The columns of S do not depend
// on each other: 128 threads have a tile of 32 columns, Dk = 128. Lane (rows, quad) = (lane / 8, lane % 8) of warp w
// holds columns 4 quad .. + 3 of rows 32 w + 8 rows .. + 7. Both products of a row are summed before the update, as q .
// S_new = q . S_old + (q . k) delta, so that a row takes one barrier. Scales stay outside the sums: lengths and decay
// multiply results.
//
// Numerics: FP32. The order of sums over Dk is fixed, so that a state does not depend on the division of rows into
// launches: all kernels for several rows use this loop. One rounding of the output. The state is read once and written
// once a launch. Source: Yang et al., Gated Delta Networks (2024), equation 10.
//
// A slot of -1, or outside the pool, is padding: zeros, and no state is touched. If two sequences have the same slot,
// it gets the state of one of them. Offsets outside the rows are clamped.
#pragma once
#include "bf16.cuh"
#include "global_memory.cuh"
#include "opaque.cuh"

constexpr int KEY_DIM = 128, COLUMNS = 32, TILE_WARPS = 4, TILE_THREADS = TILE_WARPS * 32, ROWS = 8;
constexpr float LENGTH_EPS = 1e-6f;
static_assert(TILE_WARPS * 4 * ROWS == KEY_DIM && COLUMNS == 8 * 4);

// The sizes of a launch. qkv [M, 2 key_heads Dk + value_heads Dv], decay and beta [M, value_heads], state [slots,
// value_heads, Dk, Dv], out [M, value_heads Dv], states [M, value_heads, Dk, Dv] or null.
struct Heads {
    int key_heads, key_dim, value_heads, value_dim;

    __device__ __forceinline__ size_t width() const {
        return 2 * (size_t)key_heads * key_dim + (size_t)value_heads * value_dim;
    }
    // head / (value_heads / key_heads). The quotient is exact for the numbers of heads that launch.py accepts.
    __device__ __forceinline__ int key_head(int head) const {
        return (int)__fdividef((head + 0.5f) * key_heads, (float)value_heads);
    }
    __device__ __forceinline__ size_t state_size() const { return (size_t)key_dim * value_dim; }
};

// The rows of a sequence: from cu_rows, or ``rows_each`` without it.
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

__device__ __forceinline__ uint2 narrow(float4 v) { return make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)); }

__device__ __forceinline__ float4 fma4(float a, float4 x, float4 y) {
    return make_float4(fmaf(a, x.x, y.x), fmaf(a, x.y, y.y), fmaf(a, x.z, y.z), fmaf(a, x.w, y.w));
}

// Explicit fused operations: all kernels must round alike.
__device__ __forceinline__ float dot4(float4 x, float4 y) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, x.x * y.x)));
}

__device__ __forceinline__ float4 scale4(float a, float4 x) { return make_float4(a * x.x, a * x.y, a * x.z, a * x.w); }

__device__ __forceinline__ float4 add4(float4 x, float4 y) {
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

// The loads of a thread for one row: q and k at 4 lane .. + 3 for their lengths, both at the 8 state rows of the
// thread, and v at its columns.
struct RowInputs {
    uint2 q, k, v;
    uint4 rows_q, rows_k;
    float decay, beta;
};

// Inverse lengths of q and k, and their product. A lane has 4 elements of each.
struct InverseNorms {
    float q, k, qk;

    __device__ __forceinline__ InverseNorms(float4 a, float4 b) {
        const float qq = warp_total(dot4(a, a)), kk = warp_total(dot4(b, b)), both = warp_total(dot4(a, b));
        q = rsqrtf(qq + LENGTH_EPS) * rsqrtf((float)KEY_DIM);
        k = rsqrtf(kk + LENGTH_EPS);
        qk = both * q * k;
    }
};

// The operands of a step that do not depend on the state.
struct StepOperands {
    uint4 q, k;  // of this thread's rows, as loaded
    uint2 v;
    float decay, beta, unit_q, unit_k, qk;

    StepOperands() = default;
    __device__ __forceinline__ explicit StepOperands(const RowInputs& in)
        : q(in.rows_q), k(in.rows_k), v(in.v), decay(in.decay), beta(in.beta) {
        const InverseNorms inverse_norms(widen(in.q), widen(in.k));
        unit_q = inverse_norms.q, unit_k = inverse_norms.k, qk = inverse_norms.qk;
    }
};

__device__ __forceinline__ void unpack(float (&to)[ROWS], uint4 raw) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = __uint_as_float(words[i] << 16);
        to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

// A thread's part of a tile of the state.
struct StatePart {
    float4 rows[ROWS];

    __device__ __forceinline__ void load(const float* at, int value_dim) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rows[r] = *reinterpret_cast<const float4*>(at + (size_t)r * value_dim);
    }
    __device__ __forceinline__ void load_now(const float* at, int value_dim) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            rows[r] = ::load_now(reinterpret_cast<const float4*>(at + (size_t)r * value_dim));
    }
    __device__ __forceinline__ void store(float* at, int value_dim) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) *reinterpret_cast<float4*>(at + (size_t)r * value_dim) = rows[r];
    }
};

// Sums of warps, [k or q][warp][columns]: for one row, while those of the row before may still be read.
struct WarpSums {
    float4 parts[2][2][TILE_WARPS][COLUMNS / 4];

    __device__ __forceinline__ float4 total(int parity, int which, int quad) const {
        float4 sum = parts[parity][which][0][quad];
#pragma unroll
        for (int w = 1; w < TILE_WARPS; ++w) sum = add4(sum, parts[parity][which][w][quad]);
        return sum;
    }
};

// Sums both products over the four row groups of a warp and stores them for all warps. Each shuffle halves the values
// of a lane: first one of the products remains, then two of its columns.
__device__ __forceinline__ void reduce_over_rows(WarpSums& warp_sums, int parity, float4 read_k, float4 read_q,
                                                 int warp, int lane) {
    const bool is_q = lane & 8, is_high = lane & 16;
    const float4 give = is_q ? read_k : read_q;
    const float4 products =
        add4(is_q ? read_q : read_k,
             make_float4(__shfl_xor_sync(0xffffffffu, give.x, 8), __shfl_xor_sync(0xffffffffu, give.y, 8),
                         __shfl_xor_sync(0xffffffffu, give.z, 8), __shfl_xor_sync(0xffffffffu, give.w, 8)));
    const float x = __shfl_xor_sync(0xffffffffu, is_high ? products.x : products.z, 16);
    const float y = __shfl_xor_sync(0xffffffffu, is_high ? products.y : products.w, 16);
    const float2 kept =
        is_high ? make_float2(products.z + x, products.w + y) : make_float2(products.x + x, products.y + y);
    reinterpret_cast<float2*>(&warp_sums.parts[parity][is_q][warp][lane & 7])[is_high] = kept;
}

// The delta of four columns. ``read_k`` holds their products with k.
__device__ __forceinline__ float4 delta_of(const StepOperands& in, float4 read_k) {
    const float seen = in.unit_k * in.decay;
    const float4 v = widen(in.v);
    return make_float4(fmaf(-seen, read_k.x, v.x) * in.beta, fmaf(-seen, read_k.y, v.y) * in.beta,
                       fmaf(-seen, read_k.z, v.z) * in.beta, fmaf(-seen, read_k.w, v.w) * in.beta);
}

// The output of four columns before rounding. ``read_q`` holds their products with q.
__device__ __forceinline__ float4 output_of(const StepOperands& in, float4 delta, float4 read_q) {
    return fma4(in.qk, delta, scale4(in.unit_q * in.decay, read_q));
}

// Both products of a row with a tile. All warps find them after a barrier of the tile.
__device__ __forceinline__ void read_state(const StatePart& state, const StepOperands& in, WarpSums& warp_sums,
                                           int parity, int warp, int lane) {
    float q[ROWS], k[ROWS];
    unpack(q, in.q);
    unpack(k, in.k);
    float4 read_k = make_float4(0, 0, 0, 0), read_q = read_k;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        read_k = fma4(k[r], state.rows[r], read_k);
        read_q = fma4(q[r], state.rows[r], read_q);
    }
    reduce_over_rows(warp_sums, parity, read_k, read_q, warp, lane);
}

__device__ __forceinline__ void apply_delta(StatePart& state, const StepOperands& in, float4 delta) {
    float k[ROWS];
    unpack(k, in.k);
    const float4 delta_k = scale4(in.unit_k, delta);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) state.rows[r] = fma4(k[r], delta_k, scale4(in.decay, state.rows[r]));
}

// Updates a tile of the state by one row and returns the delta. By all threads of the tile. ``sync`` is their barrier.
template <class Sync>
__device__ __forceinline__ float4 update_state(StatePart& state, const StepOperands& in, WarpSums& warp_sums,
                                               int parity, int warp, int lane, Sync sync) {
    read_state(state, in, warp_sums, parity, warp, lane);
    sync();
    const float4 delta = delta_of(in, warp_sums.total(parity, 0, lane & 7));
    apply_delta(state, in, delta);
    return delta;
}

// The position of a thread: a tile of columns of one head of one sequence.
struct TilePosition {
    int sequence, head, column, warp, lane;
    size_t state_offset;  // the offset of this thread's part of a head's state

    __device__ __forceinline__ TilePosition(const Heads& heads, int tile, int head_, int sequence_)
        : sequence(sequence_), head(head_), warp(threadIdx.x / 32 % TILE_WARPS), lane(threadIdx.x & 31) {
        column = tile * COLUMNS + 4 * (lane & 7);
        state_offset = (size_t)(warp * 32 + (lane >> 3) * ROWS) * heads.value_dim + column;
    }
};

// A single row of a decode step, for one tile. Before pdl_wait the slot is read speculatively, and its state is
// prefetched into L2. After the wait the slot is read again, together with all inputs that do not depend on it. Only if
// the speculative slot was wrong, the state is loaded again.
struct DecodeRow {
    Heads heads;
    TilePosition at;
    const int* slots;
    float *head, *pool;  // in slot 0; pool: this thread's part
    const __nv_bfloat16 *q, *v;
    int pool_slots, speculative_slot;

    __device__ __forceinline__ DecodeRow(const Heads& heads_, const TilePosition& at_, const __nv_bfloat16* qkv,
                                         const int* slots_, float* pool_, int pool_slots_)
        : heads(heads_), at(at_), slots(slots_ + at.sequence), pool_slots(pool_slots_), speculative_slot(-1) {
#if __CUDA_ARCH__ >= 900
        speculative_slot = load_relaxed(slots);
#endif
        head = pool_ + (size_t)at.head * heads.state_size();
        pool = head + at.state_offset;
        int key_head = heads.key_head(at.head);
        make_opaque(key_head);  // keeps this before the wait for the slot
        const __nv_bfloat16* const row = qkv + at.sequence * heads.width();
        q = row + key_head * KEY_DIM;
        v = row + 2 * (size_t)heads.key_heads * KEY_DIM + (size_t)at.head * heads.value_dim + at.column;
    }

    // One warp of each tile prefetches its part of a head's state, and only that warp waits for the slot. All blocks do
    // this: 768 heads took 29.9 us, and 30.6 us if only the blocks of the first wave did (H200).
    __device__ __forceinline__ void prefetch_state() const {
#if __CUDA_ARCH__ >= 900
        constexpr int SHARE = KEY_DIM * COLUMNS;
        if (at.warp == TILE_WARPS - 1)
            if (at.lane == 0 && is_inside(speculative_slot))
                prefetch_l2(head + slot_offset(speculative_slot) + at.column / COLUMNS * SHARE, SHARE * sizeof(float));
#endif
    }

    __device__ __forceinline__ bool is_inside(int slot) const { return (u32)slot < (u32)pool_slots; }
    __device__ __forceinline__ size_t slot_offset(int slot) const {
        return slot * (heads.value_heads * heads.state_size());
    }
    __device__ __forceinline__ float* state_of(int slot) const { return pool + slot_offset(slot); }

    // Returns the slot.
    __device__ __forceinline__ int load(RowInputs& in, StatePart& state, const float* decay, const float* beta) const {
        const int slot_now = *slots, first_row = at.warp * 32 + (at.lane >> 3) * ROWS;
        const size_t gate = at.sequence * (size_t)heads.value_heads + at.head;
        const __nv_bfloat16* const k = q + (size_t)heads.key_heads * KEY_DIM;
        in.q = load_now(reinterpret_cast<const uint2*>(q + 4 * at.lane));
        in.k = load_now(reinterpret_cast<const uint2*>(k + 4 * at.lane));
        in.rows_q = load_now(reinterpret_cast<const uint4*>(q + first_row));
        in.rows_k = load_now(reinterpret_cast<const uint4*>(k + first_row));
        in.v = load_now(reinterpret_cast<const uint2*>(v));
        in.decay = load_now(decay + gate), in.beta = load_now(beta + gate);
        if (is_inside(speculative_slot)) state.load_now(state_of(speculative_slot), heads.value_dim);
        if (speculative_slot != slot_now && is_inside(slot_now)) state.load_now(state_of(slot_now), heads.value_dim);
        return slot_now;
    }
};

// Updates the state by a single row. Returns, in warp 0, the output of this thread's columns before rounding.
template <class Sync>
__device__ __forceinline__ float4 step(StatePart& state, const StepOperands& in, WarpSums& warp_sums,
                                       const TilePosition& at, Sync sync) {
    const float4 delta = update_state(state, in, warp_sums, 0, at.warp, at.lane, sync);
    return at.warp > 0 ? make_float4(0, 0, 0, 0) : output_of(in, delta, warp_sums.total(0, 1, at.lane & 7));
}
