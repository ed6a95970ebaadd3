// The gated delta rule in chunks of 64 rows with the tensor cores: shared by both launches of chunked.cu. Used by
// chunked.cu. sm_80 and newer.
//
// For rows t = 0 .. 63 of a chunk: S is the state before the chunk, G[t][i] = decay[i + 1] ... decay[t], g[t] =
// decay[0] ... decay[t]. k and q have unit length (q times Dk^-0.5), and D[t] is the update by row t:
//
//   (I + A) D = beta (V - g K S)       A[t][i] = beta[t] G[t][i] k[t] . k[i],  i < t
//   out = g Q S + P D                  P[t][i] = G[t][i] q[t] . k[i],  i <= t
//   S  <- g[63] S + (G[63] K)^T D
//
// The first launch computes T = (I + A)^-1 beta and P of all chunks in parallel. The second goes through the chunks of
// a head in order, with D = T (V - g K S). Missing rows are zeros with a decay of 1, which changes nothing. Values that
// are not finite reach all rows of their chunk.
//
// Numerics: q, k and v enter products in BF16. Lengths and decays multiply the results. The state, T, P, D and all sums
// are FP32. An FP32 operand of a product is a pair of BF16, high + low, with an error of 2^-18. For two such operands,
// low * low is left out: 3 * 2^-18. Decays are multiplied, never divided and never logarithms, so that a decay of 0 is
// exact. |T| <= 1, because each step shrinks the updates. Source: Yang et al., Gated Delta Networks (2024), section
// 3.3.
#pragma once
#include "async_copy.cuh"
#include "bf16.cuh"
#include "delta_rule.cuh"
#include "mma.cuh"

constexpr int CHUNK = 64, STEPS = CHUNK / 16, ROW_TILES = CHUNK / 8, KEY_STEPS = KEY_DIM / 16, KEY_TILES = KEY_DIM / 8;
constexpr int ROW_BYTES = 2 * KEY_DIM, ROWS_BYTES = CHUNK * ROW_BYTES, STRIP = 16;

// T and P are lower triangular: of the tiles of 16 columns i by 8 rows t, only those that reach the diagonal exist. A
// tile holds the B operands of m16n8k16 of 32 lanes, {high, high, low, low}.
constexpr int TRIANGLE_TILES = 2 * (4 + 3 + 2 + 1);
__device__ __forceinline__ constexpr int triangle_at(int step, int tile) {
    return 8 * step - step * (step - 1) + tile - 2 * step;
}

// The result of the first launch for a chunk and head: for the state warps, and for the output warps.
struct StateInputs {
    uint4 t[TRIANGLE_TILES][32];
    float read_k[CHUNK], keep[CHUNK];  // factors of k S (g / length of k), and of the update of S (G[63] / length of k)
    float decay, unused[2 * CHUNK - 1];  // decay: g[63]
};
struct OutputInputs {
    uint4 p[TRIANGLE_TILES][32];
    float read_q[CHUNK];  // factors of q S: g / length of q
};
struct ChunkResult {
    StateInputs for_state;
    OutputInputs for_outputs;
};
// Rows of k and q of a chunk and key head, in the layout of shared memory.
struct RowTiles {
    uint4 k[ROWS_BYTES / 16], q[ROWS_BYTES / 16];
};
static_assert(sizeof(RowTiles) == 32768 && sizeof(ChunkResult) == 21760);
static_assert(sizeof(StateInputs) % 16 == 0 && sizeof(OutputInputs) % 16 == 0);

// --- device functions ---

__device__ __forceinline__ void mma(float* c, const u32 (&a)[4], u32 b0, u32 b1) { mma_16x8x16(c, a, b0, b1); }
__device__ __forceinline__ void mma(float* c, const u32 (&a)[4], const u32* b) { mma_16x8x16(c, a, b[0], b[1]); }

// Two FP32 values as two pairs of BF16, whose sum has an error of 2^-18.
__device__ __forceinline__ void split(u32& high, u32& low, float x, float y) {
    high = bf16_pair(x, y);
    low = bf16_pair(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}

// An A operand of 16 rows and 16 columns.
struct Operand {
    u32 high[4], low[4];

    Operand() = default;
    // From two neighbouring accumulators.
    __device__ __forceinline__ explicit Operand(const float* c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) split(high[i], low[i], c[2 * i], c[2 * i + 1]);
    }
    // The operands of a warp in shared memory. The same lane reads what it wrote.
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

// The swizzle of q and k: the offset of 16 bytes of a row. The eight rows of an ldmatrix lie in different banks.
__device__ __forceinline__ u32 swizzled(int row, int vec) { return row * ROW_BYTES + ((vec ^ (row & 7)) << 4); }

// The B operands of 16 keys (step) and 16 rows (pair): of the first eight rows, and of the others.
__device__ __forceinline__ void keys_by_rows(u32 (&b)[4], u32 tile, int step, int pair, int lane) {
    ldmatrix_x4(b, tile + swizzled(16 * pair + (lane >> 4) * 8 + (lane & 7), 2 * step + (lane >> 3 & 1)));
}
// The same for sums over rows: 16 rows (step) and 16 keys (pair).
__device__ __forceinline__ void rows_by_keys(u32 (&b)[4], u32 tile, int step, int pair, int lane) {
    ldmatrix_x4_trans(b, tile + swizzled(16 * step + (lane & 15), 2 * pair + (lane >> 4)));
}

// Starts the copy of 64 rows of 128 values to a tile. Rows from ``count`` on are zeros.
template <int THREADS>
__device__ __forceinline__ void fetch_rows(u32 tile, const __nv_bfloat16* from, size_t stride, int count, int thread) {
    constexpr int VECS = KEY_DIM / 8, TOGETHER = THREADS / VECS;
    static_assert(THREADS % VECS == 0 && CHUNK % TOGETHER == 0);
    const int first = thread / VECS, vec = thread % VECS;
    const __nv_bfloat16* at = from + first * stride + vec * 8;
#pragma unroll
    for (int i = 0; i < CHUNK / TOGETHER; ++i, at += TOGETHER * stride) {
        const int row = first + i * TOGETHER;
        cp_async_16(tile + swizzled(row, vec), row < count ? at : from, row < count ? 16 : 0);
    }
}

// Chunk ``i`` of sequence s has index cu_rows[s] / CHUNK + s + i. The indices are unique and below M / CHUNK + S.
__device__ __forceinline__ int first_chunk_index(int start, int sequence) { return start / CHUNK + sequence; }
