// Prefill in chunks of 64 rows, by the tensor cores: chunked.cuh says how. Two launches, by launch.py. Dk = 128, Dv a
// multiple of 32. sm_80 and newer.
#include "async_copy.cuh"
#include "bf16.cuh"
#include "chunked.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "named_barrier.cuh"
#include "opaque.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

// --- the first launch: T, P and factors of every chunk ---

constexpr int WITHIN_BLOCKS = __CUDA_ARCH__ > 900 ? 3 : 4;  // an SM; a fourth one spills above sm_90
constexpr int WITHIN_THREADS = 256, STRIDE = CHUNK + 4;

struct Within {
    union {
        uint4 rows[2 * ROWS_BYTES / 16];  // k, then q
        float columns[CHUNK][STRIDE];     // of A: [i][t]
    };
    // (I + A)^-1, [t][i]. Above its diagonal, at [k][16 b + r], stands what block b > 0 of its diagonal has at [r][k].
    float solved[CHUNK][STRIDE];
    // G of 16 rows: [block][i][t]; of row t the product from its block's first row on, of row i from the next to the last.
    float inside[STEPS][16][16 + 1], from_first[CHUNK], to_last[CHUNK];
    float decay[CHUNK], beta[CHUNK];
    // Factors of rows [k or q] (their squares, to begin with) and of columns: without decays, and with the own block's.
    float row[2][CHUNK], row_decayed[2][CHUNK], column[CHUNK], column_decayed[CHUNK];
};
static_assert(sizeof(Within) == 57088);

// Products of decays inside of each 16 rows, by column.
__device__ __forceinline__ void multiply_decays(Within& w, int thread) {
    const int block = thread / 16, i = thread % 16;
    const float* const decay = w.decay + 16 * block;
    float left = 0.0f;
#pragma unroll 4
    for (int t = 0; t < 16; ++t) {
        left = t == i ? 1.0f : left * decay[t];
        w.inside[block][i][t] = left;
        if (i == 0) w.from_first[16 * block + t] = left * decay[0];
    }
    w.to_last[thread] = left;
}

// All rows of the blocks from ``from`` to before ``to``.
__device__ __forceinline__ float decay_between(const Within& w, int from, int to) {
    float all = 1.0f;
    for (int block = from; block < to; ++block) all *= w.from_first[16 * block + 15];
    return all;
}

// A block of 16 on the diagonal of (I + A)^-1, by forward substitution: a lane has half of a column.
__device__ __forceinline__ void invert_diagonal(Within& w, int block, int lane) {
    const int begin = 16 * block, i = lane & 15, own = lane >> 4 << 3;
    float x[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) x[r] = own + r == i ? 1.0f : 0.0f;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int row = begin + 8 * half + j;
            const float known = __shfl_sync(ALL_LANES, x[j], 16 * half + i);
            const float4* const a = reinterpret_cast<const float4*>(&w.columns[row][begin + own]);
            if (own == 0) w.solved[row][begin + i] = known;
#pragma unroll
            for (int r = 0; r < 8; r += 4) {
                const float4 four = a[r / 4];
                x[r] = fmaf(-four.x, known, x[r]);
                x[r + 1] = fmaf(-four.y, known, x[r + 1]);
                x[r + 2] = fmaf(-four.z, known, x[r + 2]);
                x[r + 3] = fmaf(-four.w, known, x[r + 3]);
            }
        }
    }
    if (block == 0) return;
#pragma unroll
    for (int r = 0; r < 8; r += 4)
        *reinterpret_cast<float4*>(&w.solved[i][begin + own + r]) = make_float4(x[r], x[r + 1], x[r + 2], x[r + 3]);
}

