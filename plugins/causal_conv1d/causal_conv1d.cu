// The short causal convolution ahead of the gated delta rule, BF16 rows [M, C] of several sequences in one launch.
//
//   out[m, c] = silu(sum_j weight[c, j] * input[t - (W - 1) + j, c])          t: the place of row m in its sequence
//
// Inputs before a sequence's first row are the W - 1 of its slot of ``state``, oldest first, which then moves on past all
// rows; ``out_states``, where it is given, takes the state after each row. Rows of sequence s are cu_rows[s] to
// cu_rows[s + 1]; without cu_rows every sequence has one row. The steps of a decode have a kernel of their own.
//
// Work: a sequence is cut into chunks of at least W - 1 rows; a thread has the channels of one vector (8 with W = 4; one
// otherwise) for one chunk, row after row. Only the first chunk needs the state, so the thread that has it also writes
// the new one, from rows that nobody writes: no block waits for another.
//
// Numerics: FP32, taps added oldest first by fused multiply-add, silu, one rounding. A row's bits depend neither on how
// many rows a launch has nor on the width. A slot of -1 is padding: zeros, no state touched. Slots outside the pool and
// offsets that do not rise from 0 to M, which the contract refuses, touch nothing outside: such a slot is padding, such
// offsets are cut to fit. sm_80 and newer. Launched by launch.py.
#include "bf16.cuh"
#include "causal_conv.cuh"
#include "global_memory.cuh"
#include "opaque.cuh"
#include "pdl.cuh"

constexpr int THREADS = 64;
constexpr int GROUP = 4;   // rows whose loads are in flight together

// Part of a sequence: rows begin .. end - 1 of those start .. stop - 1.
struct Chunk {
    int sequence, start, stop, begin, end;
    __device__ __forceinline__ bool is_first() const { return begin == start; }
};

// The index-th chunk of all; an empty one past the last. All lanes of a warp ask together.
__device__ __forceinline__ Chunk chunk_of(const int* cu_rows, int M, int S, int rows_per_chunk, int index) {
    if (cu_rows == nullptr) return index < S ? Chunk{index, index, index + 1, index, index + 1} : Chunk{};
    const int lane = threadIdx.x & 31;
    for (int base = 0; base < S; base += 32) {
        const int s = base + lane;
        const int start = s < S ? min(max(cu_rows[s], 0), M) : 0, stop = s < S ? min(max(cu_rows[s + 1], start), M) : 0;
        const int count = s < S ? (stop - start + rows_per_chunk - 1) / rows_per_chunk : 0;
        int sum = count;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int lower = __shfl_up_sync(ALL_LANES, sum, distance);
            if (lane >= distance) sum += lower;
        }
        const u32 reached = __ballot_sync(ALL_LANES, sum > index);
        if (reached != 0) {
            const int owner = __ffs(reached) - 1;
            const int first = __shfl_sync(ALL_LANES, start, owner), last = __shfl_sync(ALL_LANES, stop, owner);
            const int begin = first + (index - __shfl_sync(ALL_LANES, sum - count, owner)) * rows_per_chunk;
            return {base + owner, first, last, begin, min(begin + rows_per_chunk, last)};
        }
        index -= __shfl_sync(ALL_LANES, sum, 31);
    }
    return {};
}

// Slots of the pool are 0 .. R - 1; everything else is padding.
__device__ __forceinline__ int slot_of(const int* slots, const Chunk& chunk, int R) {
    const int slot = chunk.begin < chunk.end ? slots[chunk.sequence] : -1;
    return slot < R ? slot : -1;
}

// --- eight channels, four taps ---

// 8 channels x COUNT values as they lie in memory, channel by channel.
template <int COUNT>
struct Block {
    Raw<8> raw[COUNT];

    __device__ __forceinline__ void load_from(const bf16* p) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) raw[i] = load_raw<8>(p, i);
    }
    __device__ __forceinline__ void unpack(float (&v)[8][COUNT]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const Values<8> values = widen(raw[i]);
#pragma unroll
            for (int e = 0; e < 8; ++e) v[(i * 8 + e) / COUNT][(i * 8 + e) % COUNT] = values.at[e];
        }
    }
};

__device__ __forceinline__ void store_state(bf16* p, const float (&window)[8][TAPS - 1]) {
#pragma unroll
    for (int i = 0; i < TAPS - 1; ++i) {
        Values<8> v;
#pragma unroll
        for (int e = 0; e < 8; ++e) v.at[e] = window[(i * 8 + e) / (TAPS - 1)][(i * 8 + e) % (TAPS - 1)];
        store<8>(p, i, v);
    }
}

// The window that the three rows before ``row`` make.
__device__ __forceinline__ void load_window(float (&window)[8][TAPS - 1], const bf16* x, size_t row, int C, int piece) {
#pragma unroll
    for (int j = 0; j < TAPS - 1; ++j) {
        const Values<8> v = load<8>(x + (row - (TAPS - 1) + j) * C, piece);
#pragma unroll
        for (int c = 0; c < 8; ++c) window[c][j] = v.at[c];
    }
}

