// Prefill in chunks of 64 rows with the tensor cores (chunked.cuh), in two launches. Dk = 128, Dv a multiple of 32.
// Launched by launch.py. sm_80 and newer.
#include "async_copy.cuh"
#include "bf16.cuh"
#include "chunked.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "named_barrier.cuh"
#include "opaque.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"

// --- the first launch, intra-chunk: T, P and factors of every chunk ---

constexpr int INTRA_BLOCKS =
    __CUDA_ARCH__ > 900 ? 3 : 4;  // per multiprocessor; above sm_90 a fourth block spills registers
constexpr int INTRA_THREADS = 256, STRIDE = CHUNK + 4;

struct IntraChunk {
    union {
        uint4 rows[2 * ROWS_BYTES / 16];  // k, then q
        float columns[CHUNK][STRIDE];     // of A: [i][t]
    };
    // (I + A)^-1, [t][i]. The part above the diagonal holds a second copy: [k][16 b + r] has element [r][k] of diagonal
    // block b > 0.
    float inverse[CHUNK][STRIDE];
    // G inside blocks of 16 rows: [block][i][t]. For row t: the product from the first row of its block on. For row i:
    // the product from the next row to the last of its block.
    float inside[STEPS][16][16 + 1], from_first[CHUNK], to_last[CHUNK];
    float decay[CHUNK], beta[CHUNK];
    // Factors of rows [k or q] (their squares at first) and of columns: without decays, and with the decays inside
    // their block.
    float row[2][CHUNK], row_decayed[2][CHUNK], column[CHUNK], column_decayed[CHUNK];
};
static_assert(sizeof(IntraChunk) == 57088);

