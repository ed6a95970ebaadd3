// Attention of rows over a paged cache: of one new token a sequence, or of many (cu_rows), where each is the decode step of
// its prefix. Grid: see BlockPlace; launched by launch.py. With a gate, the bits are those of attention and
// sigmoid_gate_mul after it. sm_80 and newer.
//
// A row that no sequence has (cu_rows that do not share the rows out), and one whose context is shorter than the rows of
// its sequence, are zeros. Rows of a sequence follow each other, so that what they share of the cache comes from L2.
//
// Nothing allows the next launch before blocks end: its own, which would take what these leave, would stand unevenly for all
// of their time, many on few multiprocessors. Steps of 8 and 16 sequences took 7 and 4% longer (27B, H200).
#include "attention.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"

// A row's sequence, and what its context lacks of the sequence's: a row may be a sequence (no cu_rows).
struct Prefix {
    int sequence, least = 0x80000000, lacking = 0;  // a context shorter than ``least`` is none

    __device__ __forceinline__ Prefix(const int* cu_rows, int S, int row) : sequence(row) {
        if (!cu_rows) return;
        int low = 0, high = S;  // the last sequence that begins at the row or before, hence not an empty one
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (cu_rows[middle] <= row) low = middle;
            else high = middle;
        }
        sequence = low, least = 0x7fffffff;
        if (S == 0 || cu_rows[low] > row || row >= cu_rows[low + 1]) return;
        least = cu_rows[low + 1] - cu_rows[low], lacking = cu_rows[low + 1] - 1 - row;
    }
    // Loaded where ways have met: on one of them it would be waited for before what the table says is asked for.
    __device__ __forceinline__ int length(const int* context_lens, int S) const {
        const int whole = load_now_if(S > 0, context_lens + sequence, NOWHERE);
        return whole < least ? 0 : whole - lacking;
    }
};

#define PAGED_DECODE(NAME, D, SPREAD, BOUNDS)                                                                       \
    extern "C" __global__ void BOUNDS NAME##_d##D(                                                                  \
        const __nv_bfloat16* q,                    /* [M, Hq, D] */                                                 \
        const __nv_bfloat16* k_cache,              /* [P, B, Hk, D] */                                              \
        const __nv_bfloat16* v_cache,              /* [P, B, Hk, D] */                                              \
        const int* block_table,                    /* [S, L] */                                                     \
        const int* cu_rows,                        /* [S + 1], or none: a row is a sequence */                      \
        const int* context_lens,                   /* [S] */                                                        \
        const __nv_bfloat16* gate,                 /* [M, Hq, D], or none */                                        \
        __nv_bfloat16* __restrict__ out,           /* [M, Hq, D] */                                                 \
        float* scratch, u32* zeros, /* where several share a row */                                                 \
        float scale, int S, int L, int P, int B, u32 factor, int shift, int Hk, int per_key, int sharing, int most) { \
        const Cache cache{k_cache, v_cache, P, B, factor, shift, Hk};                                               \
        pdl_wait();                                                                                 \
        const Prefix prefix(cu_rows, S, blockIdx.x);                                                                \
        const int* const table = block_table + (size_t)prefix.sequence * L;                                         \
        const BlockPlace at(per_key);                                                                               \
        auto row_of = [&](int length) {                                                                             \
            const size_t first = ((size_t)at.row * Hk * per_key + at.head) * D;                                     \
            return Row{q + first, out + first, table, L, at.heads, at.key_head, length,                             \
                       gate ? gate + first : nullptr};                                                              \
        };                                                                                                          \
        if (SPREAD && (int)blockIdx.z >= sharing) {                                                                 \
            combine_pieces<D>(cache, row_of(prefix.length(context_lens, S)),                                        \
                              at.team_of<D, true>(sharing, most, scratch, zeros));                                  \
            return;                                                                                                 \
        }                                                                                                           \
        const Entries entries = at.entries_of<D, SPREAD, false>(cache, table, S > 0 ? L : 0, most);                 \
        const Row row = row_of(prefix.length(context_lens, S));                                                     \
        attend<D, SPREAD>(cache, row, entries, scale, at.team_of<D, SPREAD>(sharing, most, scratch, zeros));        \
    }

PAGED_DECODE(paged_decode, 64, false, ATTENTION_BOUNDS)
PAGED_DECODE(paged_decode, 128, false, ATTENTION_BOUNDS)
PAGED_DECODE(paged_decode, 256, false, ATTENTION_BOUNDS)
PAGED_DECODE(paged_decode_spread, 64, true, SPREAD_BOUNDS(64))
PAGED_DECODE(paged_decode_spread, 128, true, SPREAD_BOUNDS(128))
PAGED_DECODE(paged_decode_spread, 256, true, SPREAD_BOUNDS(256))

// Any D up to 1024. Grid: M * Hq.
extern "C" __global__ void __launch_bounds__(ANY_THREADS) paged_decode_any(
    const __nv_bfloat16* q,                    // [M, Hq, D]
    const __nv_bfloat16* k_cache,              // [P, B, Hk, D]
    const __nv_bfloat16* v_cache,              // [P, B, Hk, D]
    const int* block_table,                    // [S, L]
    const int* cu_rows,                        // [S + 1], or none: a row is a sequence
    const int* context_lens,                   // [S]
    const __nv_bfloat16* gate,                 // [M, Hq, D], or none
    __nv_bfloat16* __restrict__ out,           // [M, Hq, D]
    float scale, int S, int L, int P, int B, u32 factor, int shift, int Hk, int per_key, int D) {
    pdl_launch_dependents();
    pdl_wait();
    const Cache cache{k_cache, v_cache, P, B, factor, shift, Hk};
    const int head = blockIdx.x % (Hk * per_key);
    const Prefix prefix(cu_rows, S, blockIdx.x / (Hk * per_key));
    const size_t first = (size_t)blockIdx.x * D;
    const Row row{q + first, out + first, block_table + (size_t)prefix.sequence * L, L, 1, head / per_key,
                  checked_length(prefix.length(context_lens, S), cache, L), gate ? gate + first : nullptr};
    attend_any(cache, row, scale, D);
}
