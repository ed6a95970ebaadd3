// Rows of BF16 logits, their order, and how blocks share a row out.
//
// A row is read in pieces of 8 logits, or of one where its length is no multiple of 8: then it begins at any even address.
// One code serves both. A logit's key rises with its value (both zeros have one key; NaN has the lowest, 0). The falling
// order is by key, among equal keys by rising index.
#pragma once
#include "bf16.cuh"
#include "types.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int PARALLEL = 4;  // loads of a thread that are on their way together

__device__ __forceinline__ u32 key_of(u32 bits) {
    if ((bits & 0x7FFFu) > 0x7F80u) return 0;  // NaN
    if (bits == 0x8000u) bits = 0;             // -0 = 0
    return bits & 0x8000u ? bits ^ 0xFFFFu : bits | 0x8000u;
}
constexpr u32 LOWEST_KEY = 0x7Fu, HIGHEST_KEY = 0xFFFFu;  // of -infinity; above all
__device__ __forceinline__ u32 bits_of(u32 key) { return key & 0x8000u ? key ^ 0x8000u : key ^ 0xFFFFu; }
__device__ __forceinline__ float value_of(u32 key) { return __uint_as_float(bits_of(key) << 16); }

__device__ __forceinline__ u32 key_at(const bf16* row, u32 index) {
    return key_of(reinterpret_cast<const unsigned short*>(row)[index]);
}

__device__ __forceinline__ int piece_width(int V) { return V % 8 == 0 ? 8 : 1; }

// What is no logit is NaN.
__device__ __forceinline__ uint4 load_piece(const bf16* row, int width, int piece, bool exists) {
    uint4 raw = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (exists && width == 8) raw = reinterpret_cast<const uint4*>(row)[piece];
    if (exists && width == 1) raw.x = 0xFFFF0000u | reinterpret_cast<const unsigned short*>(row)[piece];
    return raw;
}

// The pieces of a row that a thread has: warps take turns of 32 pieces, block by block.
struct Share {
    int row_bits, width, pieces;  // blocks of the row: 1 << row_bits; of a piece, of the row
    int first, step;

    __device__ __forceinline__ Share(int V, int row_bits, int block)
        : row_bits(row_bits), width(piece_width(V)), pieces(width == 8 ? V / 8 : V),
          first(((threadIdx.x / 32 << row_bits) + block) * 32 + threadIdx.x % 32), step(THREADS << row_bits) {}
    __device__ __forceinline__ int blocks() const { return 1 << row_bits; }
};

using Pair = __nv_bfloat162;
__device__ __forceinline__ Pair pair_of(u32 bits) { return *reinterpret_cast<const Pair*>(&bits); }
__device__ __forceinline__ u32 bits_of(Pair pair) { return *reinterpret_cast<const u32*>(&pair); }
__device__ __forceinline__ Pair pair_of_key(u32 key) { return pair_of(bits_of(key) * 0x10001u); }

// Two of which one is the largest; NaN is passed over.
__device__ __forceinline__ Pair largest_pair(const uint4& raw) {
    return __hmax2(__hmax2(pair_of(raw.x), pair_of(raw.y)), __hmax2(pair_of(raw.z), pair_of(raw.w)));
}
__device__ __forceinline__ u32 key_of(Pair pair) {
    const Pair both = __hmax2(pair, __lowhigh2highlow(pair));
    return key_of(*reinterpret_cast<const u32*>(&both) & 0xFFFFu);
}

// A few pieces of a thread, whose loads are on their way together.
struct Pieces {
    uint4 raw[PARALLEL];

    __device__ __forceinline__ void load_from(const bf16* row, const Share& share, int width, int at) {
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) {
            const int piece = at + i * share.step;
            raw[i] = load_piece(row, width, piece, piece < share.pieces);
        }
    }
};

// Calls ``visit(bits, index)`` for the logits of pieces ``first``, ``first + step`` .. below ``end``, four at a time, two in each
// word, the lower half first. Of a piece of one logit the others are NaN, and none. Pieces without a key of at least
// ``lowest`` are passed over.
template <class Visit>
__device__ __forceinline__ void each_four(const bf16* row, int width, int first, int step, int end, u32 lowest, Visit visit) {
    const Pair floor = pair_of_key(max(lowest, LOWEST_KEY));
#pragma unroll 1
    for (int at = first; at < end; at += PARALLEL * step) {
        uint4 raw[PARALLEL];
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) raw[i] = load_piece(row, width, at + i * step, at + i * step < end);
        u32 pieces = 0;
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i)
            if (at + i * step < end && (lowest == 0 || __hge2_mask(largest_pair(raw[i]), floor) != 0)) pieces |= 1u << i;
#pragma unroll 1
        for (; pieces != 0; pieces &= pieces - 1) {
            const int piece = at + (__ffs(pieces) - 1) * step;
            uint4 rest = load_piece(row, width, piece, true);
#pragma unroll 1
            for (int e = 0; e < width; e += 4) {
                visit(make_uint2(rest.x, rest.y), piece * width + e);
                rest.x = rest.z, rest.y = rest.w;
            }
        }
    }
}

// The same one by one: ``visit(key, index)``, also with lower keys.
template <class Visit>
__device__ __forceinline__ void each_logit(const bf16* row, int width, int first, int step, int end, u32 lowest, Visit visit) {
    each_four(row, width, first, step, end, lowest, [&](uint2 bits, int index) {
#pragma unroll 1
        for (int i = 0; i < min(width, 4); ++i) {
            visit(key_of(bits.x & 0xFFFFu), index + i);
            bits.x = __funnelshift_r(bits.x, bits.y, 16), bits.y >>= 16;
        }
    });
}