// Products of decays inside each block of 16 rows, by column.
__device__ __forceinline__ void multiply_decays(IntraChunk& w, int thread) {
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

// The product of all decays of the blocks ``from`` .. ``to`` - 1.
__device__ __forceinline__ float decay_between(const IntraChunk& w, int from, int to) {
    float all = 1.0f;
    for (int block = from; block < to; ++block) all *= w.from_first[16 * block + 15];
    return all;
}

// A diagonal block of 16 of (I + A)^-1, by forward substitution. A lane has half of a column.
__device__ __forceinline__ void invert_diagonal(IntraChunk& w, int block, int lane) {
    const int begin = 16 * block, i = lane & 15, row_offset = lane >> 4 << 3;
    float x[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) x[r] = row_offset + r == i ? 1.0f : 0.0f;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int row = begin + 8 * half + j;
            const float known = __shfl_sync(ALL_LANES, x[j], 16 * half + i);
            const float4* const a = reinterpret_cast<const float4*>(&w.columns[row][begin + row_offset]);
            if (row_offset == 0) w.inverse[row][begin + i] = known;
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
        *reinterpret_cast<float4*>(&w.inverse[i][begin + row_offset + r]) =
            make_float4(x[r], x[r + 1], x[r + 2], x[r + 3]);
}

// The eight columns of a warp below their diagonal blocks: X_b = -(diagonal block b) (A X)_b, 16 rows at a time. A lane
// has four rows of a column.
__device__ __forceinline__ void complete_columns(IntraChunk& w, int warp, int lane) {
    const int i = 8 * warp + (lane & 7), row_offset = 4 * (lane >> 3), first = warp / 2 * 16;
    auto store_column = [&](int row, float4 x) {
        w.inverse[row][i] = x.x, w.inverse[row + 1][i] = x.y, w.inverse[row + 2][i] = x.z, w.inverse[row + 3][i] = x.w;
        __syncwarp();
    };
#pragma unroll 1
    for (int begin = first + 16; begin < CHUNK; begin += 16) {
        float4 sum = make_float4(0, 0, 0, 0), x = sum;
#pragma unroll 8
        for (int j = first; j < begin; ++j)
            sum = fma4(w.inverse[j][i], *reinterpret_cast<const float4*>(&w.columns[j][begin + row_offset]), sum);
        store_column(begin + row_offset, sum);
#pragma unroll 8
        for (int k = 0; k < 16; ++k)
            x = fma4(-w.inverse[begin + k][i], *reinterpret_cast<const float4*>(&w.inverse[k][begin + row_offset]), x);
        __syncwarp();
        store_column(begin + row_offset, x);
    }
}

// Writes T as mma operands. Warps take tiles in turn.
__device__ __forceinline__ void write_inverse(const IntraChunk& w, uint4 (*to)[32], int warp, int lane) {
    auto value = [&](int t, int i) { return w.inverse[t][i] * w.beta[i]; };
#pragma unroll 1
    for (int index = warp; index < TRIANGLE_TILES; index += INTRA_THREADS / 32) {
        const int step = index < 8 ? 0 : index < 14 ? 1 : index < 18 ? 2 : 3, tile = index - triangle_at(step, 0);
        const int t = 8 * tile + (lane >> 2), i = 16 * step + 2 * (lane & 3);
        uint4 words;
        split(words.x, words.z, value(t, i), value(t, i + 1));
        split(words.y, words.w, value(t, i + 8), value(t, i + 9));
        to[index][lane] = words;
    }
}

// Grid: chunk indices * value_heads.
extern "C" __global__ void __launch_bounds__(INTRA_THREADS, INTRA_BLOCKS) delta_rule_intra_chunk(
    const __nv_bfloat16* qkv,  // [M, 2 key_heads Dk + value_heads Dv]
    const float* decay,        // [M, value_heads]
    const float* beta,         // [M, value_heads]
    const int* cu_rows,        // [S + 1]
    ChunkResult* chunks,       // [chunk indices, value_heads]
    RowTiles* row_tiles,       // [chunk indices, key_heads]
    int M, int S, int first, int key_heads, int value_heads, int value_dim) {
    extern __shared__ __align__(1024) char memory[];
    IntraChunk& w = *reinterpret_cast<IntraChunk*>(memory);
    pdl_launch_dependents();
    pdl_wait();
    const int head = blockIdx.x % value_heads, chunk_index = first + blockIdx.x / value_heads;
    int low = 0, high = S;  // the last sequence that starts here or before
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_chunk_index(min(max(cu_rows[middle], 0), M), middle) <= chunk_index) low = middle;
        else high = middle;
    }
    const Rows rows(cu_rows, 0, low, M);
    const int begin = rows.start + (chunk_index - first_chunk_index(rows.start, low)) * CHUNK,
              count = min(rows.stop - begin, CHUNK);
    if (begin < rows.start || count <= 0) return;  // the whole block

    // Stage 1: rows of k and q, and their lengths.
    const Heads heads{key_heads, KEY_DIM, value_heads, value_dim};
    const int thread = threadIdx.x, lane = thread & 31;
    const int warp = __shfl_sync(ALL_LANES, thread >> 5, 0);  // uniform, which the compiler cannot see
    const u32 tiles = shared_address(w.rows);
    const __nv_bfloat16* const q = qkv + begin * heads.width() + heads.key_head(head) * KEY_DIM;
    fetch_rows<INTRA_THREADS>(tiles, q + (size_t)key_heads * KEY_DIM, heads.width(), count, thread);
    fetch_rows<INTRA_THREADS>(tiles + ROWS_BYTES, q, heads.width(), count, thread);
    cp_async_commit();
    if (thread < CHUNK) {
        const size_t at = (size_t)(begin + thread) * value_heads + head;
        w.decay[thread] = thread < count ? decay[at] : 1.0f;
        w.beta[thread] = thread < count ? beta[at] : 0.0f;
    }
    cp_async_wait<0>();
    __syncthreads();
    if (head % (value_heads / key_heads) == 0) {  // once for all heads of the key head
        uint4* const to = row_tiles[(size_t)(chunk_index - first) * key_heads + heads.key_head(head)].k;
#pragma unroll 4
        for (int i = thread; i < (int)sizeof(RowTiles) / 16; i += INTRA_THREADS) to[i] = w.rows[i];
    }
    if (thread < CHUNK) multiply_decays(w, thread);

    // Stage 2: four warps compute k . k, the others q . k, 16 rows each. The same products give the squares of the
    // rows.
    const int which = warp / STEPS, strip = warp % STEPS, g = lane >> 2, t = lane & 3;
    float products[4 * ROW_TILES] = {}, squares[8] = {};
