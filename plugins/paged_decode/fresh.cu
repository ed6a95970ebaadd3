// Attention of one new token a sequence, from projections to gated result in one launch: see attention.cuh and fresh.cuh.
// Grid: see BlockPlace; launched by launch.py. sm_80 and newer. The next launch is not allowed early: see paged_decode.cu.
//
// The newest token of a context is the row's own, and its slot is that token's place. A row with slot -1, or another one
// outside the cache, which the contract refuses, has no token of its own: its context is what the cache holds.
#include "bf16.cuh"
#include "fresh.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"

#define PAGED_DECODE_FRESH(NAME, D, SPREAD, BOUNDS)                                                                 \
    extern "C" __global__ void BOUNDS NAME##_d##D(                                                                  \
        const bf16* q,                         /* [S, Hq, D] */                                                     \
        const bf16* k,                         /* [S, Hk, D] */                                                     \
        const bf16* v,                         /* [S, Hk, D] */                                                     \
        const bf16* __restrict__ q_weight,     /* [D] */                                                            \
        const bf16* __restrict__ k_weight,     /* [D] */                                                            \
        const int* positions,                  /* [S] */                                                            \
        const int* slots,                      /* [S] */                                                            \
        bf16* k_cache,                         /* [P, B, Hk, D], in and out */                                      \
        bf16* v_cache,                         /* [P, B, Hk, D], in and out */                                      \
        const int* block_table,                /* [S, L] */                                                         \
        const int* context_lens,               /* [S] */                                                            \
        const bf16* gate,                      /* [S, Hq, D], or none */                                            \
        bf16* __restrict__ out,                /* [S, Hq, D] */                                                     \
        float* scratch, u32* zeros, /* where several share a row */                                                 \
        float scale, float eps, float weight_offset, double log2_step, int half, int L, int P, int B, u32 factor,   \
        int shift, int Hk, int per_key, int sharing, int most) {                                                    \
        Fresh<D, SPREAD ? Spread<D>::WARPS : WARPS> source(q_weight, k_weight, log2_step);                          \
        const Cache cache{k_cache, v_cache, P, B, factor, shift, Hk};                                               \
        const int* const table = block_table + (size_t)blockIdx.x * L;                                              \
        pdl_wait();                                                                                 \
        const BlockPlace at(per_key);                                                                               \
        auto row_of = [&](int length) {                                                                             \
            const size_t first = ((size_t)at.row * Hk * per_key + at.head) * D;                                     \
            return Row{q + first, out + first, table, L, at.heads, at.key_head, length,                             \
                       gate ? gate + first : nullptr};                                                              \
        };                                                                                                          \
        if (SPREAD && (int)blockIdx.z >= sharing) {                                                                 \
            combine_pieces<D>(cache, row_of(load_now(context_lens + at.row)),                                     \
                              at.team_of<D, true>(sharing, most, scratch, zeros));                                  \
            return;                                                                                                 \
        }                                                                                                           \
        const Entries entries = at.entries_of<D, SPREAD, true>(cache, table, L, most);                              \
        const Row row = row_of(load_now(context_lens + at.row));                                                  \
        const int slot = load_now(slots + at.row), position = load_now(positions + at.row);                     \
        const size_t of_key = ((size_t)at.row * Hk + at.key_head) * D;                                              \
        const bool is_kept = slot >= 0 && slot < (long long)P * B;                                                  \
        const long long place = is_kept ? (long long)slot * Hk + at.key_head : -1;                                  \
        source.row = {row.q, k + of_key, v + of_key, k_cache, v_cache, place, position, eps, weight_offset, half};  \
        const Team team = at.team_of<D, SPREAD>(sharing, most, scratch, zeros);                                     \
        if constexpr (SPREAD) attend_few<D>(cache, row, entries, scale, team, source);                              \
        else attend_many<D>(cache, row, entries.first, scale, team, source);                                        \
    }

PAGED_DECODE_FRESH(paged_decode_fresh, 64, false, ATTENTION_BOUNDS)
PAGED_DECODE_FRESH(paged_decode_fresh, 128, false, ATTENTION_BOUNDS)
PAGED_DECODE_FRESH(paged_decode_fresh, 256, false, ATTENTION_BOUNDS)
PAGED_DECODE_FRESH(paged_decode_fresh_spread, 64, true, SPREAD_BOUNDS(64))
PAGED_DECODE_FRESH(paged_decode_fresh_spread, 128, true, SPREAD_BOUNDS(128))
PAGED_DECODE_FRESH(paged_decode_fresh_spread, 256, true, SPREAD_BOUNDS(256))
