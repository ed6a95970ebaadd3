// The gated delta rule, one row after the other, with a head's state held in registers.
//
//   S [Dk, Dv] of a value head:   S = decay * S;   delta = beta * (v - k . S);   S += k (x) delta;   out = q . S
//
// k and q of the head's key head, scaled to length 1 (q also by Dk^-0.5). Columns of S do not depend on each other: a
// tile of 32 columns belongs to 128 threads, Dk = 128. Lane (rows, quad) = (lane / 8, lane % 8) of warp w holds columns
// 4 quad .. + 3 of rows 32 w + 8 rows .. + 7. Both products of a row are summed before the state moves, as
// q . S_new = q . S_old + (q . k) delta, so that a row takes one barrier. Scales stay outside the sums: lengths and decay
// multiply results.
//
// Numerics: FP32; sums over Dk in an order that depends on nothing, so that a state does not depend on how its rows were
// cut into launches: all forms of many rows are this loop. One rounding of the output. The state is read once and
// written once a launch. Source: Yang et al., Gated Delta Networks (2024), equation 10.
//
// A slot of -1, or outside the pool, is padding: zeros, and no state is touched. A slot that two sequences name holds
// the state of either. Offsets outside the rows are clamped.
#pragma once
#include "bf16.cuh"
#include "global_memory.cuh"
#include "opaque.cuh"

constexpr int KEY_DIM = 128, COLUMNS = 32, TILE_WARPS = 4, TILE_THREADS = TILE_WARPS * 32, ROWS = 8;
constexpr float LENGTH_EPS = 1e-6f;
static_assert(TILE_WARPS * 4 * ROWS == KEY_DIM && COLUMNS == 8 * 4);

// What a launch works on. qkv [M, 2 key_heads Dk + value_heads Dv], decay and beta [M, value_heads], state
// [slots, value_heads, Dk, Dv], out [M, value_heads Dv], states [M, value_heads, Dk, Dv] or null.
struct Heads {
    int key_heads, key_dim, value_heads, value_dim;

    __device__ __forceinline__ size_t width() const { return 2 * (size_t)key_heads * key_dim + (size_t)value_heads * value_dim; }
    // As head / (value_heads / key_heads): of heads that launch.py lets through, a quotient this close is exact.
    __device__ __forceinline__ int key_head(int head) const {
        return (int)__fdividef((head + 0.5f) * key_heads, (float)value_heads);
    }
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
    return make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
}

__device__ __forceinline__ float4 fma4(float a, float4 x, float4 y) {
    return make_float4(fmaf(a, x.x, y.x), fmaf(a, x.y, y.y), fmaf(a, x.z, y.z), fmaf(a, x.w, y.w));
}

// Explicit, as everywhere here: all forms must round alike.
__device__ __forceinline__ float dot4(float4 x, float4 y) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, x.x * y.x)));
}

__device__ __forceinline__ float4 scale4(float a, float4 x) { return make_float4(a * x.x, a * x.y, a * x.z, a * x.w); }

__device__ __forceinline__ float4 add4(float4 x, float4 y) {
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

// One row as a thread loads it: q and k at 4 lane .. + 3 for their lengths and at its own 8 rows, v of its columns.
struct RowInputs {
    uint2 q, k, v;
    uint4 own_q, own_k;
    float decay, beta;
};

// What the lengths of q and k make of them; a warp has 4 elements of each a lane.
struct Units {
    float q, k, qk;

    __device__ __forceinline__ Units(float4 a, float4 b) {
        const float qq = warp_total(dot4(a, a)), kk = warp_total(dot4(b, b)), both = warp_total(dot4(a, b));
        q = rsqrtf(qq + LENGTH_EPS) * rsqrtf((float)KEY_DIM);
        k = rsqrtf(kk + LENGTH_EPS);
        qk = both * q * k;
    }
};

// What a row does to the state: everything that does not depend on it.
struct RowStep {
    uint4 q, k;  // of this thread's rows, as they were loaded
    uint2 v;
    float decay, beta, unit_q, unit_k, qk;

    RowStep() = default;
    __device__ __forceinline__ explicit RowStep(const RowInputs& in)
        : q(in.own_q), k(in.own_k), v(in.v), decay(in.decay), beta(in.beta) {
        const Units units(widen(in.q), widen(in.k));
        unit_q = units.q, unit_k = units.k, qk = units.qk;
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
        for (int r = 0; r < ROWS; ++r) rows[r] = ::load_now(reinterpret_cast<const float4*>(at + (size_t)r * value_dim));
    }
    __device__ __forceinline__ void store(float* at, int value_dim) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) *reinterpret_cast<float4*>(at + (size_t)r * value_dim) = rows[r];
    }
};