// Sequences of one row each, as a decode step has them. A launch that begins early brings the state into L2 that the slot
// of the time names, and reads it together with the slot; where that is another by then, its state comes after it. A thread
// has CHANNELS: with eight, half as many multiprocessors work on one row, each twice as long.
constexpr int CHANNELS = 4;

// CHANNELS x COUNT values as they lie in memory, channel by channel, 8 bytes at a time.
template <int COUNT>
struct Few {
    uint2 raw[COUNT];

    __device__ __forceinline__ float at(int channel, int i) const {
        const int place = channel * COUNT + i;
        const u32 pair = place % 4 < 2 ? raw[place / 4].x : raw[place / 4].y;
        return __uint_as_float(place % 2 ? pair & 0xFFFF0000u : pair << 16);
    }
};
__device__ __forceinline__ uint2 narrow(float a, float b, float c, float d) {
    return make_uint2(bf16_pair(a, b), bf16_pair(c, d));
}

extern "C" __global__ void __launch_bounds__(THREADS, 8) causal_conv1d_one(
    const bf16* x,                    // [S, C]
    const bf16* __restrict__ weight,  // [C, 4]
    bf16* state,                      // [R, C, 3], in and out
    const int* slots,                 // [S]
    bf16* out,                        // [S, C]
    int R, int C, int blocks_per_row) {
    const int piece = (blockIdx.x % blocks_per_row) * THREADS + threadIdx.x, row = blockIdx.x / blocks_per_row;
    const bool is_inside = piece < C / CHANNELS;
    bf16* const own = state + (size_t)piece * CHANNELS * (TAPS - 1);
    auto state_in = [&](int slot) { return reinterpret_cast<uint2*>(own + (size_t)slot * C * (TAPS - 1)); };
    auto is_slot = [&](int slot) { return is_inside && (u32)slot < (u32)R; };

    // Stage 1: all that is read; nothing waits for the slot but the state.
    pdl_launch_dependents();
    const int guess = load_relaxed(slots + row);
    Few<TAPS> taps = {};
#pragma unroll
    for (int i = 0; i < TAPS && is_inside; i += 2) {
        const uint4 two = load_now(reinterpret_cast<const uint4*>(weight) + (piece * TAPS + i) / 2);
        taps.raw[i] = make_uint2(two.x, two.y), taps.raw[i + 1] = make_uint2(two.z, two.w);
    }
    if (threadIdx.x == 0 && is_slot(guess))  // those of the whole block
        prefetch_l2(state_in(guess), min(C / CHANNELS - piece, THREADS) * CHANNELS * (TAPS - 1) * (u32)sizeof(bf16));
    pdl_wait();
    const int named = slots[row];
    uint2 fresh = {};
    if (is_inside) fresh = reinterpret_cast<const uint2*>(x + (size_t)row * C)[piece];
    Few<TAPS - 1> before = {};
    int slot = guess;
#pragma unroll 1
    while (true) {  // as two branches, all loads would wait for the slot
#pragma unroll
        for (int i = 0; i < TAPS - 1 && is_slot(slot); ++i) before.raw[i] = state_in(slot)[i];
        make_opaque(slot);
        if (slot == named) break;
        slot = named;
    }

    // Stage 2: the row, and the new state.
    float v[CHANNELS] = {}, window[CHANNELS * (TAPS - 1)];
    if (is_slot(slot)) {
        const Few<1> newest{{fresh}};
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            const float w[TAPS] = {taps.at(c, 0), taps.at(c, 1), taps.at(c, 2), taps.at(c, 3)};
            const float old[TAPS - 1] = {before.at(c, 0), before.at(c, 1), before.at(c, 2)};
            v[c] = convolved(w, old, newest.at(c, 0));
            window[3 * c] = old[1], window[3 * c + 1] = old[2], window[3 * c + 2] = newest.at(c, 0);
        }
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i)
            state_in(slot)[i] = narrow(window[4 * i], window[4 * i + 1], window[4 * i + 2], window[4 * i + 3]);
    }
    if (is_inside) reinterpret_cast<uint2*>(out + (size_t)row * C)[piece] = narrow(v[0], v[1], v[2], v[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8) causal_conv1d_w8(
    const bf16* __restrict__ x,       // [M, C]
    const int* __restrict__ cu_rows,  // [S + 1], or null: one row a sequence
    const bf16* __restrict__ weight,  // [C, 4]
    bf16* __restrict__ state,         // [R, C, 3], in and out
    const int* __restrict__ slots,    // [S]
    bf16* __restrict__ out,           // [M, C]
    bf16* __restrict__ out_states,    // [M, C, 3], or null
    int M, int S, int R, int C, int W, int rows_per_chunk, int blocks_per_row) {
    const int piece = (blockIdx.x % blocks_per_row) * THREADS + threadIdx.x;
    const bool is_inside = piece < C / 8;
    const size_t place = (size_t)piece * 8 * (TAPS - 1);  // of these channels in a state

    // Stage 1: weights, then which rows, and what came before them.
    pdl_launch_dependents();
    Block<TAPS> taps = {};
    if (is_inside) taps.load_from(weight + (size_t)piece * 8 * TAPS);
    pdl_wait();
    const Chunk chunk = chunk_of(cu_rows, M, S, rows_per_chunk, blockIdx.x / blocks_per_row);
    const int slot = slot_of(slots, chunk, R);
    bf16* own_state = state + (size_t)max(slot, 0) * C * (TAPS - 1) + place;
    Raw<8> fresh[GROUP];
    auto fetch = [&](int first) {
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
            if (first + i < chunk.end) fresh[i] = load_raw<8>(x + (size_t)(first + i) * C, piece);
    };
    if (is_inside) fetch(chunk.begin);  // ahead of the state, whose place waits for the slot
    float w[8][TAPS], window[8][TAPS - 1] = {};
    taps.unpack(w);
    if (is_inside && slot >= 0) {
        if (chunk.is_first()) {
            Block<TAPS - 1> before;
            before.load_from(own_state);
            before.unpack(window);
        } else {
            load_window(window, x, chunk.begin, C, piece);
        }
    }

    // Stage 2: row after row, a few loads ahead.
    for (int first = chunk.begin; is_inside && first < chunk.end; first += GROUP) {
        if (first > chunk.begin) fetch(first);
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            if (first + i >= chunk.end) continue;
            const size_t row = first + i;
            Values<8> v = {};
            if (slot >= 0) {
                const Values<8> newest = widen(fresh[i]);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    v.at[c] = convolved(w[c], window[c], newest.at[c]);
                    window[c][0] = window[c][1], window[c][1] = window[c][2], window[c][2] = newest.at[c];
                }
            }
            store<8>(out + row * C, piece, v);
            if (out_states != nullptr) store_state(out_states + row * C * (TAPS - 1) + place, window);
        }
    }

    // Stage 3: the new state.
    if (is_inside && slot >= 0 && chunk.is_first()) {
        if (chunk.end < chunk.stop) load_window(window, x, chunk.stop, C, piece);
        store_state(own_state, window);
    }
}

