// A paged cache for attention: rows, the pages of their contexts, and the offsets of tokens. Used by split_kv.cuh.
// sm_80 and newer.
#pragma once
#include "bf16.cuh"
#include "global_memory.cuh"

constexpr int HEADS_PER_BLOCK = 8, TILE_TOKENS = 16, WARPS = 4, THREADS = WARPS * 32;
constexpr int STEP_TOKENS = WARPS * TILE_TOKENS;  // of all warps
constexpr int NO_OFFSET = -1;

// A paged cache: k, v [pages, page_size, key_heads, D]. The page of a token is token * factor >> shift (launch.py),
// because a division costs as much as twenty additions.
struct PagedCache {
    const __nv_bfloat16 *k, *v;
    int pages, page_size;
    u32 factor;
    int shift, key_heads;

    __device__ __forceinline__ int page_of(int token) const {
        return (int)(((unsigned long long)(u32)token * factor) >> shift);
    }
    // The offset of a token on this page. A page outside the cache gives NO_PLACE and sets ``is_invalid``.
    __device__ __forceinline__ int offset(int page, int token, bool& is_invalid) const {
        const bool is_valid = (u32)page < (u32)pages;
        is_invalid |= !is_valid;
        return is_valid ? offset_in(page, token) : NO_OFFSET;
    }
    __device__ __forceinline__ int offset_in(int page, int token) const {
        return page * page_size + (token - page_of(token) * page_size);
    }
};

// One row of one key head: ``heads`` of its query heads, q and out [heads, D], over ``length`` tokens in the pages of
// ``table`` [entries]. With a gate, out = BF16(attention) * sigmoid(gate).
struct ContextRow {
    const __nv_bfloat16* q;
    __nv_bfloat16* out;
    const int* table;
    int entries, heads, key_head, length;
    const __nv_bfloat16* gate;
};

// The length of a context, or 0 for a length beyond its pages: such a row is zeros.
__device__ __forceinline__ int checked_length(int length, const PagedCache& cache, int entries) {
    const bool fits = length > 0 && cache.pages > 0 && length <= (long long)entries * cache.page_size;
    return fits ? length : 0;
}

// The table entries of this thread's tokens in the first steps.
struct TableEntries {
    int first, second, third;
};

// The table entry of a token, also beyond the context: nothing waits for its length. Tokens beyond the table get the
// last entry.
__device__ __forceinline__ int load_table_entry(const PagedCache& cache, const int* table, int entries, int token) {
    return load_now_if(entries > 0 && cache.page_size > 0, table + min(cache.page_of(token), entries - 1), NO_OFFSET);
}