#pragma unroll 1
    for (int step = 0; step < KEY_STEPS; ++step) {
        const u32 tile = tiles + which * ROWS_BYTES;
        u32 a[4], b[4];
        ldmatrix_x4(a, tile + swizzled(16 * strip + (lane & 15), 2 * step + (lane >> 4)));
        keys_by_rows(b, tile, step, strip, lane);
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
    ChunkResult& to = chunks[blockIdx.x];
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

    // Stage 4: A, and P, which is stored as mma operands.
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
    write_inverse(w, chunks[blockIdx.x].for_state.t, warp, lane);
}

// --- the second launch, inter-chunk: the chunks of a head in order ---
//
// A block has 32 columns of a head's state. A state warp holds 16 of them, transposed, in its accumulators, which are
// also the operand of the next product. Its output warp computes the outputs from state and D, which it receives as
// operands. Output warps have fewer products, so that they also load from memory for all. H200, 2048 rows of 32
// heads, us of both launches: this 105. With A and P scaled in shared memory 108. With rows, T and P by cp.async 115.
// With that, and the three products of an accumulator in T (V - g K S) and P D in sequence, 137.

constexpr int STRIPS = 2, BLOCK_COLUMNS = STRIPS * STRIP, GROUP = STRIPS * 32, INTER_THREADS = 2 * GROUP;
static_assert(BLOCK_COLUMNS == COLUMNS);

struct InterChunk {
    uint4 k[2][ROWS_BYTES / 16], q[ROWS_BYTES / 16];
    uint4 v[CHUNK][BLOCK_COLUMNS / 8];
    uint4 states[STRIPS][KEY_STEPS][2][32], deltas[STRIPS][STEPS][2][32];  // as operands
    StateInputs for_state;
    OutputInputs for_outputs;
    Mbarrier keys_mbarrier, inputs_mbarrier;
};

// Named barriers: of the block, of the output warps, and of each pair of a state warp and an output warp.
enum Barrier {
    KEYS_FULL = 1,
    INPUTS_FULL,
    OUTPUT_GROUP,
    STATE_FULL,
    STATE_EMPTY = STATE_FULL + STRIPS,
    DELTA_FULL = STATE_EMPTY + STRIPS,
    DELTA_EMPTY = DELTA_FULL + STRIPS
};
constexpr int PAIR = 64;
static_assert(DELTA_EMPTY + STRIPS <= 16 && sizeof(InterChunk) == 99600);

// The work of a block, chunk by chunk.
struct ChunkIterator {
    Heads heads;
    const __nv_bfloat16* qkv;
    const ChunkResult* chunks;            // of this head, from the first chunk on
    const RowTiles* tiles;                // of its key head
    int head, column, row, stop, thread;  // thread: in its group of warps

    __device__ __forceinline__ int count() const { return min(stop - row, CHUNK); }
    __device__ __forceinline__ bool has_next() const { return row + CHUNK < stop; }
    __device__ __forceinline__ void advance() { row += CHUNK, chunks += heads.value_heads, tiles += heads.key_heads; }

