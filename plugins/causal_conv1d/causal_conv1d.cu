// The causal convolution before the gated delta rule, BF16 rows [M, C] of several sequences in one launch.
//
//   out[m, c] = silu(sum_j weight[c, j] * input[t - (W - 1) + j, c])          t: the position of row m in its sequence
//
// Inputs before the first row of a sequence are the W - 1 of its slot in ``state``, oldest first. The kernel updates
// the slot past all rows. ``out_states``, if given, gets the state after each row. Sequence s has rows cu_rows[s] to
// cu_rows[s + 1] - 1, or one row without cu_rows. Decode steps have a separate kernel.
//
// Work: a sequence is divided into chunks of at least W - 1 rows. A thread has the channels of one vector (8 if W = 4,
// else one) of one chunk, row after row. Only the first chunk needs the old state. Its thread also writes the new one,
// from rows that the kernel does not write, so that no block waits for another.
//
// Numerics: FP32, taps added oldest first by fused multiply-add, silu, one rounding. The bits of a row depend neither
// on the number of rows nor on the width. A slot of -1 is padding: zeros, and no state is touched. The contract rejects
// slots outside the pool and offsets that do not rise from 0 to M. Such a slot is padding here, and such offsets are
// clamped.
//
// Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "causal_conv.cuh"
#include "global_memory.cuh"
#include "opaque.cuh"
#include "pdl.cuh"

constexpr int THREADS = 64;
constexpr int ROWS_IN_FLIGHT = 4;  // rows with loads in flight together

// Part of a sequence: rows begin .. end - 1 out of start .. stop - 1.
struct RowChunk {
    int sequence, start, stop, begin, end;
    __device__ __forceinline__ bool is_first() const { return begin == start; }
};

