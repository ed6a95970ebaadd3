// Rows of BF16 logits: their order, and the slice of a row that a thread reads.
//
// A row is read in vectors of 8 logits. If its length is no multiple of 8, the vectors have one logit, because the row
// then starts at any even address. The same code serves both widths.
//
// The key of a logit rises with its value. Both zeros have the same key, and NaN has the lowest, 0. The descending
// order of a row is by key, and by rising index among equal keys.
#pragma once
#include "bf16.cuh"
#include "types.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int LOADS = 4;  // of a thread, in flight together

__device__ __forceinline__ u32 key_of(u32 bits) {
    if ((bits & 0x7FFFu) > 0x7F80u) return 0;  // NaN
    if (bits == 0x8000u) bits = 0;             // -0 = 0
    return bits & 0x8000u ? bits ^ 0xFFFFu : bits | 0x8000u;
}
constexpr u32 LOWEST_KEY = 0x7Fu, HIGHEST_KEY = 0xFFFFu;  // the key of -infinity; above all keys
__device__ __forceinline__ u32 bits_of(u32 key) { return key & 0x8000u ? key ^ 0x8000u : key ^ 0xFFFFu; }
__device__ __forceinline__ float value_of(u32 key) { return __uint_as_float(bits_of(key) << 16); }

__device__ __forceinline__ u32 key_at(const bf16* row, u32 index) {
    return key_of(reinterpret_cast<const unsigned short*>(row)[index]);
}

__device__ __forceinline__ int vector_width(int V) { return V % 8 == 0 ? 8 : 1; }

// A missing logit is NaN.
__device__ __forceinline__ uint4 load_vector_of(const bf16* row, int width, int vec, bool exists) {
    uint4 raw = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (exists && width == 8) raw = reinterpret_cast<const uint4*>(row)[vec];
    if (exists && width == 1) raw.x = 0xFFFF0000u | reinterpret_cast<const unsigned short*>(row)[vec];
    return raw;
}

// The vectors of a row that a thread reads: warps take 32 vectors in turn, block by block.
struct RowSlice {
    int row_bits, width, vecs;  // the row has 1 << row_bits blocks; width of a vector; vectors of the row
    int first, step;

    __device__ __forceinline__ RowSlice(int V, int row_bits, int block)
        : row_bits(row_bits), width(vector_width(V)), vecs(width == 8 ? V / 8 : V),
          first(((threadIdx.x / 32 << row_bits) + block) * 32 + threadIdx.x % 32), step(THREADS << row_bits) {}
    __device__ __forceinline__ int blocks() const { return 1 << row_bits; }
};

using Pair = __nv_bfloat162;
__device__ __forceinline__ Pair pair_of(u32 bits) { return *reinterpret_cast<const Pair*>(&bits); }
__device__ __forceinline__ u32 bits_of(Pair pair) { return *reinterpret_cast<const u32*>(&pair); }
__device__ __forceinline__ Pair pair_of_key(u32 key) { return pair_of(bits_of(key) * 0x10001u); }

// A pair with the largest logit of a vector. NaN is ignored.
__device__ __forceinline__ Pair max_pair(const uint4& raw) {
    return __hmax2(__hmax2(pair_of(raw.x), pair_of(raw.y)), __hmax2(pair_of(raw.z), pair_of(raw.w)));
}
__device__ __forceinline__ u32 key_of(Pair pair) {
    const Pair both = __hmax2(pair, __lowhigh2highlow(pair));
    return key_of(*reinterpret_cast<const u32*>(&both) & 0xFFFFu);
}

// Some vectors of a thread, whose loads are in flight together.
struct Vectors {
    uint4 raw[LOADS];

    __device__ __forceinline__ void load_from(const bf16* row, const RowSlice& slice, int width, int at) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int vec = at + i * slice.step;
            raw[i] = load_vector_of(row, width, vec, vec < slice.vecs);
        }
    }
};

// Calls ``visit(bits, index)`` for the logits of vectors ``first``, ``first + step`` ... below ``end``: four at a time,
// two in each word, the lower half first. In a vector of one logit the other three are NaN. Skips vectors without a key
// of at least ``lowest``.
template <class Visit>
__device__ __forceinline__ void for_each_four(const bf16* row, int width, int first, int step, int end, u32 lowest,
                                              Visit visit) {
    const Pair floor = pair_of_key(max(lowest, LOWEST_KEY));
#pragma unroll 1
    for (int at = first; at < end; at += LOADS * step) {
        uint4 raw[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) raw[i] = load_vector_of(row, width, at + i * step, at + i * step < end);
        u32 vecs = 0;
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (at + i * step < end && (lowest == 0 || __hge2_mask(max_pair(raw[i]), floor) != 0)) vecs |= 1u << i;
#pragma unroll 1
        for (; vecs != 0; vecs &= vecs - 1) {
            const int vec = at + (__ffs(vecs) - 1) * step;
            uint4 rest = load_vector_of(row, width, vec, true);
#pragma unroll 1
            for (int e = 0; e < width; e += 4) {
                visit(make_uint2(rest.x, rest.y), vec * width + e);
                rest.x = rest.z, rest.y = rest.w;
            }
        }
    }
}

// The same for single logits: ``visit(key, index)``, also for lower keys of a visited vector.
template <class Visit>
__device__ __forceinline__ void for_each_logit(const bf16* row, int width, int first, int step, int end, u32 lowest,
                                               Visit visit) {
    for_each_four(row, width, first, step, end, lowest, [&](uint2 bits, int index) {
#pragma unroll 1
        for (int i = 0; i < min(width, 4); ++i) {
            visit(key_of(bits.x & 0xFFFFu), index + i);
            bits.x = __funnelshift_r(bits.x, bits.y, 16), bits.y >>= 16;
        }
    });
}
