// Attention of one new token a sequence over a paged cache. Grid: see BlockPlace; launched by launch.py. With a gate, the
// bits are those of attention and sigmoid_gate_mul after it. sm_80 and newer.
//
// Nothing allows the next launch before blocks end: its own, which would take what these leave, would stand unevenly for all
// of their time, many on few multiprocessors. Steps of 8 and 16 sequences took 7 and 4% longer (27B, H200).
#include "attention.cuh"

#define PAGED_DECODE(NAME, D, SPREAD, BOUNDS)                                                                       \
    extern "C" __global__ void BOUNDS NAME##_d##D(                                                                  \
        const __nv_bfloat16* q,                    /* [S, Hq, D] */                                                 \
        const __nv_bfloat16* k_cache,              /* [P, B, Hk, D] */                                              \
        const __nv_bfloat16* v_cache,              /* [P, B, Hk, D] */                                              \
        const int* block_table,                    /* [S, L] */                                                     \
        const int* context_lens,                   /* [S] */                                                        \
        const __nv_bfloat16* gate,                 /* [S, Hq, D], or none */                                        \
        __nv_bfloat16* __restrict__ out,           /* [S, Hq, D] */                                                 \
        float* scratch, u32* zeros, /* where several share a row */                                                 \
        float scale, int L, int P, int B, u32 factor, int shift, int Hk, int per_key, int sharing, int most) {      \
        const Cache cache{k_cache, v_cache, P, B, factor, shift, Hk};                                               \
        const BlockPlace at(per_key);                                                                               \
        const size_t first = ((size_t)at.row * Hk * per_key + at.head) * D;                                         \
        const int* const table = block_table + (size_t)at.row * L;                                                  \
        wait_for_previous_launch();                                                                                 \
        const int entry = entry_of(cache, table, L, at.first_token<D, SPREAD>());                                   \
        const Row row{q + first, out + first, table, L, at.heads, at.key_head, context_lens[at.row],                \
                      gate ? gate + first : nullptr};                                                               \
        attend<D, SPREAD>(cache, row, entry, scale, at.team_of<D, SPREAD>(sharing, most, scratch, zeros));          \
    }

PAGED_DECODE(paged_decode, 64, false, ATTENTION_BOUNDS)
PAGED_DECODE(paged_decode, 128, false, ATTENTION_BOUNDS)
PAGED_DECODE(paged_decode, 256, false, ATTENTION_BOUNDS)
PAGED_DECODE(paged_decode_spread, 64, true, SPREAD_BOUNDS(64))
PAGED_DECODE(paged_decode_spread, 128, true, SPREAD_BOUNDS(128))
PAGED_DECODE(paged_decode_spread, 256, true, SPREAD_BOUNDS(256))

// Any D up to 1024. Grid: S * Hq.
extern "C" __global__ void __launch_bounds__(ANY_THREADS) paged_decode_any(
    const __nv_bfloat16* q,                    // [S, Hq, D]
    const __nv_bfloat16* k_cache,              // [P, B, Hk, D]
    const __nv_bfloat16* v_cache,              // [P, B, Hk, D]
    const int* block_table,                    // [S, L]
    const int* context_lens,                   // [S]
    const __nv_bfloat16* gate,                 // [S, Hq, D], or none
    __nv_bfloat16* __restrict__ out,           // [S, Hq, D]
    float scale, int L, int P, int B, u32 factor, int shift, int Hk, int per_key, int D) {
    allow_next_launch();
    wait_for_previous_launch();
    const Cache cache{k_cache, v_cache, P, B, factor, shift, Hk};
    const int sequence = blockIdx.x / (Hk * per_key), head = blockIdx.x % (Hk * per_key);
    const size_t first = (size_t)blockIdx.x * D;
    const int length = checked_length(context_lens[sequence], cache, L);
    const int* const table = block_table + (size_t)sequence * L;
    const Row row{q + first, out + first, table, L, 1, head / per_key, length, gate ? gate + first : nullptr};
    attend_any(cache, row, scale, D);
}