// The columns of a warp, eight, below their blocks on the diagonal: X_b = -(diagonal block b) (A X)_b, 16 rows after 16. A
// lane has four rows of a column.
__device__ __forceinline__ void complete_columns(Within& w, int warp, int lane) {
    const int i = 8 * warp + (lane & 7), own = 4 * (lane >> 3), first = warp / 2 * 16;
    auto put = [&](int row, float4 x) {
        w.solved[row][i] = x.x, w.solved[row + 1][i] = x.y, w.solved[row + 2][i] = x.z, w.solved[row + 3][i] = x.w;
        __syncwarp();
    };
#pragma unroll 1
    for (int begin = first + 16; begin < CHUNK; begin += 16) {
        float4 sum = make_float4(0, 0, 0, 0), x = sum;
#pragma unroll 8
        for (int j = first; j < begin; ++j)
            sum = fma4(w.solved[j][i], *reinterpret_cast<const float4*>(&w.columns[j][begin + own]), sum);
        put(begin + own, sum);
#pragma unroll 8
        for (int k = 0; k < 16; ++k)
            x = fma4(-w.solved[begin + k][i], *reinterpret_cast<const float4*>(&w.solved[k][begin + own]), x);
        __syncwarp();
        put(begin + own, x);
    }
}

// Writes T as operands; warps take tiles in turn.
__device__ __forceinline__ void write_solved(const Within& w, uint4 (*to)[32], int warp, int lane) {
    auto value = [&](int t, int i) { return w.solved[t][i] * w.beta[i]; };
#pragma unroll 1
    for (int index = warp; index < TRIANGLE_TILES; index += WITHIN_THREADS / 32) {
        const int step = index < 8 ? 0 : index < 14 ? 1 : index < 18 ? 2 : 3, tile = index - triangle_at(step, 0);
        const int t = 8 * tile + (lane >> 2), i = 16 * step + 2 * (lane & 3);
        uint4 words;
        split(words.x, words.z, value(t, i), value(t, i + 1));
        split(words.y, words.w, value(t, i + 8), value(t, i + 9));
        to[index][lane] = words;
    }
}

// Grid: places * value_heads.
extern "C" __global__ void __launch_bounds__(WITHIN_THREADS, WITHIN_BLOCKS) delta_rule_within_chunks(
    const __nv_bfloat16* qkv,  // [M, 2 key_heads Dk + value_heads Dv]
    const float* decay,        // [M, value_heads]
    const float* beta,         // [M, value_heads]
    const int* cu_rows,        // [S + 1]
    Chunk* chunks,             // [places, value_heads]
    Rows64* row_tiles,         // [places, key_heads]
    int M, int S, int first, int key_heads, int value_heads, int value_dim) {
    extern __shared__ __align__(1024) char memory[];
    Within& w = *reinterpret_cast<Within*>(memory);
    pdl_launch_dependents();
    pdl_wait();
    const int head = blockIdx.x % value_heads, place = first + blockIdx.x / value_heads;
    int low = 0, high = S;  // the last sequence that begins here or before
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_place(min(max(cu_rows[middle], 0), M), middle) <= place) low = middle;
        else high = middle;
    }
    const Rows rows(cu_rows, 0, low, M);
    const int begin = rows.start + (place - first_place(rows.start, low)) * CHUNK, count = min(rows.stop - begin, CHUNK);
    if (begin < rows.start || count <= 0) return;  // the whole block

    // Stage 1: rows of k and q, and their lengths.
    const Heads heads{key_heads, KEY_DIM, value_heads, value_dim};
    const int thread = threadIdx.x, lane = thread & 31;
    const int warp = __shfl_sync(ALL_LANES, thread >> 5, 0);  // the same for all, as the compiler may know
    const u32 tiles = shared_address(w.rows);
    const __nv_bfloat16* const q = qkv + begin * heads.width() + heads.key_head(head) * KEY_DIM;
    fetch_rows<WITHIN_THREADS>(tiles, q + (size_t)key_heads * KEY_DIM, heads.width(), count, thread);
    fetch_rows<WITHIN_THREADS>(tiles + ROWS_BYTES, q, heads.width(), count, thread);
    cp_async_commit();
    if (thread < CHUNK) {
        const size_t at = (size_t)(begin + thread) * value_heads + head;
        w.decay[thread] = thread < count ? decay[at] : 1.0f;
        w.beta[thread] = thread < count ? beta[at] : 0.0f;
    }
    cp_async_wait<0>();
    __syncthreads();
    if (head % (value_heads / key_heads) == 0) {  // for all heads of the key head
        uint4* const to = row_tiles[(size_t)(place - first) * key_heads + heads.key_head(head)].k;
#pragma unroll 4
        for (int i = thread; i < (int)sizeof(Rows64) / 16; i += WITHIN_THREADS) to[i] = w.rows[i];
    }
    if (thread < CHUNK) multiply_decays(w, thread);

    // Stage 2: k . k by four warps, q . k by the others, 16 rows each; and the rows' squares.
    const int which = warp / STEPS, strip = warp % STEPS, g = lane >> 2, t = lane & 3;
    float products[4 * ROW_TILES] = {}, squares[8] = {};
