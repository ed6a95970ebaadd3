// A paged cache as attention reads it: rows, the pages of their contexts, and where tokens stand.
#pragma once
#include "bf16.cuh"
#include "global_memory.cuh"

constexpr int HEADS = 8, TILE = 16, WARPS = 4, THREADS = WARPS * 32;
constexpr int TOKENS = WARPS * TILE;  // of a step
constexpr int NOWHERE = -1;

// --- device functions ---

// A paged cache: k, v [pages, page_size, key_heads, D]. A token's page is token * factor >> shift (launch.py): a division
// costs as much as twenty additions.
struct Cache {
    const __nv_bfloat16 *k, *v;
    int pages, page_size;
    u32 factor;
    int shift, key_heads;

    __device__ __forceinline__ int page_of(int token) const {
        return (int)(((unsigned long long)(u32)token * factor) >> shift);
    }
    // Where a token stands that has this page; NOWHERE, and is_bad, for a page that is not there.
    __device__ __forceinline__ int place(int page, int token, bool& is_bad) const {
        const bool is_there = (u32)page < (u32)pages;
        is_bad |= !is_there;
        return is_there ? place_in(page, token) : NOWHERE;
    }
    __device__ __forceinline__ int place_in(int page, int token) const {
        return page * page_size + (token - page_of(token) * page_size);
    }
};

// One row of one key head: ``heads`` of its query heads, at q and out [heads, D], over ``length`` tokens in the pages of
// ``table`` [entries]. With a gate, out = BF16(attention) * sigmoid(gate).
struct Row {
    const __nv_bfloat16* q;
    __nv_bfloat16* out;
    const int* table;
    int entries, heads, key_head, length;
    const __nv_bfloat16* gate;
};

// The length of a context, or 0 where it does not fit its pages: such a row is zeros.
__device__ __forceinline__ int checked_length(int length, const Cache& cache, int entries) {
    const bool fits = length > 0 && cache.pages > 0 && length <= (long long)entries * cache.page_size;
    return fits ? length : 0;
}

// What the table says of this thread's tokens of the first steps.
struct Entries {
    int first, second, third;
};

// What the table says of a token that the context may not have: nothing needs its length yet. The last entry stands for
// what lies beyond the table.
__device__ __forceinline__ int entry_of(const Cache& cache, const int* table, int entries, int token) {
    return load_now_if(entries > 0 && cache.page_size > 0, table + min(cache.page_of(token), entries - 1), NOWHERE);
}
