// The gated delta rule without a norm: decode (one row a sequence), chunks and verify (a few rows, with the state after
// each), and prefill. Launched by launch.py. sm_80 and newer.
#include "any_size.cuh"
#include "bf16.cuh"
#include "delta_rule.cuh"
#include "named_barrier.cuh"
#include "pdl.cuh"

// Dk = 128, Dv a multiple of 32, sequences of one row. Grid: Dv / 32 x value_heads x S. Parameters that an earlier
// kernel writes are not __restrict__, because loads stand before the wait (pdl.cuh).
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 5) delta_rule_decode_128(
    const __nv_bfloat16* qkv,  // [S, 2 key_heads Dk + value_heads Dv]
    const float* decay,        // [S, value_heads]
    const float* beta,         // [S, value_heads]
    float* pool,               // [slots, value_heads, Dk, Dv]
    const int* slots,          // [S]
    __nv_bfloat16* out,        // [S, value_heads Dv]
    int pool_slots, int key_heads, int key_dim, int value_heads, int value_dim) {
    __shared__ WarpSums warp_sums;
    pdl_launch_dependents();
    const Heads heads{key_heads, KEY_DIM, value_heads, value_dim};
    const DecodeRow row(heads, TilePosition(heads, blockIdx.x, blockIdx.y, blockIdx.z), qkv, slots, pool, pool_slots);
    const TilePosition& at = row.at;
    row.prefetch_state();
    pdl_wait();
    RowInputs in;
    StatePart state;
    const int slot = row.load(in, state, decay, beta);
    const StepOperands operands(in);  // while the state is in flight
    float4 output = make_float4(0, 0, 0, 0);
    if (row.is_inside(slot)) {
        output = step(state, operands, warp_sums, at, [] { __syncthreads(); });
        state.store(row.state_of(slot), value_dim);
    }
    __nv_bfloat16* const to = out + ((size_t)at.sequence * value_heads + at.head) * value_dim;
    if (at.warp == 0 && at.lane < 8) *reinterpret_cast<uint2*>(to + at.column) = narrow(output);
}

// Row after row, warp-specialised. Four warps keep the state. Two producer warps have every second row each: they
// prepare it PREPARED_AHEAD rows ahead, and write its output afterwards. One barrier for each row. H200, 2048 rows of
// 32 heads, us a row: this 0.48; with all work of a producer warp in one step 0.54; with all warps preparing rows 0.75.
constexpr int PREPARED_AHEAD = 4, SLOTS = 8, LOADS_AHEAD = 3, ROWS_WARPS = TILE_WARPS + 2,
              ROWS_THREADS = ROWS_WARPS * 32;
static_assert(PREPARED_AHEAD % 2 == 0 && SLOTS >= PREPARED_AHEAD + 2);
constexpr int ROWS_BLOCKS =
    __CUDA_ARCH__ >= 900 ? 3 : 2;  // per multiprocessor; below sm_90 a third block spills registers

struct Prepared {
    uint4 q[KEY_DIM / 8], k[KEY_DIM / 8];
    uint2 v[COLUMNS / 4];
    float4 scales;  // decay, beta, unit_q, unit_k
    float qk;

    __device__ __forceinline__ StepOperands step_of(int warp, int lane) const {
        StepOperands step;
        step.q = q[warp * 4 + (lane >> 3)], step.k = k[warp * 4 + (lane >> 3)], step.v = v[lane & 7];
        step.decay = scales.x, step.beta = scales.y, step.unit_q = scales.z, step.unit_k = scales.w, step.qk = qk;
        return step;
    }
};

// A row as its preparing warp loads it.
struct LoadedRow {
    uint2 q, k, v;
    float decay, beta;
};

__device__ __forceinline__ void sync_rows() { named_barrier_sync(1, ROWS_THREADS); }

