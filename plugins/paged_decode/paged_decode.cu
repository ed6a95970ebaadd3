// Attention of rows over a paged cache: of one new token a sequence, or of many (cu_rows), each as the decode step of
// its prefix. With a gate, the bits are those of attention and sigmoid_gate_mul after it. Grid: see BlockCoord.
// Launched by launch.py. sm_80 and newer.
//
// Rows without a sequence (outside cu_rows), and rows with a context shorter than the rows of their sequence, are
// zeros. Rows of a sequence are consecutive, so that they share the cache in L2.
//
// Dependents are not launched before blocks end. Blocks of the next kernel would fill the free multiprocessors unevenly
// and stay there, many on a few. Steps of 8 and 16 sequences took 7 and 4% longer (27B, H200).
#include "attention.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"

// The sequence of a row, and how many tokens its context lacks. Without cu_rows a row is a sequence.
struct Prefix {
    int sequence, min_length = 0x80000000, missing = 0;  // shorter contexts count as 0

    __device__ __forceinline__ Prefix(const int* cu_rows, int S, int row) : sequence(row) {
        if (!cu_rows) return;
        int low = 0, high = S;  // the last sequence that starts at the row or before, hence not empty
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (cu_rows[middle] <= row) low = middle;
            else high = middle;
        }
        sequence = low, min_length = 0x7fffffff;
        if (S == 0 || cu_rows[low] > row || row >= cu_rows[low + 1]) return;
        min_length = cu_rows[low + 1] - cu_rows[low], missing = cu_rows[low + 1] - 1 - row;
    }
    // Loaded after branches have joined: inside a branch, the load would be waited for before the table entries are
    // requested.
    __device__ __forceinline__ int length(const int* context_lens, int S) const {
        const int length = load_now_if(S > 0, context_lens + sequence, NO_OFFSET);
        return length < min_length ? 0 : length - missing;
    }
};

#define PAGED_DECODE(NAME, D, SPLIT_KV, BOUNDS)                                                                        \
    extern "C" __global__ void BOUNDS NAME##_d##D(                                                                     \
        const __nv_bfloat16* q,          /* [M, Hq, D] */                                                              \
        const __nv_bfloat16* k_cache,    /* [P, B, Hk, D] */                                                           \
        const __nv_bfloat16* v_cache,    /* [P, B, Hk, D] */                                                           \
        const int* block_table,          /* [S, L] */                                                                  \
        const int* cu_rows,              /* [S + 1], or none: a row is a sequence */                                   \
        const int* context_lens,         /* [S] */                                                                     \
        const __nv_bfloat16* gate,       /* [M, Hq, D], or none */                                                     \
        __nv_bfloat16* __restrict__ out, /* [M, Hq, D] */                                                              \
        float* scratch, u32* zeros,      /* if several blocks share a row */                                           \
        float scale, int S, int L, int P, int B, u32 factor, int shift, int Hk, int per_key, int num_blocks,           \
        int max_splits) {                                                                                              \
        const PagedCache cache{k_cache, v_cache, P, B, factor, shift, Hk};                                             \
        pdl_wait();                                                                                                    \
        const Prefix prefix(cu_rows, S, blockIdx.x);                                                                   \
        const int* const table = block_table + (size_t)prefix.sequence * L;                                            \
        const BlockCoord at(per_key);                                                                                  \
        auto row_of = [&](int length) {                                                                                \
            const size_t first = ((size_t)at.row * Hk * per_key + at.head) * D;                                        \
            return ContextRow{                                                                                         \
                q + first, out + first, table, L, at.heads, at.key_head, length, gate ? gate + first : nullptr};       \
        };                                                                                                             \
        if (SPLIT_KV && (int)blockIdx.z >= num_blocks) {                                                               \
            combine_splits<D>(cache, row_of(prefix.length(context_lens, S)),                                           \
                              at.row_blocks_of<D, true>(num_blocks, max_splits, scratch, zeros));                      \
            return;                                                                                                    \
        }                                                                                                              \
        const TableEntries entries = at.table_entries_of<D, SPLIT_KV, false>(cache, table, S > 0 ? L : 0, max_splits); \
        const ContextRow row = row_of(prefix.length(context_lens, S));                                                 \
        attend<D, SPLIT_KV>(                                                                                           \
            cache, row, entries, scale, at.row_blocks_of<D, SPLIT_KV>(num_blocks, max_splits, scratch, zeros));        \
    }

PAGED_DECODE(paged_decode, 64, false, ATTENTION_BOUNDS)
PAGED_DECODE(paged_decode, 128, false, ATTENTION_BOUNDS)
PAGED_DECODE(paged_decode, 256, false, ATTENTION_BOUNDS)
PAGED_DECODE(paged_decode_split_kv, 64, true, SPLIT_KV_BOUNDS(64))
PAGED_DECODE(paged_decode_split_kv, 128, true, SPLIT_KV_BOUNDS(128))
PAGED_DECODE(paged_decode_split_kv, 256, true, SPLIT_KV_BOUNDS(256))

// Any D up to 1024. Grid: M * Hq.
extern "C" __global__ void __launch_bounds__(ANY_THREADS) paged_decode_any(
    const __nv_bfloat16* q,           // [M, Hq, D]
    const __nv_bfloat16* k_cache,     // [P, B, Hk, D]
    const __nv_bfloat16* v_cache,     // [P, B, Hk, D]
    const int* block_table,           // [S, L]
    const int* cu_rows,               // [S + 1], or none: a row is a sequence
    const int* context_lens,          // [S]
    const __nv_bfloat16* gate,        // [M, Hq, D], or none
    __nv_bfloat16* __restrict__ out,  // [M, Hq, D]
    float scale, int S, int L, int P, int B, u32 factor, int shift, int Hk, int per_key, int D) {
    pdl_launch_dependents();
    pdl_wait();
    const PagedCache cache{k_cache, v_cache, P, B, factor, shift, Hk};
    const int head = blockIdx.x % (Hk * per_key);
    const Prefix prefix(cu_rows, S, blockIdx.x / (Hk * per_key));
    const size_t first = (size_t)blockIdx.x * D;
    const ContextRow row{
        q + first,
        out + first,
        block_table + (size_t)prefix.sequence * L,
        L,
        1,
        head / per_key,
        checked_length(prefix.length(context_lens, S), cache, L),
        gate ? gate + first : nullptr};
    attend_any(cache, row, scale, D);
}
