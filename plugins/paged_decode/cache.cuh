// A paged cache as attention reads it: rows, the pages of their contexts, and where the tokens of a step stand.
#pragma once
#include "bf16.cuh"
#include "launch.cuh"

constexpr int HEADS = 8, TILE = 16, CHUNK = 64, WARPS = 4, THREADS = WARPS * 32;
constexpr int TOKENS = WARPS * TILE;  // of a step
constexpr int NOWHERE = -1;

// --- instruction wrappers (PTX ISA 8.0) ---

template <int N>
struct alignas(4 * N) Words {
    u32 at[N];
};

// volatile: the order in which loads are issued is the order written here
__device__ __forceinline__ void load_words(Words<4>& v, const __nv_bfloat16* p) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.at[0]), "=r"(v.at[1]), "=r"(v.at[2]), "=r"(v.at[3]) : "l"(p));
}
__device__ __forceinline__ void load_words(Words<2>& v, const __nv_bfloat16* p) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.at[0]), "=r"(v.at[1]) : "l"(p));
}
__device__ __forceinline__ void load_words(Words<1>& v, const __nv_bfloat16* p) {
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v.at[0]) : "l"(p));
}
// Loads what exists, and leaves v as it is otherwise.
__device__ __forceinline__ void load_words_if(bool exists, Words<4>& v, const __nv_bfloat16* p) {
    asm volatile(
        "{\n.reg .pred exists;\nsetp.ne.u32 exists, %5, 0;\n"
        "@exists ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
        : "+r"(v.at[0]), "+r"(v.at[1]), "+r"(v.at[2]), "+r"(v.at[3]) : "l"(p), "r"((u32)exists));
}
__device__ __forceinline__ void load_words_if(bool exists, Words<2>& v, const __nv_bfloat16* p) {
    asm volatile(
        "{\n.reg .pred exists;\nsetp.ne.u32 exists, %3, 0;\n@exists ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];\n}"
        : "+r"(v.at[0]), "+r"(v.at[1]) : "l"(p), "r"((u32)exists));
}
__device__ __forceinline__ void load_words_if(bool exists, Words<1>& v, const __nv_bfloat16* p) {
    asm volatile(
        "{\n.reg .pred exists;\nsetp.ne.u32 exists, %2, 0;\n@exists ld.global.L1::no_allocate.u32 %0, [%1];\n}"
        : "+r"(v.at[0]) : "l"(p), "r"((u32)exists));
}

__device__ __forceinline__ int load_entry(const int* p) {
    int v;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// --- device functions ---

// A paged cache: k, v [pages, page_size, key_heads, D].
struct Cache {
    const __nv_bfloat16 *k, *v;
    int pages, page_size, key_heads;

    __device__ __forceinline__ int page_of(int token) const {  // a division costs as much as twenty additions
        const bool is_power = (page_size & (page_size - 1)) == 0;
        return is_power ? token >> (31 - __clz(page_size)) : token / page_size;
    }
    // Where a token stands that has this page; NOWHERE, and is_bad, for a page that is not there.
    __device__ __forceinline__ int place(int page, int token, bool& is_bad) const {
        const bool is_there = (u32)page < (u32)pages;
        is_bad |= !is_there;
        return is_there ? page * page_size + token - page_of(token) * page_size : NOWHERE;
    }
};

// One row of one key head: ``heads`` of its query heads, at q and out [heads, D], over ``length`` tokens in the pages of
// ``table``. With a gate, out = BF16(attention) * sigmoid(gate).
struct Row {
    const __nv_bfloat16* q;
    __nv_bfloat16* out;
    const int* table;
    int heads, key_head, length;
    const __nv_bfloat16* gate;
};

// The length of a context, or 0 where it does not fit its pages: such a row is zeros.
__device__ __forceinline__ int checked_length(int length, const Cache& cache, int entries) {
    const bool fits = length > 0 && cache.pages > 0 && length <= (long long)entries * cache.page_size;
    return fits ? length : 0;
}

// The places of two tokens of a step a lane: lane, and lane + 32. A token beyond the context stands nowhere: nothing is
// loaded for it.
struct Places {
    int at[2] = {NOWHERE, NOWHERE};

    // The place of token 16 * tile + offset of the step.
    __device__ __forceinline__ int of(int tile, int offset) const {
        return __shfl_sync(0xffffffffu, at[tile >> 1], (tile & 1) * TILE + offset);
    }
};

// What the table says of these tokens. Nothing looks at it until it is needed, a step later, or once the length of the
// context is known: whoever looks waits for it.
struct Pages {
    int own[2] = {-1, -1};

    __device__ __forceinline__ Pages() {}
    __device__ __forceinline__ Pages(const Cache& cache, const int* table, int entries, int first, int lane) {
        if (entries <= 0 || cache.page_size <= 0) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) own[i] = load_entry(table + min(cache.page_of(first + 32 * i + lane), entries - 1));
    }
    __device__ __forceinline__ Places places(const Cache& cache, int length, int first, int lane, bool& is_bad) const {
        Places found;
        if (first >= length) return found;  // what is no token at all, too
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = first + 32 * i + lane;
            if (token < length) found.at[i] = cache.place(own[i], token, is_bad);
        }
        return found;
    }
};