#pragma unroll 1
    for (int step = 0; step < KEY_STEPS; ++step) {
        const u32 own = tiles + which * ROWS_BYTES;
        u32 a[4], b[4];
        ldmatrix_x4(a, own + piece_at(16 * strip + (lane & 15), 2 * step + (lane >> 4)));
        keys_by_rows(b, own, step, strip, lane);
        mma(squares, a, b[0], b[1]);
        mma(squares + 4, a, b[2], b[3]);
#pragma unroll
        for (int p = 0; p < STEPS; ++p) {
            if (p > strip) break;  // above the diagonal
            keys_by_rows(b, tiles, step, p, lane);
            mma(products + 8 * p, a, b[0], b[1]);
            mma(products + 8 * p + 4, a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e)
        if (g == 2 * t + e) {
            w.row[which][16 * strip + g] = squares[e];
            w.row[which][16 * strip + g + 8] = squares[6 + e];
        }
    __syncthreads();

    // Stage 3: factors.
    Chunk& to = chunks[blockIdx.x];
    if (thread < CHUNK) {
        const int i = thread, block = i / 16;
        const float unit_k = rsqrtf(w.row[0][i] + LENGTH_EPS);
        const float unit_q = rsqrtf(w.row[1][i] + LENGTH_EPS) * rsqrtf((float)KEY_DIM);
        const float before = w.from_first[i] * decay_between(w, 0, block);
        w.row[0][i] = unit_k * w.beta[i];
        w.row[1][i] = unit_q;
        w.column[i] = unit_k;
        w.row_decayed[0][i] = w.row[0][i] * w.from_first[i];
        w.row_decayed[1][i] = unit_q * w.from_first[i];
        w.column_decayed[i] = unit_k * w.to_last[i];
        to.for_state.read_k[i] = before * unit_k;
        to.for_outputs.read_q[i] = before * unit_q;
        to.for_state.keep[i] = w.column_decayed[i] * decay_between(w, block + 1, STEPS);
        if (i == CHUNK - 1) to.for_state.decay = before;
    }
    __syncthreads();

    // Stage 4: A, and P, which becomes operands as it is.
    const int low_row = 16 * strip + g;
#pragma unroll
    for (int p = 0; p < STEPS; ++p) {
        if (p > strip) break;
        const float between = decay_between(w, p + 1, strip);
        float rows[2], columns[4];
#pragma unroll
        for (int e = 0; e < 2; ++e)
            rows[e] = p < strip ? w.row_decayed[which][low_row + 8 * e] * between : w.row[which][low_row + 8 * e];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = 16 * p + 8 * (e / 2) + 2 * t + e % 2;
            columns[e] = p < strip ? w.column_decayed[i] : w.column[i];
        }
        float* const x = products + 8 * p;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int i = 8 * (e / 4) + 2 * t + e % 2, r = g + 8 * (e / 2 % 2);
            x[e] *= rows[e / 2 % 2] * columns[e / 4 * 2 + e % 2];
            if (p == strip) x[e] = r < i + !which ? 0.0f : x[e] * w.inside[strip][i][r];
            if (which == 0) w.columns[16 * p + i][16 * strip + r] = x[e];
        }
        if (which == 1) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                uint4 words;
                split(words.x, words.z, x[2 * e], x[2 * e + 1]);
                split(words.y, words.w, x[4 + 2 * e], x[4 + 2 * e + 1]);
                to.for_outputs.p[triangle_at(p, 2 * strip + e)][lane] = words;
            }
        }
    }
    __syncthreads();

    // Stage 5: T.
    if (warp < STEPS) invert_diagonal(w, warp, lane);
    __syncthreads();
    complete_columns(w, warp, lane);
    __syncthreads();
    write_solved(w, chunks[blockIdx.x].for_state.t, warp, lane);
}