// Sums over warps, [k or q][warp][columns], of one row while the one before may still be read.
struct Exchange {
    float4 parts[2][2][TILE_WARPS][COLUMNS / 4];

    __device__ __forceinline__ float4 total(int parity, int which, int quad) const {
        float4 sum = parts[parity][which][0][quad];
#pragma unroll
        for (int w = 1; w < TILE_WARPS; ++w) sum = add4(sum, parts[parity][which][w][quad]);
        return sum;
    }
};

// Sums both products over the four row groups of a warp and puts them where all warps find them. Each exchange halves what
// a lane holds: first one of the products, then two of its columns.
__device__ __forceinline__ void share_sums(Exchange& exchange, int parity, float4 read_k, float4 read_q, int warp, int lane) {
    const bool is_q = lane & 8, is_high = lane & 16;
    const float4 give = is_q ? read_k : read_q;
    const float4 mine = add4(is_q ? read_q : read_k,
                             make_float4(__shfl_xor_sync(0xffffffffu, give.x, 8), __shfl_xor_sync(0xffffffffu, give.y, 8),
                                         __shfl_xor_sync(0xffffffffu, give.z, 8), __shfl_xor_sync(0xffffffffu, give.w, 8)));
    const float x = __shfl_xor_sync(0xffffffffu, is_high ? mine.x : mine.z, 16);
    const float y = __shfl_xor_sync(0xffffffffu, is_high ? mine.y : mine.w, 16);
    const float2 kept = is_high ? make_float2(mine.z + x, mine.w + y) : make_float2(mine.x + x, mine.y + y);
    reinterpret_cast<float2*>(&exchange.parts[parity][is_q][warp][lane & 7])[is_high] = kept;
}

// What a row learns, of four columns whose products with k are summed in ``read_k``.
__device__ __forceinline__ float4 delta_of(const RowStep& in, float4 read_k) {
    const float seen = in.unit_k * in.decay;
    const float4 v = widen(in.v);
    return make_float4(fmaf(-seen, read_k.x, v.x) * in.beta, fmaf(-seen, read_k.y, v.y) * in.beta,
                       fmaf(-seen, read_k.z, v.z) * in.beta, fmaf(-seen, read_k.w, v.w) * in.beta);
}

// Its output before rounding, of four columns whose products with q are summed in ``read_q``.
__device__ __forceinline__ float4 output_of(const RowStep& in, float4 delta, float4 read_q) {
    return fma4(in.qk, delta, scale4(in.unit_q * in.decay, read_q));
}

// What a row reads of a tile: both products, where all warps find them once all threads of the tile have met.
__device__ __forceinline__ void read_state(const StatePart& state, const RowStep& in, Exchange& exchange, int parity,
                                           int warp, int lane) {
    float q[ROWS], k[ROWS];
    unpack(q, in.q);
    unpack(k, in.k);
    float4 read_k = make_float4(0, 0, 0, 0), read_q = read_k;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        read_k = fma4(k[r], state.rows[r], read_k);
        read_q = fma4(q[r], state.rows[r], read_q);
    }
    share_sums(exchange, parity, read_k, read_q, warp, lane);
}

__device__ __forceinline__ void move_state(StatePart& state, const RowStep& in, float4 delta) {
    float k[ROWS];
    unpack(k, in.k);
    const float4 learnt = scale4(in.unit_k, delta);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) state.rows[r] = fma4(k[r], learnt, scale4(in.decay, state.rows[r]));
}

// Moves a tile of the state by one row; returns what it learnt. All threads of the tile come here, and to ``sync``.
template <class Sync>
__device__ __forceinline__ float4 learn(StatePart& state, const RowStep& in, Exchange& exchange, int parity, int warp,
                                        int lane, Sync sync) {
    read_state(state, in, exchange, parity, warp, lane);
    sync();
    const float4 delta = delta_of(in, exchange.total(parity, 0, lane & 7));
    move_state(state, in, delta);
    return delta;
}

// Where a thread works: a tile of columns of one head of one sequence.
struct Tile {
    int sequence, head, column, warp, lane;
    size_t own;  // this thread's part of a head's state