    __device__ __forceinline__ void fetch_values(uint4 (*tile)[BLOCK_COLUMNS / 8]) const {
        constexpr int VECS = BLOCK_COLUMNS / 8;
        const __nv_bfloat16* const from =
            qkv + row * heads.width() + 2 * (size_t)heads.key_heads * KEY_DIM + (size_t)head * heads.value_dim + column;
#pragma unroll 1
        for (int i = thread; i < CHUNK * VECS; i += GROUP) {
            const int r = i / VECS, vec = i % VECS;
            cp_async_16(shared_address(&tile[r][vec ^ (r >> 1 & 3)]),
                        from + min(r, count() - 1) * heads.width() + vec * 8, r < count() ? 16 : 0);
        }
    }
    // Loads two parts at once. With bulk copies, the mbarrier counts the bytes of both.
    template <class T, class U>
    __device__ __forceinline__ void fetch_parts(T& to, const T& from, U& also, const U& also_from,
                                                Mbarrier* mbarrier) const {
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

// c += 16 keys of the state (step) times the rows of k or q. The result is columns by rows.
__device__ __forceinline__ void times_keys(float (&c)[4 * ROW_TILES], u32 tile, int step, int lane,
                                           const Operand& operand) {
    u32 b[STEPS][4];
#pragma unroll
    for (int p = 0; p < STEPS; ++p) keys_by_rows(b[p], tile, step, p, lane);
#pragma unroll
    for (int p = 0; p < ROW_TILES; ++p) mma(c + 4 * p, operand.high, b[p / 2] + p % 2 * 2);
#pragma unroll
    for (int p = 0; p < ROW_TILES; ++p) mma(c + 4 * p, operand.low, b[p / 2] + p % 2 * 2);
}

// c += 16 rows of an operand (step) times a triangular matrix. Products on the same accumulator are interleaved with
// others, because they wait for each other.
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

// A state warp: keeps 16 columns of the state, transposed. Lane (g, t) has keys 8 j + 2 t and + 1 of columns g and g +
// 8 in state[4 j ...].
__device__ __forceinline__ void state_warp(InterChunk& m, int chunks, int value_dim, float* pool, int strip, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float* const state_base = pool + (size_t)2 * t * value_dim + strip * STRIP + g;
    float state[4 * KEY_TILES];
    auto element = [&](int i) { return state_base + (size_t)(8 * (i / 4) + (i & 1)) * value_dim + 8 * (i >> 1 & 1); };
#pragma unroll
    for (int i = 0; i < 4 * KEY_TILES; ++i) state[i] = *element(i);
    const StateInputs& inputs = m.for_state;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        named_barrier_sync(KEYS_FULL, INTER_THREADS);
        const u32 k = shared_address(m.k[chunk & 1]);
        make_opaque(lane);  // no registers for addresses over all chunks

        // Stage 1: k S, and the state for the outputs.
        float residual[4 * ROW_TILES] = {};
        if (chunk > 0) named_barrier_sync(STATE_EMPTY + strip, PAIR);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
            const Operand operand(state + 8 * step);
            operand.store(&m.states[strip][step][0][lane]);
            times_keys(residual, k, step, lane, operand);
        }
        named_barrier_arrive(STATE_FULL + strip, PAIR);

        // Stage 2: D = T (V - g k S).
        named_barrier_sync(INPUTS_FULL, INTER_THREADS);
#pragma unroll
        for (int p = 0; p < STEPS; ++p) {
            u32 v[4];
            const int row = 16 * p + (lane & 15);
            ldmatrix_x4_trans(v, shared_address(&m.v[row][(2 * strip + (lane >> 4)) ^ (row >> 1 & 3)]));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 by = *reinterpret_cast<const float2*>(inputs.read_k + 16 * p + 8 * half + 2 * t);
                float* const c = residual + 8 * p + 4 * half;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    c[2 * e] = fmaf(-by.x, c[2 * e], __uint_as_float(v[half + 2 * e] << 16));
                    c[2 * e + 1] = fmaf(-by.y, c[2 * e + 1], __uint_as_float(v[half + 2 * e] & 0xffff0000u));
                }
            }
        }
        float delta[4 * ROW_TILES] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            times_triangle(delta, inputs.t[0], step, lane, Operand(residual + 8 * step));
        if (chunk > 0) named_barrier_sync(DELTA_EMPTY + strip, PAIR);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) Operand(delta + 8 * step).store(&m.deltas[strip][step][0][lane]);
