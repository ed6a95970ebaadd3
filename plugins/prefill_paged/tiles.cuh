// Causal attention of many new tokens a sequence over a paged cache, in tiles of rows, by the tensor cores.
//
//   out[r, h, :] = sum_t softmax_t(scale * q[r, h, :] . k[t, :]) * v[t, :]     t: the context up to row r
//
// A block has one sequence, one key head and ROWS of the pairs (row, query head of that key head), which lie one after the
// other: pair i is row i / per_key, query head i % per_key. It walks over the context in tiles of TOKENS tokens, from the
// first token on. Its WM x WN warps share a tile out twice:
//
//   scores    a warp has ROWS / WM pairs, TOKENS / WN tokens       A = q, B = k
//   result    a warp has ROWS / WM pairs, D / WN columns           A = weights, B = v
//
// With WN = 1 weights stay in registers; else the WN warps of the same pairs exchange their largest scores and their
// weights in shared memory, and read 1 / WN of each tile of k and v in return: ldmatrix is what binds (D = 256, 16 pairs a
// warp: 4 cycles of shared memory for 2 mma). With STAGES = 1 a tile of v loads while scores are multiplied, and the next
// tile of k while the result is; with 2 a whole tile ahead.
//
// Numerics: scores, largest score, weights and sums in FP32; a weight is rounded to BF16 for its product, after the sum
// took it; the sum is divided out at the end, with one rounding. All that one row sees is its own context in tiles from
// its first token on, and a tile in which it sees nothing multiplies by 1 and adds 0: its bits depend on no other row, nor
// on where its prompt was cut. (Of numbers, that is: infinities and NaN in v reach rows before them in a tile, as 0 * v.)
// What lies beyond the context is not read. A length outside its pages, a page outside the cache, or a context shorter
// than the rows of its sequence gives rows of zeros; a row that no sequence has is not written.
#pragma once
#include <cuda_bf16.h>
#include "launch.cuh"

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int NOWHERE = -1;  // the place of a row that is not there: its copy is zeros

// --- instruction wrappers (PTX ISA 8.0) ---

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void copy_16(u32 to, const uint4* from, u32 is_there) {  // 0 or 1
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there * 16)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void store_shared(u32 at, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ float power(float x) {  // 2^x: 2^-22 relative, 2^-infinity is 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The barrier of THREADS threads; 0 is the block's.
template <int THREADS>
__device__ __forceinline__ void group_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// --- device functions ---

__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }  // -infinity

__device__ __forceinline__ u32 pair(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&v);
}

// Sizes of a block, and its shared memory: q [ROWS][D]; of each stage k and v [TOKENS][D]; with WN > 1 weights
// [ROWS][TOKENS] and numbers of rows [ROWS][WN]. Rows are pieces of 16 bytes; piece p of row r lies at p ^ (r % 8), so that
// the eight rows that an ldmatrix reads lie in different banks.
template <int D_, int ROWS_, int TOKENS_, int WM_, int WN_, int STAGES_, int BLOCKS_>
struct Shape {
    static constexpr int D = D_, ROWS = ROWS_, TOKENS = TOKENS_, WM = WM_, WN = WN_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr int WARPS = WM * WN, THREADS = WARPS * 32, PIECES = D / 8;
    static constexpr int M_TILES = ROWS / (16 * WM), TOKEN_TILES = TOKENS / (8 * WN), COLUMN_TILES = D / (8 * WN);
    static constexpr int ROW_BYTES = 2 * D, WEIGHT_BYTES = 2 * TOKENS, TILE_BYTES = TOKENS * ROW_BYTES;
    static constexpr int K = ROWS * ROW_BYTES, V = K + STAGES * TILE_BYTES, WEIGHTS = V + STAGES * TILE_BYTES;
    static constexpr int NUMBERS = WEIGHTS + (WN > 1 ? ROWS * WEIGHT_BYTES : 0);
    static constexpr int SHARED_BYTES = NUMBERS + (WN > 1 ? ROWS * WN * 4 : 0);
    static_assert(ROWS % (16 * WM) == 0 && TOKENS % (16 * WN) == 0 && TOKENS % 64 == 0 && D % (64 * WN) == 0);
    static_assert(PIECES <= 32 && 32 % PIECES == 0 && TOKENS % WARPS == 0 && ROWS % WARPS == 0 && ROWS / WARPS <= 32);
};

// Where the rows of a warp's share of a tile begin: lane i has that of row i % share, in units of 16 bytes, and of all
// lanes whether it is there.
struct Places {
    u32 at, there;