// --- the second launch: chunk after chunk ---
//
// A block has 32 columns of a head's state, each 16 of them, transposed, in the accumulators of a warp, which are the next
// product's operand. Beside each such warp stands one that makes the outputs: it gets state and D as operands. These warps
// have less to multiply, so they bring everything from memory for all. H200, 2048 rows of 32 heads, us of both launches:
// 105; 108 where A and P were weighed in shared memory; 115 where rows, T and P came by cp.async; 137 where, with
// that, the three products of an accumulator in T (V - g K S) and P D followed each other.

constexpr int STRIPS = 2, BLOCK_COLUMNS = STRIPS * STRIP, GROUP = STRIPS * 32, THROUGH_THREADS = 2 * GROUP;
static_assert(BLOCK_COLUMNS == COLUMNS);

struct Through {
    uint4 k[2][ROWS_BYTES / 16], q[ROWS_BYTES / 16];
    uint4 v[CHUNK][BLOCK_COLUMNS / 8];
    uint4 states[STRIPS][KEY_STEPS][2][32], learnt[STRIPS][STEPS][2][32];  // operands
    StateGiven for_state;
    OutputGiven for_outputs;
    Mbarrier keys_there, given_there;
};

// Named barriers: of the block, of the warps that make outputs, and of each pair of warps.
enum Barrier {
    KEYS_READY = 1,
    GIVEN_READY,
    OUTPUT_GROUP,
    STATE_FULL,
    STATE_EMPTY = STATE_FULL + STRIPS,
    LEARNT_FULL = STATE_EMPTY + STRIPS,
    LEARNT_EMPTY = LEARNT_FULL + STRIPS
};
constexpr int PAIR = 64;
static_assert(LEARNT_EMPTY + STRIPS <= 16 && sizeof(Through) == 99600);

// What a block works on, chunk by chunk.
struct Walk {
    Heads heads;
    const __nv_bfloat16* qkv;
    const Chunk* chunks;  // of this head, from the first chunk on
    const Rows64* tiles;  // of its key head
    int head, column, row, stop, thread;  // of the group

    __device__ __forceinline__ int count() const { return min(stop - row, CHUNK); }
    __device__ __forceinline__ bool has_next() const { return row + CHUNK < stop; }
    __device__ __forceinline__ void advance() { row += CHUNK, chunks += heads.value_heads, tiles += heads.key_heads; }

    __device__ __forceinline__ void fetch_values(uint4 (*tile)[BLOCK_COLUMNS / 8]) const {
        constexpr int PIECES = BLOCK_COLUMNS / 8;
        const __nv_bfloat16* const from = qkv + row * heads.width() + 2 * (size_t)heads.key_heads * KEY_DIM +
                                          (size_t)head * heads.value_dim + column;
#pragma unroll 1
        for (int i = thread; i < CHUNK * PIECES; i += GROUP) {
            const int r = i / PIECES, piece = i % PIECES;
            cp_async_16(shared_address(&tile[r][piece ^ (r >> 1 & 3)]),
                    from + min(r, count() - 1) * heads.width() + piece * 8, r < count() ? 16 : 0);
        }
    }
    // Two parts at once; their barrier counts the bytes, where there are bulk copies.
    template <class T, class U>
    __device__ __forceinline__ void fetch_parts(T& to, const T& from, U& also, const U& also_from, Mbarrier* mbarrier) const {
        const u32 at = shared_address(&to), also_at = shared_address(&also);
#if __CUDA_ARCH__ >= 900
        if (thread > 0) return;
        const u32 counter = shared_address(mbarrier);
        mbarrier_arrive_expect_tx(counter, sizeof(T) + sizeof(U));
        bulk_load(at, &from, sizeof(T), counter);
        bulk_load(also_at, &also_from, sizeof(U), counter);
#else
        auto fetch = [&](u32 to, const void* from, int count) {
#pragma unroll 4
            for (int i = thread; i < count; i += GROUP) cp_async_16(to + 16 * i, static_cast<const uint4*>(from) + i);
        };
        fetch(at, &from, sizeof(T) / 16);
        fetch(also_at, &also_from, sizeof(U) / 16);
#endif
    }
};

