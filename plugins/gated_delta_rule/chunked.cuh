// The gated delta rule of many rows, 64 at a time, by the tensor cores: what both launches of chunked.cu share.
//
// A chunk of rows t = 0 .. 63 that finds the state S, with G[t][i] = decay[i + 1] ... decay[t] and g[t] = decay[0] ...
// decay[t], k and q of unit length (q times Dk^-0.5), D[t] what row t learns:
//
//   (I + A) D = beta (V - g K S)       A[t][i] = beta[t] G[t][i] k[t] . k[i],  i < t
//   out = g Q S + P D                  P[t][i] = G[t][i] q[t] . k[i],  i <= t
//   S  <- g[63] S + (G[63] K)^T D
//
// The first launch makes T = (I + A)^-1 beta and P of all chunks at once; the second goes through the chunks of a head in
// their order: D = T (V - g K S). Rows that are not there are zeros with a decay of 1: they change nothing. Numbers that
// are not finite reach all rows of their chunk.
//
// Numerics: q, k and v enter products as they are, in BF16; lengths and decays multiply results. The state, T, P, D and all
// sums are FP32. An FP32 operand of a product is a pair of BF16, high + low, which errs by 2^-18; of two pairs, low * low
// is left out: 3 * 2^-18. Decays are multiplied up, never divided or taken as logarithms: a decay of 0 is as good as any.
// |T| <= 1, as steps shrink what rows learnt. Source: Yang et al., Gated Delta Networks (2024), section 3.3.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "delta_rule.cuh"
#include "mma.cuh"

constexpr int CHUNK = 64, STEPS = CHUNK / 16, ROW_TILES = CHUNK / 8, KEY_STEPS = KEY_DIM / 16, KEY_TILES = KEY_DIM / 8;
constexpr int ROW_BYTES = 2 * KEY_DIM, ROWS_BYTES = CHUNK * ROW_BYTES, STRIP = 16;

// T and P are lower triangular: of 16 columns i by 8 rows t, only tiles that reach the diagonal. A tile is 32 lanes' B
// operands of m16n8k16, {high, high, low, low}.
constexpr int TRIANGLE_TILES = 2 * (4 + 3 + 2 + 1);
__device__ __forceinline__ constexpr int triangle_at(int step, int tile) {
    return 8 * step - step * (step - 1) + tile - 2 * step;
}

// What the first launch leaves of a chunk and head.
struct StateGiven {
    uint4 t[TRIANGLE_TILES][32];
    float read_k[CHUNK], keep[CHUNK];  // factors of k S (g times k's length), and of what goes into S (G[63] times it)
    float decay, unused[2 * CHUNK - 1];  // decay: g[63]
};
struct OutputGiven {
    uint4 p[TRIANGLE_TILES][32];
    float read_q[CHUNK];  // factors of q S: g times q's length
};
struct Chunk {
    StateGiven for_state;
    OutputGiven for_outputs;
};
// Rows of k and of q of a chunk and key head, as they lie in shared memory.
struct Rows64 {
    uint4 k[ROWS_BYTES / 16], q[ROWS_BYTES / 16];
};
static_assert(sizeof(Rows64) == 32768 && sizeof(Chunk) == 21760);
static_assert(sizeof(StateGiven) % 16 == 0 && sizeof(OutputGiven) % 16 == 0);

// --- instruction wrappers (PTX ISA 7.8) ---

__device__ __forceinline__ void mma(float* c, const u32 (&a)[4], u32 b0, u32 b1) { mma_16x8x16(c, a, b0, b1); }
__device__ __forceinline__ void mma(float* c, const u32 (&a)[4], const u32* b) { mma_16x8x16(c, a, b[0], b[1]); }
// --- device functions ---

// Two FP32 as two pairs of BF16 whose sum errs by 2^-18.
__device__ __forceinline__ void split(u32& high, u32& low, float x, float y) {
    high = bf16_pair(x, y);
    low = bf16_pair(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}

// An A operand of 16 rows and 16 columns.
struct Operand {
    u32 high[4], low[4];

    Operand() = default;
    // Of two neighbouring accumulators.
    __device__ __forceinline__ explicit Operand(const float* c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) split(high[i], low[i], c[2 * i], c[2 * i + 1]);
    }
    // A warp's operands in shared memory, from the same lane to the same lane.
    __device__ __forceinline__ void store(uint4* at) const {
        at[0] = make_uint4(high[0], high[1], high[2], high[3]);
        at[32] = make_uint4(low[0], low[1], low[2], low[3]);
    }
    __device__ __forceinline__ void load(const uint4* at) {
        const uint4 h = at[0], l = at[32];
        high[0] = h.x, high[1] = h.y, high[2] = h.z, high[3] = h.w;
        low[0] = l.x, low[1] = l.y, low[2] = l.z, low[3] = l.w;
    }
};

// Where 16 bytes of a row of q or k lie: twisted so that the eight rows that an ldmatrix reads lie in different banks.
__device__ __forceinline__ u32 piece_at(int row, int piece) { return row * ROW_BYTES + ((piece ^ (row & 7)) << 4); }

// The B operands of 16 keys (step) and 16 rows (pair) of a tile of rows: of its first eight, and of the others.
__device__ __forceinline__ void keys_by_rows(u32 (&b)[4], u32 tile, int step, int pair, int lane) {
    ldmatrix_x4(b, tile + piece_at(16 * pair + (lane >> 4) * 8 + (lane & 7), 2 * step + (lane >> 3 & 1)));
}
// The same with rows summed over: 16 rows (step) and 16 keys (pair).
__device__ __forceinline__ void rows_by_keys(u32 (&b)[4], u32 tile, int step, int pair, int lane) {
    ldmatrix_x4_trans(b, tile + piece_at(16 * step + (lane & 15), 2 * pair + (lane >> 4)));
}

// Sends 64 rows of 128 values on their way to a tile; rows from ``count`` on are zeros.
template <int THREADS>
__device__ __forceinline__ void fetch_rows(u32 tile, const __nv_bfloat16* from, size_t stride, int count, int thread) {
    constexpr int PIECES = KEY_DIM / 8, TOGETHER = THREADS / PIECES;
    static_assert(THREADS % PIECES == 0 && CHUNK % TOGETHER == 0);
    const int first = thread / PIECES, piece = thread % PIECES;
    const __nv_bfloat16* at = from + first * stride + piece * 8;
#pragma unroll
    for (int i = 0; i < CHUNK / TOGETHER; ++i, at += TOGETHER * stride) {
        const int row = first + i * TOGETHER;
        cp_async_16(tile + piece_at(row, piece), row < count ? at : from, row < count ? 16 : 0);
    }
}

// Chunk ``i`` of sequence s stands at cu_rows[s] / CHUNK + s + i: no two at one place, all below M / CHUNK + S.
__device__ __forceinline__ int first_place(int start, int sequence) { return start / CHUNK + sequence; }
