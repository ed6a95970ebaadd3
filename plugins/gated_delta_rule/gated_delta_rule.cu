// Every form without a norm: decode (one row a sequence), chunks and verify (a few rows, the state after each kept), and
// prefill. Launched by launch.py. sm_80 and newer.
#include "delta_rule.cuh"
#include "any_size.cuh"

// Rows of one tile, with the inputs of AHEAD of them on their way; with an AHEAD of 1 there is one row only.
template <int AHEAD>
__device__ __forceinline__ void delta_rule_tile(const __nv_bfloat16* qkv, const float* decay, const float* beta, float* pool,
                                                const int* slots, const int* cu_rows, __nv_bfloat16* out, float* states, int M,
                                                int pool_slots, int rows_each, const Heads& heads) {
    __shared__ Exchange exchange;
    allow_next_launch();
    wait_for_previous_launch();
    const int value_dim = heads.value_dim, value_heads = heads.value_heads;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tiles = value_dim / COLUMNS;
    const int column = blockIdx.x % tiles * COLUMNS + 4 * (lane & 7);
    const int head = blockIdx.x / tiles % value_heads, sequence = blockIdx.x / tiles / value_heads;
    const size_t own = (size_t)(warp * 32 + (lane >> 3) * ROWS) * value_dim + column;  // in a head's state
    const bool writes_out = warp == 0 && lane < 8;
    const int slot = slots[sequence];
    const Rows rows(cu_rows, AHEAD == 1 ? 1 : rows_each, sequence, M);
    const bool is_padding = (u32)slot >= (u32)pool_slots, moves = rows.start < rows.stop && !is_padding;
    float* const place = pool + ((size_t)(is_padding ? 0 : slot) * value_heads + head) * heads.state_size() + own;

    RowInputs ahead[AHEAD];
    auto fetch = [&](RowInputs& into, int row) {
        if (row < rows.stop && !is_padding) into.load(heads, qkv, decay, beta, row, head, column, warp, lane);
    };
    StatePart state = {};
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(ahead[i], rows.start + i);
    if (moves) state.load(place, value_dim);
    RowStep next;
    if (moves) next = RowStep(ahead[0]);
    const int end = AHEAD == 1 ? min(rows.stop, rows.start + 1) : rows.stop;
    for (int first = rows.start; first < end; first += AHEAD)
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int row = first + i;
            if (row >= rows.stop) break;  // the same for the whole block, as is all of a row
            float4 mixed = make_float4(0, 0, 0, 0);
            if (!is_padding) {
                const RowStep now = next;
                if (AHEAD > 1) {
                    fetch(ahead[i], row + AHEAD);
                    if (row + 1 < rows.stop) next = RowStep(ahead[(i + 1) % AHEAD]);
                }
                mixed = step(state, now, exchange, row & 1, warp, lane);
            }
            const size_t at = (size_t)row * value_heads + head;
            if (writes_out) *reinterpret_cast<uint2*>(out + at * value_dim + column) = narrow(mixed);
            if (states) state.store(states + at * heads.state_size() + own, value_dim);
        }
    if (moves) state.store(place, value_dim);
}

// Dk = 128, Dv a multiple of 32. Grid: S * value_heads * Dv / 32. ``one``: sequences of a single row, many blocks an SM.
#define DELTA_RULE(NAME, AHEAD, BLOCKS)                                                                              \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, BLOCKS) delta_rule_##NAME(                            \
        const __nv_bfloat16* __restrict__ qkv, /* [M, 2 key_heads Dk + value_heads Dv] */                            \
        const float* __restrict__ decay,       /* [M, value_heads] */                                                \
        const float* __restrict__ beta,        /* [M, value_heads] */                                                \
        float* __restrict__ pool,              /* [slots, value_heads, Dk, Dv] */                                    \
        const int* __restrict__ slots,         /* [S] */                                                             \
        const int* __restrict__ cu_rows,       /* [S + 1], or null: rows_each a sequence */                          \
        __nv_bfloat16* __restrict__ out,       /* [M, value_heads Dv] */                                             \
        float* __restrict__ states,            /* [M, value_heads, Dk, Dv], or null */                               \
        int M, int pool_slots, int rows_each, int key_heads, int key_dim, int value_heads, int value_dim) {          \
        delta_rule_tile<AHEAD>(qkv, decay, beta, pool, slots, cu_rows, out, states, M, pool_slots, rows_each,        \
                               Heads{key_heads, key_dim, value_heads, value_dim});                                   \
    }

DELTA_RULE(one_128, 1, 5)
DELTA_RULE(rows_128, 4, 2)

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
    allow_next_launch();
    wait_for_previous_launch();
    const Heads heads{key_heads, key_dim, value_heads, value_dim};
    const int head = blockIdx.x % value_heads, sequence = blockIdx.x / value_heads, slot = slots[sequence];
    const Rows rows(cu_rows, rows_each, sequence, M);
    const bool is_padding = (u32)slot >= (u32)pool_slots;
    float* const state = pool + ((size_t)(is_padding ? 0 : slot) * value_heads + head) * heads.state_size();
    for (int row = rows.start; row < rows.stop; ++row) {
        const size_t at = (size_t)row * value_heads + head;
        const AnyRow in(heads, qkv, row, head, decay[at], beta[at], sums);
        float* const after = states ? states + at * heads.state_size() : nullptr;
        for (int column = threadIdx.x; column < value_dim; column += ANY_THREADS) {
            const float mixed = is_padding ? 0.0f : in.step(heads, state, column, after);
            out[at * value_dim + column] = __float2bfloat16_rn(mixed);
            for (int i = 0; is_padding && after && i < key_dim; ++i) after[(size_t)i * value_dim + column] = 0.0f;
        }
    }
}