// c += 16 keys of the state (step) times rows of k or q: columns by rows.
__device__ __forceinline__ void times_keys(float (&c)[4 * ROW_TILES], u32 tile, int step, int lane, const Operand& operand) {
    u32 b[STEPS][4];
#pragma unroll
    for (int p = 0; p < STEPS; ++p) keys_by_rows(b[p], tile, step, p, lane);
#pragma unroll
    for (int p = 0; p < ROW_TILES; ++p) mma(c + 4 * p, operand.high, b[p / 2] + p % 2 * 2);
#pragma unroll
    for (int p = 0; p < ROW_TILES; ++p) mma(c + 4 * p, operand.low, b[p / 2] + p % 2 * 2);
}

// c += 16 rows of an operand (step) times a triangle. Products of one accumulator wait for each other: they stand apart.
__device__ __forceinline__ void times_triangle(float (&c)[4 * ROW_TILES], const uint4* triangle, int step, int lane,
                                               const Operand& a) {
    uint4 b[ROW_TILES];
#pragma unroll
    for (int tile = 2 * step; tile < ROW_TILES; ++tile) b[tile] = triangle[triangle_at(step, tile) * 32 + lane];
#pragma unroll
    for (int tile = 2 * step; tile < ROW_TILES; ++tile) mma(c + 4 * tile, a.high, b[tile].x, b[tile].y);
#pragma unroll
    for (int tile = 2 * step; tile < ROW_TILES; ++tile) mma(c + 4 * tile, a.low, b[tile].x, b[tile].y);
#pragma unroll
    for (int tile = 2 * step; tile < ROW_TILES; ++tile) mma(c + 4 * tile, a.high, b[tile].z, b[tile].w);
}

// Keeps 16 columns of the state, transposed: lane (g, t) has of columns g and g + 8 keys 8 j + 2 t and + 1 in state[4 j ...].
__device__ __forceinline__ void keep_state(Through& m, int chunks, int value_dim, float* pool, int strip, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float* const place = pool + (size_t)2 * t * value_dim + strip * STRIP + g;
    float state[4 * KEY_TILES];
    auto element = [&](int i) { return place + (size_t)(8 * (i / 4) + (i & 1)) * value_dim + 8 * (i >> 1 & 1); };
#pragma unroll
    for (int i = 0; i < 4 * KEY_TILES; ++i) state[i] = *element(i);
    const StateGiven& now = m.for_state;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        named_barrier_sync(KEYS_READY, THROUGH_THREADS);
        const u32 k = shared_address(m.k[chunk & 1]);
        make_opaque(lane);  // addresses made of it are not kept over all chunks

        // Stage 1: k S, and the state for the outputs.
        float learnt[4 * ROW_TILES] = {};
        if (chunk > 0) named_barrier_sync(STATE_EMPTY + strip, PAIR);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
            const Operand operand(state + 8 * step);
            operand.store(&m.states[strip][step][0][lane]);
            times_keys(learnt, k, step, lane, operand);
        }
        named_barrier_arrive(STATE_FULL + strip, PAIR);

        // Stage 2: D = T (V - g k S).
        named_barrier_sync(GIVEN_READY, THROUGH_THREADS);
#pragma unroll
        for (int p = 0; p < STEPS; ++p) {
            u32 v[4];
            const int row = 16 * p + (lane & 15);
            ldmatrix_x4_trans(v, shared_address(&m.v[row][(2 * strip + (lane >> 4)) ^ (row >> 1 & 3)]));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 by = *reinterpret_cast<const float2*>(now.read_k + 16 * p + 8 * half + 2 * t);
                float* const c = learnt + 8 * p + 4 * half;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    c[2 * e] = fmaf(-by.x, c[2 * e], __uint_as_float(v[half + 2 * e] << 16));
                    c[2 * e + 1] = fmaf(-by.y, c[2 * e + 1], __uint_as_float(v[half + 2 * e] & 0xffff0000u));
                }
            }
        }
        float delta[4 * ROW_TILES] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) times_triangle(delta, now.t[0], step, lane, Operand(learnt + 8 * step));
        if (chunk > 0) named_barrier_sync(LEARNT_EMPTY + strip, PAIR);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) Operand(delta + 8 * step).store(&m.learnt[strip][step][0][lane]);