    __device__ __forceinline__ Places(int place, u32 stride)
        : at((u32)max(place, 0) * stride), there(__ballot_sync(ALL_LANES, place != NOWHERE)) {}
};

// Sends COUNT rows of D values on their way to a tile, each warp its share; what is not there becomes zeros.
template <class T, int COUNT>
__device__ __forceinline__ void fetch(u32 tile, const uint4* from, const Places& places, int warp, int lane) {
    constexpr int OWN = COUNT / T::WARPS, TOGETHER = 32 / T::PIECES, STEPS = OWN / TOGETHER;
    static_assert(OWN % TOGETHER == 0 && OWN % 8 == 0);
    const int own = lane / T::PIECES, piece = lane % T::PIECES;
    const u32 to = tile + (warp * OWN + own) * T::ROW_BYTES;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int row = i * TOGETHER + own;
        const u32 at = __shfl_sync(ALL_LANES, places.at, row);
        copy_16(to + i * TOGETHER * T::ROW_BYTES + ((piece ^ (row & 7)) << 4), from + piece + at, places.there >> row & 1);
    }
}

// The rows of a block: pairs ``first`` to ``first + ROWS - 1`` of a sequence of ``pairs``, whose first row of the launch is
// ``row`` and has ``before`` tokens ahead of it. No sequence: pairs is 0.
struct Rows {
    int sequence = 0, row = 0, pairs = 0, first = 0, before = 0;

    // Sequence s has the slots cu_rows[s] * per_key / ROWS + s and following: no less than it needs.
    __device__ __forceinline__ Rows(const int* cu_rows, const int* context_lens, int M, int S, int per_key, int rows,
                                    int slot) {
        int low = 0, high = S;  // the last sequence whose slots begin here or before
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (cu_rows[middle] * per_key / rows + middle <= slot) low = middle;
            else high = middle;
        }
        if (S == 0) return;
        const int start = cu_rows[low], stop = cu_rows[low + 1];
        if (start < 0 || stop > M || start > stop) return;
        sequence = low;
        row = start;
        pairs = (stop - start) * per_key;
        first = (slot - (start * per_key / rows + low)) * rows;
        before = context_lens[low] - (stop - start);
    }

    // How many tokens a pair sees; one beyond the last sees what the last one does.
    __device__ __forceinline__ int length(int pair_of_block, int per_key) const {
        return before + min(first + pair_of_block, pairs - 1) / per_key + 1;
    }
};

template <class T>
struct Attention {
    const u32 shared;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int wm = warp / T::WN, wn = warp % T::WN, first_pair = wm * T::M_TILES * 16;
    // How lanes address the four matrices of an ldmatrix: of 16 rows by 16 columns, and of 16 columns by 16 rows.
    const int row_of = lane & 15, piece_of = lane >> 4;
    float o[T::M_TILES][T::COLUMN_TILES][4] = {}, s[T::M_TILES][T::TOKEN_TILES][4];
    float largest[T::M_TILES][2], sum[T::M_TILES][2], keep[T::M_TILES][2];