// --- one channel, any number of taps ---

// Input t of a sequence, counted from its first row; those below 0 are the state's.
struct History {
    const bf16 *x, *before;
    size_t C;
    int memory;  // W - 1
    __device__ __forceinline__ bf16 at(int t) const { return t >= 0 ? x[t * C] : before[memory + t]; }
};

extern "C" __global__ void __launch_bounds__(THREADS, 8) causal_conv1d_w1(
    const bf16* __restrict__ x,       // [M, C]
    const int* __restrict__ cu_rows,  // [S + 1], or null: one row a sequence
    const bf16* __restrict__ weight,  // [C, W]
    bf16* __restrict__ state,         // [R, C, W - 1], in and out
    const int* __restrict__ slots,    // [S]
    bf16* __restrict__ out,           // [M, C]
    bf16* __restrict__ out_states,    // [M, C, W - 1], or null
    int M, int S, int R, int C, int W, int rows_per_chunk, int blocks_per_row) {
    const int channel = (blockIdx.x % blocks_per_row) * THREADS + threadIdx.x, memory = W - 1;
    pdl_launch_dependents();
    pdl_wait();
    const Chunk chunk = chunk_of(cu_rows, M, S, rows_per_chunk, blockIdx.x / blocks_per_row);
    const int slot = slot_of(slots, chunk, R);
    const bool is_inside = channel < C;
    bf16* own_state = state + ((size_t)max(slot, 0) * C + channel) * memory;
    const History history{x + (size_t)chunk.start * C + channel, own_state, (size_t)C, memory};

    // Stage 1: row after row.
    for (int row = chunk.begin; is_inside && row < chunk.end; ++row) {
        const int oldest = row - chunk.start - memory;
        float total = 0.0f;
        for (int j = 0; slot >= 0 && j < W; ++j) {
            const float tap = __bfloat162float(weight[(size_t)channel * W + j]);
            const float value = __bfloat162float(history.at(oldest + j));
            total = j == 0 ? tap * value : fmaf(tap, value, total);
        }
        out[(size_t)row * C + channel] = __float2bfloat16_rn(silu(total));
        for (int j = 0; out_states != nullptr && j < memory; ++j)
            out_states[((size_t)row * C + channel) * memory + j] =
                slot >= 0 ? history.at(oldest + 1 + j) : __float2bfloat16_rn(0.0f);
    }

    // Stage 2: the new state; each value comes from a later place than its own.
    if (is_inside && slot >= 0 && chunk.is_first())
        for (int j = 0; j < memory; ++j) own_state[j] = history.at(chunk.stop - chunk.start - memory + j);
}