#pragma unroll
        for (int p = 0; p < ROW_TILES; ++p) {
            const float2 by = *reinterpret_cast<const float2*>(now.keep + 8 * p + 2 * t);
            delta[4 * p] *= by.x, delta[4 * p + 1] *= by.y, delta[4 * p + 2] *= by.x, delta[4 * p + 3] *= by.y;
        }
        const float decay = now.decay;
        named_barrier_arrive(LEARNT_FULL + strip, PAIR);  // and T, factors and v have been read

        // Stage 3: the state.
#pragma unroll
        for (int i = 0; i < 4 * KEY_TILES; ++i) state[i] *= decay;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const Operand operand(delta + 8 * step);
#pragma unroll
            for (int p = 0; p < KEY_STEPS; p += 2) {
                u32 b[2][4];
                rows_by_keys(b[0], k, step, p, lane);
                rows_by_keys(b[1], k, step, p + 1, lane);
#pragma unroll
                for (int i = 0; i < 4; ++i) mma(state + 8 * p + 4 * i, operand.high, b[i / 2] + i % 2 * 2);
#pragma unroll
                for (int i = 0; i < 4; ++i) mma(state + 8 * p + 4 * i, operand.low, b[i / 2] + i % 2 * 2);
            }
        }
    }
    make_opaque(value_dim);  // or its 64 addresses would be kept all the time
#pragma unroll
    for (int i = 0; i < 4 * KEY_TILES; ++i) *element(i) = state[i];
}

// Makes the outputs of 16 columns; lane (g, t) has of columns g and g + 8 rows 8 j + 2 t and + 1.
__device__ __forceinline__ void make_outputs(Through& m, Walk walk, __nv_bfloat16* out, int strip, int lane) {
    const size_t width = (size_t)walk.heads.value_heads * walk.heads.value_dim;
    out += walk.row * width + (size_t)walk.head * walk.heads.value_dim + walk.column + strip * STRIP + 2 * (lane & 3);
    auto fetch_keys = [&](int parity) {
        walk.fetch_parts(m.k[parity], walk.tiles->k, m.q, walk.tiles->q, &m.keys_there);
        cp_async_commit();
    };
    auto fetch_given = [&] {
        walk.fetch_parts(m.for_state, walk.chunks->for_state, m.for_outputs, walk.chunks->for_outputs, &m.given_there);
        walk.fetch_values(m.v);
        cp_async_commit();
    };
    auto keys_are_ready = [&](int parity) {
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(shared_address(&m.keys_there), parity);
#else
        cp_async_wait<1>();
#endif
        named_barrier_arrive(KEYS_READY, THROUGH_THREADS);
    };
    fetch_keys(0);
    fetch_given();
    keys_are_ready(0);
    const u32 q = shared_address(m.q);
#pragma unroll 1
    for (int parity = 0;; parity ^= 1) {
        const bool has_next = walk.has_next();
        const int count = walk.count();
        cp_async_wait<0>();
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(shared_address(&m.given_there), parity);
#endif
        named_barrier_arrive(GIVEN_READY, THROUGH_THREADS);
        named_barrier_sync(OUTPUT_GROUP, GROUP);
        walk.advance();

        // Stage 1: q S.
        float mixed[4 * ROW_TILES] = {};
        named_barrier_sync(STATE_FULL + strip, PAIR);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
            Operand operand;
            operand.load(&m.states[strip][step][0][lane]);
            times_keys(mixed, q, step, lane, operand);
        }
        if (has_next) named_barrier_arrive(STATE_EMPTY + strip, PAIR);
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            const float2 by = *reinterpret_cast<const float2*>(m.for_outputs.read_q + 8 * tile + 2 * (lane & 3));
            float* const c = mixed + 4 * tile;
            c[0] *= by.x, c[1] *= by.y, c[2] *= by.x, c[3] *= by.y;
        }
        named_barrier_sync(OUTPUT_GROUP, GROUP);  // q has been read; states are there, so the other tile of k has been, too
        if (has_next) fetch_keys(parity ^ 1);

        // Stage 2: P D.
        named_barrier_sync(LEARNT_FULL + strip, PAIR);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Operand operand;
            operand.load(&m.learnt[strip][step][0][lane]);
            times_triangle(mixed, m.for_outputs.p[0], step, lane, operand);
        }
        if (has_next) named_barrier_arrive(LEARNT_EMPTY + strip, PAIR);
        named_barrier_sync(OUTPUT_GROUP, GROUP);  // what is given has been read
        if (has_next) {
            fetch_given();
            keys_are_ready(parity ^ 1);
        }
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            const int row = 8 * tile + (lane >> 2);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 word = movmatrix_trans(bf16_pair(mixed[4 * tile + 2 * half], mixed[4 * tile + 2 * half + 1]));
                if (row < count) *reinterpret_cast<u32*>(out + row * width + 8 * half) = word;
            }
        }
        out += CHUNK * width;
        if (!has_next) break;
    }
}