    __device__ __forceinline__ explicit Attention(u32 shared_) : shared(shared_) {
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) largest[m][i] = no_score(), sum[m][i] = 0.0f;
    }

    // s = q k^T over the tile of k at ``k``.
    __device__ __forceinline__ void score(u32 k) {
        const u32 q_row = shared + (first_pair + row_of) * T::ROW_BYTES;
        const int token = wn * T::TOKEN_TILES * 8 + (lane >> 4) * 8 + (lane & 7), half = lane >> 3 & 1;
        const u32 k_row = k + token * T::ROW_BYTES;
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int t = 0; t < T::TOKEN_TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][t][i] = 0.0f;
#pragma unroll
        for (int step = 0; step < T::D / 16; ++step) {
            u32 a[T::M_TILES][4];
#pragma unroll
            for (int m = 0; m < T::M_TILES; ++m)
                load_matrices(a[m], q_row + m * 16 * T::ROW_BYTES + (((2 * step + piece_of) ^ (lane & 7)) << 4));
#pragma unroll
            for (int t = 0; t < T::TOKEN_TILES; t += 2) {
                u32 b[4];
                load_matrices(b, k_row + t * 8 * T::ROW_BYTES + (((2 * step + half) ^ (lane & 7)) << 4));
#pragma unroll
                for (int m = 0; m < T::M_TILES; ++m) {
                    mma_16x8x16(s[m][t], a[m], b[0], b[1]);
                    mma_16x8x16(s[m][t + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    __device__ __forceinline__ void scale_scores(float scale) {
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int t = 0; t < T::TOKEN_TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][t][i] = __fmul_rn(s[m][t][i], scale);
    }
    // Makes the scores of tokens that a pair does not see -infinity. ``first`` is the tile's first token.
    __device__ __forceinline__ void hide(int first, const int (&length)[T::M_TILES][2]) {
        const int token = first + wn * T::TOKEN_TILES * 8 + 2 * (lane & 3);
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int t = 0; t < T::TOKEN_TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (token + 8 * t + (i & 1) >= length[m][i >> 1]) s[m][t][i] = no_score();
    }

    __device__ __forceinline__ float* numbers(char* memory, int pair_of_block) const {
        return reinterpret_cast<float*>(memory + T::NUMBERS) + pair_of_block * T::WN;
    }

    // Turns scores into weights, and says what the result so far counts.
    __device__ __forceinline__ void weigh(char* memory) {
        float top[T::M_TILES][2];
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float x = fmaxf(s[m][0][2 * i], s[m][0][2 * i + 1]);
#pragma unroll
                for (int t = 1; t < T::TOKEN_TILES; ++t) x = fmaxf(x, fmaxf(s[m][t][2 * i], s[m][t][2 * i + 1]));
                x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
                top[m][i] = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
                if (T::WN > 1 && (lane & 3) == 0)
                    numbers(memory, first_pair + 16 * m + 8 * i + (lane >> 2))[wn] = top[m][i];
            }
        if (T::WN > 1) {
            group_barrier<32 * T::WN>(1 + wm);
#pragma unroll
            for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float* of_warp = numbers(memory, first_pair + 16 * m + 8 * i + (lane >> 2));
#pragma unroll
                    for (int w = 0; w < T::WN; ++w) top[m][i] = fmaxf(top[m][i], of_warp[w]);
                }
        }
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float now = fmaxf(largest[m][i], top[m][i]);
                keep[m][i] = power(__fsub_rn(largest[m][i], now));
                largest[m][i] = now;
                float own = 0.0f;
#pragma unroll
                for (int t = 0; t < T::TOKEN_TILES; ++t) {
                    const float low = power(__fsub_rn(s[m][t][2 * i], now)), high = power(__fsub_rn(s[m][t][2 * i + 1], now));
                    s[m][t][2 * i] = low;
                    s[m][t][2 * i + 1] = high;
                    own = __fadd_rn(own, __fadd_rn(low, high));
                }
                sum[m][i] = __fmaf_rn(sum[m][i], keep[m][i], own);
            }
    }

    // Hands weights on to the other warps of these pairs.
    __device__ __forceinline__ void send_weights() {
        const int r = lane >> 2;
        const u32 row = shared + T::WEIGHTS + (first_pair + r) * T::WEIGHT_BYTES + 4 * (lane & 3);
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int t = 0; t < T::TOKEN_TILES; ++t) {
                const u32 at = row + 16 * m * T::WEIGHT_BYTES + (((wn * T::TOKEN_TILES + t) ^ r) << 4);
                store_shared(at, pair(s[m][t][0], s[m][t][1]));
                store_shared(at + 8 * T::WEIGHT_BYTES, pair(s[m][t][2], s[m][t][3]));
            }
    }

    __device__ __forceinline__ void shrink() {
        bool is_less = false;
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m) is_less |= keep[m][0] != 1.0f || keep[m][1] != 1.0f;
        if (!__any_sync(ALL_LANES, is_less)) return;
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int c = 0; c < T::COLUMN_TILES; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[m][c][i] = __fmul_rn(o[m][c][i], keep[m][i >> 1]);
    }

    // o = o * keep + weights v over the tile of v at ``v``.
    __device__ __forceinline__ void add(u32 v) {
        shrink();
        const u32 weights = shared + T::WEIGHTS + (first_pair + row_of) * T::WEIGHT_BYTES;
        const u32 v_row = v + row_of * T::ROW_BYTES;
#pragma unroll
        for (int step = 0; step < T::TOKENS / 16; ++step) {
            u32 a[T::M_TILES][4];
#pragma unroll
            for (int m = 0; m < T::M_TILES; ++m) {
                if (T::WN > 1) {
                    load_matrices(a[m], weights + 16 * m * T::WEIGHT_BYTES + (((2 * step + piece_of) ^ (lane & 7)) << 4));
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float(&p)[4] = s[m][(2 * step + (i >> 1)) % T::TOKEN_TILES];
                        a[m][i] = pair(p[2 * (i & 1)], p[2 * (i & 1) + 1]);
                    }
                }
            }
#pragma unroll
            for (int c = 0; c < T::COLUMN_TILES; c += 2) {
                u32 b[4];
                const int piece = wn * T::COLUMN_TILES + c + piece_of;
                load_transposed(b, v_row + step * 16 * T::ROW_BYTES + ((piece ^ (lane & 7)) << 4));
#pragma unroll
                for (int m = 0; m < T::M_TILES; ++m) {
                    mma_16x8x16(o[m][c], a[m], b[0], b[1]);
                    mma_16x8x16(o[m][c + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // Makes sums those of whole rows.
    __device__ __forceinline__ void finish_sums(char* memory) {
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = sum[m][i];
                x = __fadd_rn(x, __shfl_xor_sync(ALL_LANES, x, 1));
                x = __fadd_rn(x, __shfl_xor_sync(ALL_LANES, x, 2));
                if (T::WN > 1 && (lane & 3) == 0) numbers(memory, first_pair + 16 * m + 8 * i + (lane >> 2))[wn] = x;
            }
        if (T::WN == 1) return;
        group_barrier<32 * T::WN>(1 + wm);
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* of_warp = numbers(memory, first_pair + 16 * m + 8 * i + (lane >> 2));
                sum[m][i] = of_warp[0];
#pragma unroll
                for (int w = 1; w < T::WN; ++w) sum[m][i] = __fadd_rn(sum[m][i], of_warp[w]);
            }
    }

    // Puts results where q was; those of pairs that see a token ``bad`` or later are zeros.
    __device__ __forceinline__ void put(const Rows& rows, int per_key, int bad) const {
        const int r = lane >> 2;
        const u32 row = shared + (first_pair + r) * T::ROW_BYTES + 4 * (lane & 3);
#pragma unroll
        for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool is_zero = bad == 0 || rows.length(first_pair + 16 * m + 8 * i + r, per_key) > bad;
                const float share = __fdiv_rn(1.0f, sum[m][i]);
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; ++c) {
                    const float low = __fmul_rn(o[m][c][2 * i], share), high = __fmul_rn(o[m][c][2 * i + 1], share);
                    store_shared(row + (16 * m + 8 * i) * T::ROW_BYTES + (((wn * T::COLUMN_TILES + c) ^ r) << 4),
                                 is_zero ? 0 : pair(low, high));
                }
            }
    }
};