#pragma unroll
        for (int p = 0; p < ROW_TILES; ++p) {
            const float2 by = *reinterpret_cast<const float2*>(inputs.keep + 8 * p + 2 * t);
            delta[4 * p] *= by.x, delta[4 * p + 1] *= by.y, delta[4 * p + 2] *= by.x, delta[4 * p + 3] *= by.y;
        }
        const float decay = inputs.decay;
        named_barrier_arrive(DELTA_FULL + strip, PAIR);  // T, factors and v have been read too

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
    make_opaque(value_dim);  // otherwise its 64 addresses would stay in registers
#pragma unroll
    for (int i = 0; i < 4 * KEY_TILES; ++i) *element(i) = state[i];
}

// An output warp: computes the outputs of 16 columns. Lane (g, t) has rows 8 j + 2 t and + 1 of columns g and g + 8.
__device__ __forceinline__ void output_warp(InterChunk& m, ChunkIterator chunk_iterator, __nv_bfloat16* out, int strip,
                                            int lane) {
    const size_t width = (size_t)chunk_iterator.heads.value_heads * chunk_iterator.heads.value_dim;
    out += chunk_iterator.row * width + (size_t)chunk_iterator.head * chunk_iterator.heads.value_dim +
           chunk_iterator.column + strip * STRIP + 2 * (lane & 3);
    auto fetch_keys = [&](int parity) {
        chunk_iterator.fetch_parts(
            m.k[parity], chunk_iterator.tiles->k, m.q, chunk_iterator.tiles->q, &m.keys_mbarrier);
        cp_async_commit();
    };
    auto fetch_inputs = [&] {
        chunk_iterator.fetch_parts(m.for_state, chunk_iterator.chunks->for_state, m.for_outputs,
                                   chunk_iterator.chunks->for_outputs, &m.inputs_mbarrier);
        chunk_iterator.fetch_values(m.v);
        cp_async_commit();
    };
    auto signal_keys = [&](int parity) {
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(shared_address(&m.keys_mbarrier), parity);
#else
        cp_async_wait<1>();
#endif
        named_barrier_arrive(KEYS_FULL, INTER_THREADS);
    };
    fetch_keys(0);
    fetch_inputs();
    signal_keys(0);
    const u32 q = shared_address(m.q);
#pragma unroll 1
    for (int parity = 0;; parity ^= 1) {
        const bool has_next = chunk_iterator.has_next();
        const int count = chunk_iterator.count();
        cp_async_wait<0>();
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(shared_address(&m.inputs_mbarrier), parity);
#endif
        named_barrier_arrive(INPUTS_FULL, INTER_THREADS);
        named_barrier_sync(OUTPUT_GROUP, GROUP);
        chunk_iterator.advance();

        // Stage 1: q S.
        float output[4 * ROW_TILES] = {};
        named_barrier_sync(STATE_FULL + strip, PAIR);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
            Operand operand;
            operand.load(&m.states[strip][step][0][lane]);
            times_keys(output, q, step, lane, operand);
        }
        if (has_next) named_barrier_arrive(STATE_EMPTY + strip, PAIR);
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            const float2 by = *reinterpret_cast<const float2*>(m.for_outputs.read_q + 8 * tile + 2 * (lane & 3));
            float* const c = output + 4 * tile;
            c[0] *= by.x, c[1] *= by.y, c[2] *= by.x, c[3] *= by.y;
        }
        named_barrier_sync(
            OUTPUT_GROUP, GROUP);  // q has been read; the state is there, so the other tile of k has been read too
        if (has_next) fetch_keys(parity ^ 1);

        // Stage 2: P D.
        named_barrier_sync(DELTA_FULL + strip, PAIR);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Operand operand;
            operand.load(&m.deltas[strip][step][0][lane]);
            times_triangle(output, m.for_outputs.p[0], step, lane, operand);
        }
        if (has_next) named_barrier_arrive(DELTA_EMPTY + strip, PAIR);
        named_barrier_sync(OUTPUT_GROUP, GROUP);  // the inputs have been read
        if (has_next) {
            fetch_inputs();
            signal_keys(parity ^ 1);
        }
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            const int row = 8 * tile + (lane >> 2);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 word =
                    movmatrix_trans(bf16_pair(output[4 * tile + 2 * half], output[4 * tile + 2 * half + 1]));
                if (row < count) *reinterpret_cast<u32*>(out + row * width + 8 * half) = word;
            }
        }
        out += CHUNK * width;
        if (!has_next) break;
    }
}