extern "C" __global__ void __launch_bounds__(ROWS_THREADS, ROWS_BLOCKS) delta_rule_rows_128(
    const __nv_bfloat16* __restrict__ qkv,  // [M, 2 key_heads Dk + value_heads Dv]
    const float* __restrict__ decay,        // [M, value_heads]
    const float* __restrict__ beta,         // [M, value_heads]
    float* __restrict__ pool,               // [slots, value_heads, Dk, Dv]
    const int* __restrict__ slots,          // [S]
    const int* __restrict__ cu_rows,        // [S + 1], or null: rows_each a sequence
    __nv_bfloat16* __restrict__ out,        // [M, value_heads Dv]
    float* __restrict__ states,             // [M, value_heads, Dk, Dv], or null
    int M, int pool_slots, int rows_each, int key_heads, int key_dim, int value_heads, int value_dim) {
    __shared__ WarpSums warp_sums;
    __shared__ Prepared ring[SLOTS];
    pdl_launch_dependents();
    pdl_wait();
    const Heads heads{key_heads, key_dim, value_heads, value_dim};
    const TilePosition at(heads, blockIdx.x, blockIdx.y, blockIdx.z);
    const int lane = at.lane, warp = threadIdx.x >> 5, slot = slots[at.sequence];
    const Rows rows(cu_rows, rows_each, at.sequence, M);
    const int count = rows.stop - rows.start;
    if (count == 0) return;
    auto out_at = [&](int row) { return out + ((size_t)row * value_heads + at.head) * value_dim + at.column; };
    auto states_at = [&](int row) {
        return states + ((size_t)row * value_heads + at.head) * heads.state_size() + at.state_offset;
    };
    if ((u32)slot >= (u32)pool_slots) {  // padding
        const StatePart zeros = {};
        for (int row = rows.start; row < rows.stop && warp < TILE_WARPS; ++row) {
            if (warp == 0 && lane < 8) *reinterpret_cast<uint2*>(out_at(row)) = make_uint2(0, 0);
            if (states) zeros.store(states_at(row), value_dim);
        }
        return;
    }

    if (warp < TILE_WARPS) {  // state warps
        float* const head_state = pool + ((size_t)slot * value_heads + at.head) * heads.state_size() + at.state_offset;
        StatePart state;
        state.load(head_state, value_dim);
        sync_rows();
        StepOperands next = ring[0].step_of(warp, lane);
#pragma unroll 2
        for (int i = 0; i < count; ++i) {
            const StepOperands now = next;
            if (i + 1 < count) next = ring[(i + 1) % SLOTS].step_of(warp, lane);
            update_state(state, now, warp_sums, i & 1, warp, lane, [] { sync_rows(); });
            if (states) state.store(states_at(rows.start + i), value_dim);
        }
        sync_rows();
        state.store(head_state, value_dim);
    } else {  // warps of every second row
        const int first = warp - TILE_WARPS;
        const size_t keys = (size_t)key_heads * KEY_DIM, key = (size_t)heads.key_head(at.head) * KEY_DIM + 4 * lane;
        LoadedRow ahead[LOADS_AHEAD] = {};
        auto fetch = [&](LoadedRow& into, int i) {
            if (i >= count) return;
            const size_t row = rows.start + i;
            const __nv_bfloat16* from = qkv + row * heads.width();
            into.q = *reinterpret_cast<const uint2*>(from + key);
            into.k = *reinterpret_cast<const uint2*>(from + keys + key);
            into.v = *reinterpret_cast<const uint2*>(from + 2 * keys + (size_t)at.head * value_dim + at.column);
            into.decay = decay[row * value_heads + at.head];
            into.beta = beta[row * value_heads + at.head];
        };
        auto prepare = [&](int i) {  // the oldest loaded row
            if (i >= count) return;
            Prepared& to = ring[i % SLOTS];
            const InverseNorms inverse_norms(widen(ahead[0].q), widen(ahead[0].k));
            reinterpret_cast<uint2*>(to.q)[lane] = ahead[0].q;
            reinterpret_cast<uint2*>(to.k)[lane] = ahead[0].k;
            if (lane < 8) to.v[lane] = ahead[0].v;
            if (lane == 0) {
                to.scales = make_float4(ahead[0].decay, ahead[0].beta, inverse_norms.q, inverse_norms.k);
                to.qk = inverse_norms.qk;
            }
#pragma unroll
            for (int j = 0; j + 1 < LOADS_AHEAD; ++j) ahead[j] = ahead[j + 1];
            fetch(ahead[LOADS_AHEAD - 1], i + 2 * LOADS_AHEAD);
        };
#pragma unroll
        for (int j = 0; j < LOADS_AHEAD; ++j) fetch(ahead[j], first + 2 * j);
#pragma unroll
        for (int i = 0; i < PREPARED_AHEAD; i += 2) prepare(first + i);
        sync_rows();
        for (int i = 0; i < count; ++i) {
            sync_rows();
            if ((i & 1) != first) {  // the step of the other warp's row: half of the work is done in each step
                if (i > first) prepare(i - 1 + PREPARED_AHEAD);
            } else if (lane < 8) {
                const StepOperands row = ring[i % SLOTS].step_of(0, lane);
                const float4 delta = delta_of(row, warp_sums.total(i & 1, 0, lane));
                const float4 output = output_of(row, delta, warp_sums.total(i & 1, 1, lane));
                *reinterpret_cast<uint2*>(out_at(rows.start + i)) = narrow(output);
            }
        }
        sync_rows();
    }
}

// Any Dk and Dv. Grid: S * value_heads.
extern "C" __global__ void __launch_bounds__(ANY_THREADS) delta_rule_any(
    const __nv_bfloat16* __restrict__ qkv,  // [M, 2 key_heads Dk + value_heads Dv]
    const float* __restrict__ decay,        // [M, value_heads]
    const float* __restrict__ beta,         // [M, value_heads]
    float* __restrict__ pool,               // [slots, value_heads, Dk, Dv]
    const int* __restrict__ slots,          // [S]
    const int* __restrict__ cu_rows,        // [S + 1], or null: rows_each a sequence
    __nv_bfloat16* __restrict__ out,        // [M, value_heads Dv]
    float* __restrict__ states,             // [M, value_heads, Dk, Dv], or null
    int M, int pool_slots, int rows_each, int key_heads, int key_dim, int value_heads, int value_dim) {
    __shared__ float sums[3][ANY_WARPS];
    pdl_launch_dependents();
    pdl_wait();
    const Heads heads{key_heads, key_dim, value_heads, value_dim};
    const int head = blockIdx.x % value_heads, sequence = blockIdx.x / value_heads, slot = slots[sequence];
    const Rows rows(cu_rows, rows_each, sequence, M);
    const bool is_padding = (u32)slot >= (u32)pool_slots;
    float* const state = pool + ((size_t)(is_padding ? 0 : slot) * value_heads + head) * heads.state_size();
#pragma unroll 1
    for (int row = rows.start; row < rows.stop; ++row) {
        const size_t at = (size_t)row * value_heads + head;
        const AnyRow in(heads, qkv, row, head, decay[at], beta[at], sums);
        float* const after = states ? states + at * heads.state_size() : nullptr;
#pragma unroll 1
        for (int column = threadIdx.x; column < value_dim; column += ANY_THREADS) {
            const float output = is_padding ? 0.0f : in.step(heads, state, column, after);
            out[at * value_dim + column] = __float2bfloat16_rn(output);
            for (int i = 0; is_padding && after && i < key_dim; ++i) after[(size_t)i * value_dim + column] = 0.0f;
        }
    }
}