// The chunk with this index, counted over all sequences. Past the last, an empty one. By all lanes of a warp together.
__device__ __forceinline__ RowChunk chunk_of(const int* cu_rows, int M, int S, int rows_per_chunk, int index) {
    if (cu_rows == nullptr) return index < S ? RowChunk{index, index, index + 1, index, index + 1} : RowChunk{};
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

// Slots of the pool are 0 .. R - 1. Everything else is padding.
__device__ __forceinline__ int slot_of(const int* slots, const RowChunk& chunk, int R) {
    const int slot = chunk.begin < chunk.end ? slots[chunk.sequence] : -1;
    return slot < R ? slot : -1;
}

// --- eight channels, four taps ---

// 8 channels x COUNT values in memory order, channel by channel.
template <int COUNT>
struct PackedVectors {
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

// The window of the three rows before ``row``.
__device__ __forceinline__ void load_window(float (&window)[8][TAPS - 1], const bf16* x, size_t row, int C, int vec) {
#pragma unroll
    for (int j = 0; j < TAPS - 1; ++j) {
        const Values<8> v = load<8>(x + (row - (TAPS - 1) + j) * C, vec);
#pragma unroll
        for (int c = 0; c < 8; ++c) window[c][j] = v.at[c];
    }
}

// Sequences of one row each: a decode step. Before the wait for the kernel before, the slot is read speculatively and
// its state is prefetched into L2. The state is then loaded together with the slot. If the slot has changed, its state
// is loaded again. A thread has CHANNELS channels. With eight, half as many multiprocessors would work on a row, each
// twice as long.
constexpr int CHANNELS = 4;

// CHANNELS x COUNT values in memory order, channel by channel, in words of 8 bytes.
template <int COUNT>
struct PackedChannels {
    uint2 raw[COUNT];

    __device__ __forceinline__ float at(int channel, int i) const {
        const int state_offset = channel * COUNT + i;
        const u32 pair = state_offset % 4 < 2 ? raw[state_offset / 4].x : raw[state_offset / 4].y;
        return __uint_as_float(state_offset % 2 ? pair & 0xFFFF0000u : pair << 16);
    }
};
__device__ __forceinline__ uint2 narrow(float a, float b, float c, float d) {
    return make_uint2(bf16_pair(a, b), bf16_pair(c, d));
}

extern "C" __global__ void __launch_bounds__(THREADS, 8) causal_conv1d_decode(
    const bf16* x,                    // [S, C]
    const bf16* __restrict__ weight,  // [C, 4]
    bf16* state,                      // [R, C, 3], in and out
    const int* slots,                 // [S]
    bf16* out,                        // [S, C]
    int R, int C, int blocks_per_row) {
    const int vec = (blockIdx.x % blocks_per_row) * THREADS + threadIdx.x, row = blockIdx.x / blocks_per_row;
    const bool has_channels = vec < C / CHANNELS;
    bf16* const state_of_vec = state + (size_t)vec * CHANNELS * (TAPS - 1);
    auto state_in = [&](int slot) { return reinterpret_cast<uint2*>(state_of_vec + (size_t)slot * C * (TAPS - 1)); };
    auto is_slot = [&](int slot) { return has_channels && (u32)slot < (u32)R; };

    // Stage 1: all loads. Only those of the state wait for the slot.
    pdl_launch_dependents();
    const int speculative_slot = load_relaxed(slots + row);
    PackedChannels<TAPS> taps = {};
#pragma unroll
    for (int i = 0; i < TAPS && has_channels; i += 2) {
        const uint4 two = load_now(reinterpret_cast<const uint4*>(weight) + (vec * TAPS + i) / 2);
        taps.raw[i] = make_uint2(two.x, two.y), taps.raw[i + 1] = make_uint2(two.z, two.w);
    }
    if (threadIdx.x == 0 && is_slot(speculative_slot))  // the states of the whole block
        prefetch_l2(
            state_in(speculative_slot), min(C / CHANNELS - vec, THREADS) * CHANNELS * (TAPS - 1) * (u32)sizeof(bf16));
    pdl_wait();
    const int slot_of_row = slots[row];
    uint2 loaded = {};
    if (has_channels) loaded = reinterpret_cast<const uint2*>(x + (size_t)row * C)[vec];
    PackedChannels<TAPS - 1> previous = {};
    int slot = speculative_slot;
#pragma unroll 1
    while (true) {  // two branches would make all loads wait for the slot
#pragma unroll
        for (int i = 0; i < TAPS - 1 && is_slot(slot); ++i) previous.raw[i] = state_in(slot)[i];
        make_opaque(slot);
        if (slot == slot_of_row) break;
        slot = slot_of_row;
    }

    // Stage 2: the row and the new state.
    float v[CHANNELS] = {}, window[CHANNELS * (TAPS - 1)];
    if (is_slot(slot)) {
        const PackedChannels<1> newest{{loaded}};
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            const float w[TAPS] = {taps.at(c, 0), taps.at(c, 1), taps.at(c, 2), taps.at(c, 3)};
            const float old[TAPS - 1] = {previous.at(c, 0), previous.at(c, 1), previous.at(c, 2)};
            v[c] = convolved(w, old, newest.at(c, 0));
            window[3 * c] = old[1], window[3 * c + 1] = old[2], window[3 * c + 2] = newest.at(c, 0);
        }
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i)
            state_in(slot)[i] = narrow(window[4 * i], window[4 * i + 1], window[4 * i + 2], window[4 * i + 3]);
    }
    if (has_channels) reinterpret_cast<uint2*>(out + (size_t)row * C)[vec] = narrow(v[0], v[1], v[2], v[3]);
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
    const int vec = (blockIdx.x % blocks_per_row) * THREADS + threadIdx.x;
    const bool has_channels = vec < C / 8;
    const size_t state_offset = (size_t)vec * 8 * (TAPS - 1);  // of these channels in a state

    // Stage 1: the weights, the rows of the chunk, and the window before them.
    pdl_launch_dependents();
    PackedVectors<TAPS> taps = {};
    if (has_channels) taps.load_from(weight + (size_t)vec * 8 * TAPS);
    pdl_wait();
    const RowChunk chunk = chunk_of(cu_rows, M, S, rows_per_chunk, blockIdx.x / blocks_per_row);
    const int slot = slot_of(slots, chunk, R);
    bf16* state_of_channel = state + (size_t)max(slot, 0) * C * (TAPS - 1) + state_offset;
    Raw<8> loaded[ROWS_IN_FLIGHT];
    auto fetch = [&](int first) {
#pragma unroll
        for (int i = 0; i < ROWS_IN_FLIGHT; ++i)
            if (first + i < chunk.end) loaded[i] = load_raw<8>(x + (size_t)(first + i) * C, vec);
    };
    if (has_channels) fetch(chunk.begin);  // before the state, which waits for the slot
    float w[8][TAPS], window[8][TAPS - 1] = {};
    taps.unpack(w);
    if (has_channels && slot >= 0) {
        if (chunk.is_first()) {
            PackedVectors<TAPS - 1> previous;
            previous.load_from(state_of_channel);
            previous.unpack(window);
        } else {
            load_window(window, x, chunk.begin, C, vec);
        }
    }

    // Stage 2: row after row, with loads ahead.
    for (int first = chunk.begin; has_channels && first < chunk.end; first += ROWS_IN_FLIGHT) {
        if (first > chunk.begin) fetch(first);
#pragma unroll
        for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
            if (first + i >= chunk.end) continue;
            const size_t row = first + i;
            Values<8> v = {};
            if (slot >= 0) {
                const Values<8> newest = widen(loaded[i]);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    v.at[c] = convolved(w[c], window[c], newest.at[c]);
                    window[c][0] = window[c][1], window[c][1] = window[c][2], window[c][2] = newest.at[c];
                }
            }
            store<8>(out + row * C, vec, v);
            if (out_states != nullptr) store_state(out_states + row * C * (TAPS - 1) + state_offset, window);
        }
    }

    // Stage 3: the new state.
    if (has_channels && slot >= 0 && chunk.is_first()) {
        if (chunk.end < chunk.stop) load_window(window, x, chunk.stop, C, vec);
        store_state(state_of_channel, window);
    }
}

// --- one channel, any number of taps ---

// Input t of a sequence, counted from its first row. Those below 0 come from the state.
struct History {
    const bf16 *x, *previous;
    size_t C;
    int memory;  // W - 1
    __device__ __forceinline__ bf16 at(int t) const { return t >= 0 ? x[t * C] : previous[memory + t]; }
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
    const RowChunk chunk = chunk_of(cu_rows, M, S, rows_per_chunk, blockIdx.x / blocks_per_row);
    const int slot = slot_of(slots, chunk, R);
    const bool has_channels = channel < C;
    bf16* state_of_channel = state + ((size_t)max(slot, 0) * C + channel) * memory;
    const History history{x + (size_t)chunk.start * C + channel, state_of_channel, (size_t)C, memory};

    // Stage 1: row after row.
    for (int row = chunk.begin; has_channels && row < chunk.end; ++row) {
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

    // Stage 2: the new state. Each value comes from a later position than its own.
    if (has_channels && slot >= 0 && chunk.is_first())
        for (int j = 0; j < memory; ++j) state_of_channel[j] = history.at(chunk.stop - chunk.start - memory + j);
}
