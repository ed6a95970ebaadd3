// Attention of one new token a sequence in one launch, from projections to the gated result (attention.cuh, fresh.cuh).
// Grid: see BlockCoord. Launched by launch.py. sm_80 and newer. It does not let the next kernel start early (see
// paged_decode.cu).
//
// The newest token of a context is the row's own, and its slot is that token's place. The contract rejects slots
// outside the cache. A row with such a slot, or with slot -1, adds no token: its context is that of the cache.
#include "bf16.cuh"
#include "fresh.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"

#define PAGED_DECODE_FRESH(NAME, D, SPLIT_KV, BOUNDS)                                                                  \
    extern "C" __global__ void BOUNDS NAME##_d##D(                                                                     \
        const bf16* q,                     /* [S, Hq, D] */                                                            \
        const bf16* k,                     /* [S, Hk, D] */                                                            \
        const bf16* v,                     /* [S, Hk, D] */                                                            \
        const bf16* __restrict__ q_weight, /* [D] */                                                                   \
        const bf16* __restrict__ k_weight, /* [D] */                                                                   \
        const int* positions,              /* [S] */                                                                   \
        const int* slots,                  /* [S] */                                                                   \
        bf16* k_cache,                     /* [P, B, Hk, D], in and out */                                             \
        bf16* v_cache,                     /* [P, B, Hk, D], in and out */                                             \
        const int* block_table,            /* [S, L] */                                                                \
        const int* context_lens,           /* [S] */                                                                   \
        const bf16* gate,                  /* [S, Hq, D], or none */                                                   \
        bf16* __restrict__ out,            /* [S, Hq, D] */                                                            \
        float* scratch, u32* zeros,        /* if several blocks share a row */                                         \
        float scale, float eps, float weight_offset, double log2_step, int half, int L, int P, int B, u32 factor,      \
        int shift, int Hk, int per_key, int num_blocks, int max_splits) {                                              \
        ProjectedQueries<D, SPLIT_KV ? SplitConfig<D>::WARPS : WARPS> source(q_weight, k_weight, log2_step);           \
        const PagedCache cache{k_cache, v_cache, P, B, factor, shift, Hk};                                             \
        const int* const table = block_table + (size_t)blockIdx.x * L;                                                 \
        pdl_wait();                                                                                                    \
        const BlockCoord at(per_key);                                                                                  \
        auto row_of = [&](int length) {                                                                                \
            const size_t first = ((size_t)at.row * Hk * per_key + at.head) * D;                                        \
            return ContextRow{                                                                                         \
                q + first, out + first, table, L, at.heads, at.key_head, length, gate ? gate + first : nullptr};       \
        };                                                                                                             \
        if (SPLIT_KV && (int)blockIdx.z >= num_blocks) {                                                               \
            combine_splits<D>(cache, row_of(load_now(context_lens + at.row)),                                          \
                              at.row_blocks_of<D, true>(num_blocks, max_splits, scratch, zeros));                      \
            return;                                                                                                    \
        }                                                                                                              \
        const TableEntries entries = at.table_entries_of<D, SPLIT_KV, true>(cache, table, L, max_splits);              \
        const ContextRow row = row_of(load_now(context_lens + at.row));                                                \
        const int slot = load_now(slots + at.row), position = load_now(positions + at.row);                            \
        const size_t of_key = ((size_t)at.row * Hk + at.key_head) * D;                                                 \
        const bool is_kept = slot >= 0 && slot < (long long)P * B;                                                     \
        const long long cache_row = is_kept ? (long long)slot * Hk + at.key_head : -1;                                 \
        source.row = {row.q, k + of_key, v + of_key, k_cache, v_cache, cache_row, position, eps, weight_offset, half}; \
        const RowBlocks row_blocks = at.row_blocks_of<D, SPLIT_KV>(num_blocks, max_splits, scratch, zeros);            \
        if constexpr (SPLIT_KV) attend_per_split<D>(cache, row, entries, scale, row_blocks, source);                   \
        else attend_per_group<D>(cache, row, entries.first, scale, row_blocks, source);                                \
    }

PAGED_DECODE_FRESH(paged_decode_fresh, 64, false, ATTENTION_BOUNDS)
PAGED_DECODE_FRESH(paged_decode_fresh, 128, false, ATTENTION_BOUNDS)
PAGED_DECODE_FRESH(paged_decode_fresh, 256, false, ATTENTION_BOUNDS)
PAGED_DECODE_FRESH(paged_decode_fresh_split_kv, 64, true, SPLIT_KV_BOUNDS(64))
PAGED_DECODE_FRESH(paged_decode_fresh_split_kv, 128, true, SPLIT_KV_BOUNDS(128))
PAGED_DECODE_FRESH(paged_decode_fresh_split_kv, 256, true, SPLIT_KV_BOUNDS(256))