// Where tokens of a tile stand in the cache: NOWHERE beyond ``length``, and for a page that is not there.
struct Pages {
    const int* table;
    int pages, page_size, length;
    int bad = 0x7fffffff;  // the first token without a page that this lane met

    __device__ __forceinline__ int place(int token) {
        if (token >= length) return NOWHERE;
        const int page = table[token / page_size];
        const bool is_there = (u32)page < (u32)pages;
        if (!is_there) bad = min(bad, token);
        return is_there ? page * page_size + token % page_size : NOWHERE;
    }
};

// Grid: key heads go round, the last rows first. scale includes log2(e).
template <class T>
__device__ __forceinline__ void attend(const __nv_bfloat16* q, const __nv_bfloat16* k_cache, const __nv_bfloat16* v_cache,
                                       const int* block_table, const int* cu_rows, const int* context_lens,
                                       __nv_bfloat16* out, float scale, int M, int S, int L, int P, int B, int Hk,
                                       int per_key) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ int first_bad;
    constexpr int OWN_PAIRS = T::ROWS / T::WARPS, OWN_TOKENS = T::TOKENS / T::WARPS;
    const int key_head = blockIdx.x % Hk, slot = gridDim.x / Hk - 1 - blockIdx.x / Hk;
    const Rows rows(cu_rows, context_lens, M, S, per_key, T::ROWS, slot);
    if (rows.first >= rows.pairs) return;  // the whole block

    // Stage 1: queries, and the first tile.
    const u32 shared = (u32)__cvta_generic_to_shared(memory);
    Attention<T> attention(shared);
    const int warp = attention.warp, lane = attention.lane;
    const long long most = rows.before < 0 ? 0 : (long long)L * B;  // no row of a context too short for its rows has any
    const int longest = (int)min((long long)rows.length(T::ROWS - 1, per_key), most), tiles = (longest + T::TOKENS - 1) / T::TOKENS;
    if (threadIdx.x == 0) first_bad = (int)min(most, 0x7fffffffll);
    const int own_pair = rows.first + warp * OWN_PAIRS + lane % OWN_PAIRS;
    const int q_place = own_pair < rows.pairs
                            ? (rows.row + own_pair / per_key) * Hk * per_key + key_head * per_key + own_pair % per_key
                            : NOWHERE;
    fetch<T, T::ROWS>(shared, reinterpret_cast<const uint4*>(q), Places(q_place, T::PIECES), warp, lane);
    Pages pages{block_table + (size_t)rows.sequence * L, P, B, longest};
    const int own_token = warp * OWN_TOKENS + lane % OWN_TOKENS;
    const u32 stride = Hk * T::PIECES;
    const uint4* const k_head = reinterpret_cast<const uint4*>(k_cache) + key_head * T::PIECES;
    const uint4* const v_head = reinterpret_cast<const uint4*>(v_cache) + key_head * T::PIECES;
    Places places(pages.place(own_token), stride);
    fetch<T, T::TOKENS>(shared + T::K, k_head, places, warp, lane);
    if (T::STAGES > 1) fetch<T, T::TOKENS>(shared + T::V, v_head, places, warp, lane);
    commit_copies();
    int length[T::M_TILES][2];