// Grid: S * value_heads * Dv / 32. For chunk indices ``first`` to ``last`` - 1.
extern "C" __global__ void __launch_bounds__(INTER_THREADS, 2) delta_rule_inter_chunk(
    const __nv_bfloat16* qkv,   // [M, 2 key_heads Dk + value_heads Dv]
    float* pool,                // [slots, value_heads, Dk, Dv]
    const int* slots,           // [S]
    const int* cu_rows,         // [S + 1]
    const ChunkResult* chunks,  // [last - first, value_heads]
    const RowTiles* row_tiles,  // [last - first, key_heads]
    __nv_bfloat16* out,         // [M, value_heads Dv]
    int M, int first, int last, int pool_slots, int key_heads, int value_heads, int value_dim) {
    extern __shared__ __align__(1024) char memory[];
    InterChunk& m = *reinterpret_cast<InterChunk*>(memory);
    pdl_launch_dependents();
    pdl_wait();
    const int tiles = value_dim / BLOCK_COLUMNS, column = blockIdx.x % tiles * BLOCK_COLUMNS;
    const int head = blockIdx.x / tiles % value_heads, sequence = blockIdx.x / tiles / value_heads,
              slot = slots[sequence];
    const Rows rows(cu_rows, 0, sequence, M);
    const int begin = first_chunk_index(rows.start, sequence), skipped = max(first - begin, 0);
    const int start = rows.start + skipped * CHUNK, stop = min(rows.stop, rows.start + (last - begin) * CHUNK);
    if (start >= stop) return;  // the whole block
    const Heads heads{key_heads, KEY_DIM, value_heads, value_dim};
    const int lane = threadIdx.x & 31, warp = __shfl_sync(ALL_LANES, threadIdx.x >> 5, 0), strip = warp % STRIPS;
    if ((u32)slot >= (u32)pool_slots) {  // padding
        constexpr int WORDS = BLOCK_COLUMNS / 2;
        for (int i = threadIdx.x; i < (stop - start) * WORDS; i += INTER_THREADS) {
            const size_t at = ((size_t)(start + i / WORDS) * value_heads + head) * value_dim + column;
            reinterpret_cast<u32*>(out + at)[i % WORDS] = 0;
        }
        return;
    }
    const size_t chunk_index = begin + skipped - first;
    const ChunkIterator chunk_iterator{
        heads,
        qkv,
        chunks + chunk_index * value_heads + head,
        row_tiles + chunk_index * key_heads + heads.key_head(head),
        head,
        column,
        start,
        stop,
        (int)threadIdx.x % GROUP};
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&m.keys_mbarrier), 1);
        mbarrier_init(shared_address(&m.inputs_mbarrier), 1);
        mbarrier_fence_init();
    }
    __syncthreads();
#endif
    if (warp < STRIPS)
        state_warp(m, (stop - start + CHUNK - 1) / CHUNK, value_dim,
                   pool + ((size_t)slot * value_heads + head) * heads.state_size() + column, strip, lane);
    else output_warp(m, chunk_iterator, out, strip, lane);
}