    __device__ __forceinline__ Tile(const Heads& heads, int tile, int head_, int sequence_)
        : sequence(sequence_), head(head_), warp(threadIdx.x / 32 % TILE_WARPS), lane(threadIdx.x & 31) {
        column = tile * COLUMNS + 4 * (lane & 7);
        own = (size_t)(warp * 32 + (lane >> 3) * ROWS) * heads.value_dim + column;
    }
};

// One row alone, of one tile. Reading it takes three steps, so that a launch that begins before the one ahead of it ends
// brings what it can into L2 meanwhile: the state in the slot that is named by then. The slot is read again afterwards, with
// all that does not depend on it; only where the guess was wrong the state is read again.
struct SingleRow {
    Heads heads;
    Tile at;
    const int* slots;
    float *head, *pool;  // in slot 0, and this thread's part there
    const __nv_bfloat16 *q, *v;
    int pool_slots, guess;

    __device__ __forceinline__ SingleRow(const Heads& heads_, const Tile& at_, const __nv_bfloat16* qkv, const int* slots_,
                                         float* pool_, int pool_slots_)
        : heads(heads_), at(at_), slots(slots_ + at.sequence), pool_slots(pool_slots_), guess(-1) {
#if __CUDA_ARCH__ >= 900
        guess = load_relaxed(slots);
#endif
        head = pool_ + (size_t)at.head * heads.state_size();
        pool = head + at.own;
        int key_head = heads.key_head(at.head);
        make_opaque(key_head);  // not behind what waits for the slot
        const __nv_bfloat16* const row = qkv + at.sequence * heads.width();
        q = row + key_head * KEY_DIM;
        v = row + 2 * (size_t)heads.key_heads * KEY_DIM + (size_t)at.head * heads.value_dim + at.column;
    }

    // The tiles of a head bring its state together. Of a tile one warp alone waits for the slot so early. Of many heads all
    // do: where only those did that are at work before the launch ahead ends, 768 took 30.6 us, where all did 29.9 (H200).
    __device__ __forceinline__ void bring_state() const {
#if __CUDA_ARCH__ >= 900
        constexpr int SHARE = KEY_DIM * COLUMNS;
        if (at.warp == TILE_WARPS - 1)
            if (at.lane == 0 && is_inside(guess))
                prefetch_l2(head + slot_offset(guess) + at.column / COLUMNS * SHARE, SHARE * sizeof(float));
#endif
    }

    __device__ __forceinline__ bool is_inside(int slot) const { return (u32)slot < (u32)pool_slots; }
    __device__ __forceinline__ size_t slot_offset(int slot) const { return slot * (heads.value_heads * heads.state_size()); }
    __device__ __forceinline__ float* place(int slot) const { return pool + slot_offset(slot); }

    // Returns the slot.
    __device__ __forceinline__ int load(RowInputs& in, StatePart& state, const float* decay, const float* beta) const {
        const int named = *slots, own = at.warp * 32 + (at.lane >> 3) * ROWS;
        const size_t gate = at.sequence * (size_t)heads.value_heads + at.head;
        const __nv_bfloat16* const k = q + (size_t)heads.key_heads * KEY_DIM;
        in.q = load_now(reinterpret_cast<const uint2*>(q + 4 * at.lane));
        in.k = load_now(reinterpret_cast<const uint2*>(k + 4 * at.lane));
        in.own_q = load_now(reinterpret_cast<const uint4*>(q + own));
        in.own_k = load_now(reinterpret_cast<const uint4*>(k + own));
        in.v = load_now(reinterpret_cast<const uint2*>(v));
        in.decay = load_now(decay + gate), in.beta = load_now(beta + gate);
        if (is_inside(guess)) state.load_now(place(guess), heads.value_dim);
        if (guess != named && is_inside(named)) state.load_now(place(named), heads.value_dim);
        return named;
    }
};

// Moves the state by one row alone. Returns, in warp 0, the output of this thread's columns before rounding.
template <class Sync>
__device__ __forceinline__ float4 step(StatePart& state, const RowStep& in, Exchange& exchange, const Tile& at, Sync sync) {
    const float4 delta = learn(state, in, exchange, 0, at.warp, at.lane, sync);
    return at.warp > 0 ? make_float4(0, 0, 0, 0) : output_of(in, delta, exchange.total(0, 1, at.lane & 7));
}