// Grid: S * value_heads * Dv / 32. Of the places from ``first`` to ``last``.
extern "C" __global__ void __launch_bounds__(THROUGH_THREADS, 2) delta_rule_through_chunks(
    const __nv_bfloat16* qkv,  // [M, 2 key_heads Dk + value_heads Dv]
    float* pool,               // [slots, value_heads, Dk, Dv]
    const int* slots,          // [S]
    const int* cu_rows,        // [S + 1]
    const Chunk* chunks,       // [last - first, value_heads]
    const Rows64* row_tiles,   // [last - first, key_heads]
    __nv_bfloat16* out,        // [M, value_heads Dv]
    int M, int first, int last, int pool_slots, int key_heads, int value_heads, int value_dim) {
    extern __shared__ __align__(1024) char memory[];
    Through& m = *reinterpret_cast<Through*>(memory);
    pdl_launch_dependents();
    pdl_wait();
    const int tiles = value_dim / BLOCK_COLUMNS, column = blockIdx.x % tiles * BLOCK_COLUMNS;
    const int head = blockIdx.x / tiles % value_heads, sequence = blockIdx.x / tiles / value_heads, slot = slots[sequence];
    const Rows rows(cu_rows, 0, sequence, M);
    const int begin = first_place(rows.start, sequence), skipped = max(first - begin, 0);
    const int start = rows.start + skipped * CHUNK, stop = min(rows.stop, rows.start + (last - begin) * CHUNK);
    if (start >= stop) return;  // the whole block
    const Heads heads{key_heads, KEY_DIM, value_heads, value_dim};
    const int lane = threadIdx.x & 31, warp = __shfl_sync(ALL_LANES, threadIdx.x >> 5, 0), strip = warp % STRIPS;
    if ((u32)slot >= (u32)pool_slots) {  // padding
        constexpr int WORDS = BLOCK_COLUMNS / 2;
        for (int i = threadIdx.x; i < (stop - start) * WORDS; i += THROUGH_THREADS) {
            const size_t at = ((size_t)(start + i / WORDS) * value_heads + head) * value_dim + column;
            reinterpret_cast<u32*>(out + at)[i % WORDS] = 0;
        }
        return;
    }
    const size_t place = begin + skipped - first;
    const Walk walk{heads, qkv, chunks + place * value_heads + head, row_tiles + place * key_heads + heads.key_head(head),
                    head, column, start, stop, (int)threadIdx.x % GROUP};
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&m.keys_there), 1);
        mbarrier_init(shared_address(&m.given_there), 1);
        mbarrier_fence_init();
    }
    __syncthreads();
#endif
    if (warp < STRIPS)
        keep_state(m, (stop - start + CHUNK - 1) / CHUNK, value_dim,
                   pool + ((size_t)slot * value_heads + head) * heads.state_size() + column, strip, lane);
    else make_outputs(m, walk, out, strip, lane);
}