#pragma unroll
    for (int m = 0; m < T::M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            length[m][i] = rows.length(attention.first_pair + 16 * m + 8 * i + (lane >> 2), per_key);
    const int shortest = rows.length(attention.first_pair, per_key);

    // Stage 2: tile after tile.
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const int first = tile * T::TOKENS, stage = T::STAGES > 1 ? (tile & 1) * T::TILE_BYTES : 0;
        const bool has_next = tile + 1 < tiles;
        const u32 k = shared + T::K + stage, v = shared + T::V + stage;
        wait_for_copies();
        __syncthreads();  // the tile of k is there; that of v before it has been read
        if (T::STAGES == 1) {
            fetch<T, T::TOKENS>(v, v_head, places, warp, lane);
            commit_copies();
        }
        places = Places(pages.place(first + T::TOKENS + own_token), stride);
        if (T::STAGES > 1 && has_next) {
            const u32 other = shared + T::TILE_BYTES - stage;
            fetch<T, T::TOKENS>(other + T::K, k_head, places, warp, lane);
            fetch<T, T::TOKENS>(other + T::V, v_head, places, warp, lane);
            commit_copies();
        }
        attention.score(k);
        attention.scale_scores(scale);
        if (first + T::TOKENS > shortest) attention.hide(first, length);
        attention.weigh(memory);
        if (T::WN > 1) attention.send_weights();
        if (T::STAGES == 1) {
            wait_for_copies();
            __syncthreads();  // the tile of v is there, and weights; that of k has been read
            if (has_next) {
                fetch<T, T::TOKENS>(k, k_head, places, warp, lane);
                commit_copies();
            }
        } else if (T::WN > 1) {
            group_barrier<32 * T::WN>(1 + attention.wm);
        }
        attention.add(v);
    }

    // Stage 3: the results, by way of shared memory.
    wait_for_copies();
    __syncthreads();
    if (pages.bad < 0x7fffffff) atomicMin(&first_bad, pages.bad);
    attention.finish_sums(memory);
    __syncthreads();
    attention.put(rows, per_key, first_bad);
    __syncthreads();
    constexpr int TOGETHER = 32 / T::PIECES;
#pragma unroll
    for (int i = 0; i < OWN_PAIRS; i += TOGETHER) {
        const int of_warp = i + lane / T::PIECES, piece = lane % T::PIECES, row = warp * OWN_PAIRS + of_warp;
        const int place_of_row = __shfl_sync(ALL_LANES, q_place, of_warp);
        const uint4 values = *reinterpret_cast<const uint4*>(memory + row * T::ROW_BYTES + ((piece ^ (row & 7)) << 4));
        if (place_of_row >= 0) *reinterpret_cast<uint4*>(out + (size_t)place_of_row * T::D + piece * 8) = values;
    }
}

#define PREFILL_TILES(NAME, SHAPE)                                                                                 \
    extern "C" __global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS) NAME(                              \
        const __nv_bfloat16* __restrict__ q,       /* [M, Hq, D] */                                                \
        const __nv_bfloat16* __restrict__ k_cache, /* [P, B, Hk, D] */                                             \
        const __nv_bfloat16* __restrict__ v_cache, /* [P, B, Hk, D] */                                             \
        const int* __restrict__ block_table,       /* [S, L] */                                                    \
        const int* __restrict__ cu_rows,           /* [S + 1] */                                                   \
        const int* __restrict__ context_lens,      /* [S] */                                                       \
        __nv_bfloat16* __restrict__ out,           /* [M, Hq, D] */                                                \
        float scale, int M, int S, int L, int P, int B, int Hk, int per_key) {                                     \
        allow_next_launch();                                                                                       \
        wait_for_previous_launch();                                                                                \
        attend<SHAPE>(q, k_cache, v_cache, block_table, cu_rows, context_lens, out, scale, M, S, L, P, B, Hk,      \
                      per_key);                                                                                    \
    }
