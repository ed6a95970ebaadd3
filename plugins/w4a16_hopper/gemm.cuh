// W4A16 GEMM for sm_90a: out[m, n] = BF16(scale * sum_k x[m, k] * weight[n, k]), NVFP4 weights, BF16 activations.
//
// Weights are the A operand of wgmma, decoded in registers from layout nvfp4_wgmma_64x64 (layout.py makes it):
//   chunks of 64 rows x 64 k, 2304 bytes each, along K inside a block of 64 rows; N padded to 64 and K to 128 by zeros
//   bytes 0..2047     [4 warps][32 lanes][4 steps of 16 k]: a word is the 8 weights one lane feeds to one wgmma
//   bytes 2048..2303  [4 warps][8 g][2 row halves][4 steps]: E5M3 scales
// Lane (g, t) = (lane / 4, lane % 4) of warp w holds rows 16 w + g and + 8, k = 16 step + 2 t, + 1, + 8, + 9.
// Activations are the B operand in shared memory, a bulk tensor copy away. The result has weight rows as M, tokens as
// N.
//
// A block is one producer warpgroup and WARPGROUPS consumers of 64 rows each, all over TOKENS tokens. A ring of STAGES
// holds SPAN chunks each. Of the producer, one thread loads x and one thread each the weights of a consumer.
//
// Tiles have as many tokens as all can have alike, TOKENS at most, and boxes of x are no larger: what of a box lies
// outside x takes longer than what lies inside. H200, us, boxes of TOKENS / of a tile: 33 x 14336 x 5120 28.7 / 23.3,
// 65 31.9 / 26.4, 129 56.3 / 39.5, 200 63.5 / 53.3. The other tokens of a tile are whatever the ring held, and no
// token's sums depend on another's; they are not stored.
//
// Work: tiles of (WARPGROUPS * 64 rows) x TOKENS. A worker, which is a block, computes `whole` tiles alone; what is
// left are lines of stages, of a tile each or of all tiles together, that workers share. Who has the beginning of a
// tile adds the sums of the others in rising order of k, and rounds once; blocks of a cluster, which share one tile,
// each do so for a part of its tokens. The order depends on the form, (M, N, K), workers, lines and cluster, on nothing
// else.
//
// Lost here: clusters that share x by multicast; clusters of eight, or of four that fill the device; 2 x 64 rows a
// warpgroup; two blocks a multiprocessor; four consumers; decoding between the wgmma of one chunk; rings deeper than 8;
// taking over the sums of a tile's own tokens alone, with a branch for each eight (65 x 2048 x 4096 19.9 us for 10.2).
#pragma once
#include "async_copy.cuh"
#include "cluster.cuh"
#include "global_memory.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "named_barrier.cuh"
#include "nvfp4_mma.cuh"
#include "pdl.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

constexpr int CHUNK_K = 64;
constexpr int BLOCK_ROWS = 64;
constexpr int CHUNK_CODES = BLOCK_ROWS * CHUNK_K / 2;
constexpr int CHUNK_BYTES = CHUNK_CODES + BLOCK_ROWS * CHUNK_K / 16;
// Tokens that pass through shared memory at a time on the way out; 128 bytes are a token's 64 results.
constexpr int OUT_TOKENS = 32;
constexpr int OUT_BYTES = 2 * OUT_TOKENS * BLOCK_ROWS * 2;  // two in turn
// Neighbouring tiles share weights along up to so many token tiles, then go on along N: x of that many stays in the L2.
constexpr u32 TOKEN_TILES_PER_PANEL = 8;

template <int TOKENS_, int WARPGROUPS_, int SPAN_, int STAGES_, int GATHERS_>
struct Form {
    static constexpr int TOKENS = TOKENS_, WARPGROUPS = WARPGROUPS_, SPAN = SPAN_, STAGES = STAGES_;
    static constexpr int THREADS = 128 * (WARPGROUPS + 1), ROWS = WARPGROUPS * BLOCK_ROWS;
    static constexpr int X_CHUNK_BYTES = TOKENS * CHUNK_K * 2, X_BYTES = SPAN * X_CHUNK_BYTES;
    static constexpr int W_BYTES = WARPGROUPS * SPAN * CHUNK_BYTES;
    static_assert(SPAN == 1 || SPAN == 2, "chunks take turns at two sets of registers");
    static constexpr int W_AT = STAGES * X_BYTES, OUT_AT = W_AT + STAGES * W_BYTES;
    // A cluster adds its parts of a tile up here: each block the sums of all for its own share of the tokens.
    static constexpr bool GATHERS = GATHERS_;
    static constexpr int PARTIAL_FLOATS = ROWS * TOKENS;
    static constexpr int SUMS_AT = OUT_AT + WARPGROUPS * OUT_BYTES;
    static constexpr int BARRIERS_AT = SUMS_AT + (GATHERS ? PARTIAL_FLOATS * 4 : 0),
                         MBARRIER_AT = BARRIERS_AT + STAGES * 16;
    static constexpr int SHARED_BYTES = MBARRIER_AT + 16 + 1024;  // the ring begins at a multiple of 1024
    static_assert(SHARED_BYTES <= 227 * 1024, "over the shared memory of a block");
    static_assert(TOKENS % OUT_TOKENS == 0, "results leave in whole groups of tokens");
    // Registers a thread: all get the same at launch, then the producer gives most of its own to the consumers.
    static constexpr int PRODUCER = WARPGROUPS == 2 ? 40 : 32;
    static constexpr int CONSUMER = WARPGROUPS == 2 ? 232 : 160;
    static constexpr int AT_LAUNCH = 65536 / THREADS / 8 * 8;
    static_assert(PRODUCER + WARPGROUPS * CONSUMER <= (WARPGROUPS + 1) * AT_LAUNCH, "more registers than there are");
    static constexpr int LOADERS = 1 + WARPGROUPS;  // warps of the producer that load
    static_assert(LOADERS <= 4, "a warpgroup has four warps");
};

// One piece of work: a tile, or a part of its K.
struct Piece {
    u32 tile, begin, end;
};

// What work.py has counted: `whole` tiles of each worker, and lines of stages that `parts` workers share. Of a line
// each has `each` stages, and the first `rest` of them one more.
struct Schedule {
    u32 row_tiles, token_tiles, steps, whole, workers, worker, parts, each, rest, tile_tokens;

    __device__ __forceinline__ u32 tiles() const { return row_tiles * token_tiles; }
    // Nothing is under way yet while a division is made, which takes 30 instructions: those by one are left out.
    __device__ __forceinline__ u32 line() const { return parts == workers ? 0 : parts == 1 ? worker : worker / parts; }
    __device__ __forceinline__ u32 share(u32 i) const { return each * i + min(i, rest); }
    __device__ __forceinline__ void place(u32 tile, u32& row_tile, u32& token_tile) const {
        u32 first = 0, width = token_tiles;
        if (token_tiles > TOKEN_TILES_PER_PANEL) {
            const u32 panel_tiles = TOKEN_TILES_PER_PANEL * row_tiles, panel = tile / panel_tiles;
            tile -= panel * panel_tiles, first = panel * TOKEN_TILES_PER_PANEL;
            width = min(TOKEN_TILES_PER_PANEL, token_tiles - first);
        }
        row_tile = width == 1 ? tile : tile / width;
        token_tile = first + tile - row_tile * width;
    }
};

// Visits a worker's pieces in order; producer and consumers walk alike.
template <class Visit>
__device__ __forceinline__ void for_each_vector(const Schedule& s, Visit visit) {
    const u32 line = s.line(), place = s.worker - line * s.parts, end = s.share(place + 1);
    u32 at = s.share(place), tile = at < s.steps ? 0 : at / s.steps, begin = at - tile * s.steps;
    tile += s.whole * s.workers + line;
    for (u32 done = 0; done < s.whole || at < end; ++done) {
        Piece p{done * s.workers + s.worker, 0, s.steps};
        if (done >= s.whole) {
            p = {tile++, begin, min(s.steps, begin + end - at)};
            at += p.end - p.begin, begin = 0;
        }
        if (p.tile >= s.tiles()) break;  // the last round of whole tiles may be short
        visit(p);
    }
}

template <class F>
struct Ring {
    u32 base;
    u32 stage = 0, phase = 0;

    __device__ __forceinline__ u32 x(int chunk) const { return base + stage * F::X_BYTES + chunk * F::X_CHUNK_BYTES; }
    __device__ __forceinline__ u32 w(int group, int chunk) const {
        return base + F::W_AT + stage * F::W_BYTES + (group * F::SPAN + chunk) * CHUNK_BYTES;
    }
    __device__ __forceinline__ u32 full() const { return base + F::BARRIERS_AT + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 which) const { return base + F::BARRIERS_AT + (F::STAGES + which) * 8; }
    __device__ __forceinline__ void next() {
        if (++stage == F::STAGES) stage = 0, phase ^= 1;
    }
    // By one thread: addresses that differ within a warp are gone through one by one.
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int i = 0; i < F::STAGES; ++i) {
            mbarrier_init(base + F::BARRIERS_AT + i * 8, F::LOADERS);
            mbarrier_init(empty(i), F::WARPGROUPS * 4);
        }
        mbarrier_fence_init();
    }
    // Every consumer warp does.
    __device__ __forceinline__ void release(u32 which, int lane) const {
        if (lane == 0) mbarrier_arrive(empty(which));
    }
};

// --- the producer: loader 0 brings x, loader 1 + i the weights of consumer i ---

template <class F>
struct Producer {
    const TensorMap& x;
    const u8* weight;
    const Schedule& schedule;
    int row_blocks, chunks_per_block, loader;
    u64 policy;
    const u8* chunks;  // of the piece at hand, at k = 0
    int token;

    __device__ __forceinline__ void begin(const Piece& p) {
        u32 row_tile, token_tile;
        schedule.place(p.tile, row_tile, token_tile);
        token = token_tile * schedule.tile_tokens;
        // A block beyond N repeats the last one; its results are not stored.
        const int block = min((int)row_tile * F::WARPGROUPS + loader - 1, row_blocks - 1);
        chunks = weight + (size_t)block * chunks_per_block * CHUNK_BYTES;
    }
    __device__ __forceinline__ void copy(const Ring<F>& ring, u32 step) const {
        constexpr u32 WEIGHT_BYTES = F::SPAN * CHUNK_BYTES;
        mbarrier_arrive_expect_tx(ring.full(), loader ? WEIGHT_BYTES : F::SPAN * CHUNK_K * 2 * schedule.tile_tokens);
        if (loader) {
            bulk_load(ring.w(loader - 1, 0), chunks + step * WEIGHT_BYTES, WEIGHT_BYTES, ring.full(), policy);
            return;
        }
#pragma unroll
        for (int i = 0; i < F::SPAN; ++i) tma_load_2d(ring.x(i), x, (step * F::SPAN + i) * CHUNK_K, token, ring.full());
    }
    __device__ __forceinline__ void run(Ring<F> ring) {
        // x may be what the launch before writes; weights never are.
        if (loader == 0) pdl_wait();
        for_each_vector(schedule, [&](const Piece& p) {
            begin(p);
#pragma unroll 1
            for (u32 step = p.begin; step < p.end; ++step, ring.next()) {
                mbarrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
                copy(ring, step);
            }
        });
    }
};

// --- consumers: a warpgroup each ---

template <class F>
struct Consumer {
    static constexpr int SUMS = F::TOKENS / 2;
    Ring<F> ring;
    int group, warp, lane;
    u32 sixteen;  // a factor that the compiler does not know, see decode_chunk
    float sums[SUMS];
    u32 a[2][4][4];  // two chunks of 64 rows x 64 k: one is multiplied while the other is decoded

    // A scale's byte as a pair of BF16. Shift and add would go to the integer units, which decoding keeps busy; a
    // product goes to others (H200: 125 cycles a chunk, 111 like this).
    __device__ __forceinline__ u32 pair_of_scale(u32 four, int byte) const {
        return __byte_perm(four, 0, 0x4040 | (byte << 8) | byte) * sixteen + SCALE_BASE;
    }
    template <int SET>
    __device__ __forceinline__ void decode_chunk(int chunk) {
        const u32 at = ring.w(group, chunk);
        const uint4 codes = load_shared_16(at + (warp * 32 + lane) * 16);
        const uint2 scales = load_shared_8(at + CHUNK_CODES + warp * 64 + (lane >> 2) * 8);
        decode(codes.x, pair_of_scale(scales.x, 0), pair_of_scale(scales.y, 0), a[SET][0]);
        decode(codes.y, pair_of_scale(scales.x, 1), pair_of_scale(scales.y, 1), a[SET][1]);
        decode(codes.z, pair_of_scale(scales.x, 2), pair_of_scale(scales.y, 2), a[SET][2]);
        decode(codes.w, pair_of_scale(scales.x, 3), pair_of_scale(scales.y, 3), a[SET][3]);
    }
    template <int SET>
    __device__ __forceinline__ void multiply_chunk(int chunk, u32 accumulate) {
        wgmma_fence();
        Wgmma<F::TOKENS>::run(sums, a[SET], wgmma_descriptor(ring.x(chunk)), accumulate);
        wgmma_commit();
    }
    // Decodes a chunk while the one before is multiplied, then multiplies it. When that one before is done, its
    // registers are free, and its stage if it was the last there. With one chunk a stage the sets alternate by stage.
    // ``accumulate`` is 0 for the first stage of a piece, which nothing stands before.
    //
    // Decoding between the four wgmma of the chunk before was slower: each needs a fence of its own then.
    template <int SET>
    __device__ __forceinline__ void next_stage(u32& before, u32 accumulate) {
        mbarrier_wait(ring.full(), ring.phase);
        decode_chunk<SET>(0);
        multiply_chunk<SET>(0, accumulate);
        wgmma_wait<1>();
        if (accumulate) ring.release(before, lane);
        if constexpr (F::SPAN == 2) {
            decode_chunk<1>(1);
            multiply_chunk<1>(1, 1);
            wgmma_wait<1>();
        }
        before = ring.stage;
        ring.next();
    }
    __device__ __forceinline__ void accumulate(int steps) {
        u32 before = 0;
        int done = 0;
        if constexpr (F::SPAN == 2) {
#pragma unroll 1
            for (; done < steps; ++done) next_stage<0>(before, done);
        } else {
#pragma unroll 1
            for (; done < steps - 1; done += 2) {
                next_stage<0>(before, done);
                next_stage<1>(before, 1);
            }
            if (done < steps) next_stage<0>(before, done);
        }
        wgmma_wait<0>();
        ring.release(before, lane);
        wgmma_fence_operand(sums);
    }

    __device__ __forceinline__ int place_of_partial() const { return group * SUMS / 4 * 128 + warp * 32 + lane; }
    // Sums of a piece that begins inside a tile, for the worker that has its beginning.
    __device__ __forceinline__ void hand_over(float* partials, u32* flags, int worker) {
        float4* to = reinterpret_cast<float4*>(partials + (size_t)worker * F::PARTIAL_FLOATS) + place_of_partial();
#pragma unroll
        for (int j = 0; j < SUMS; j += 4)
            __stcg(to + j / 4 * 128, make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]));
        named_barrier_sync(group + 1, 128);  // the release below covers what all threads wrote before it
        if (warp == 0 && lane == 0) store_release(flags + worker * F::WARPGROUPS + group, 1);
    }
    // Adds the sums of workers first .. last - 1, in this order; all wait at once.
    __device__ __forceinline__ void take_over(const float* partials, u32* flags, int first, int last) {
        for (int other = first + warp * 32 + lane; other < last; other += 128) {
            u32* flag = flags + other * F::WARPGROUPS + group;
            while (!load_acquire(flag)) {}
            *flag = 0;  // for the next launch
        }
        named_barrier_sync(group + 1, 128);
        const float4* from =
            reinterpret_cast<const float4*>(partials + (size_t)first * F::PARTIAL_FLOATS) + place_of_partial();
        // Loads of several workers at once were slower: 32 x 14336 x 5120 20.4 us for 19.4, 64 x 5120 x 6144 14.2 for
        // 13.9.
#pragma unroll 1
        for (int other = first; other < last; ++other, from += F::PARTIAL_FLOATS / 4)
#pragma unroll
            for (int j = 0; j < SUMS; j += 4) {
                const float4 v = __ldcg(from + j / 4 * 128);
                sums[j] += v.x, sums[j + 1] += v.y, sums[j + 2] += v.z, sums[j + 3] += v.w;
            }
    }

    // Sends every block of the cluster its share of the tokens of this block's part of a tile, and adds up the own
    // share of all parts, in rising order of k. A block's share is a power of two of eights of tokens.
    __device__ __forceinline__ void gather(u8* shared, u32 blocks, u32 rank) {
        constexpr int FOURS = SUMS / 4, THREADS = F::WARPGROUPS * 128;
        float4* slots = reinterpret_cast<float4*>(shared + F::SUMS_AT) + group * 128 + warp * 32 + lane;
        Mbarrier* mbarrier = reinterpret_cast<Mbarrier*>(shared + F::MBARRIER_AT);
        const u32 shift = 31 - __clz(FOURS / blocks), each = 1u << shift;
        cluster_wait();  // all blocks have begun
#pragma unroll
        for (int i = 0; i < FOURS; ++i)
            dsmem_store_async(
                slots + (rank * each + (i & (each - 1))) * THREADS,
                make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]), mbarrier, i >> shift);
        dsmem_wait(mbarrier);
#pragma unroll
        for (int i = 0; i < FOURS / 2; ++i) {
            if (i >= each) break;
            float4 v = slots[i * THREADS];
#pragma unroll 1
            for (u32 other = 1; other < blocks; ++other) {
                const float4 more = slots[(other * each + i) * THREADS];
                v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
            }
            sums[4 * i] = v.x, sums[4 * i + 1] = v.y, sums[4 * i + 2] = v.z, sums[4 * i + 3] = v.w;
        }
    }

    // Transposes through shared memory, a piece of tokens at a time: a row of out takes 128 bytes of every warpgroup.
    __device__ __forceinline__ void store(__nv_bfloat16* __restrict__ out, u8* staging, float scale, int row0,
                                          int token0, int tokens, int end, int N) {
        named_barrier_sync(group + 1, 128);  // what stood here has been read
        const int thread = warp * 32 + lane, n0 = row0 + group * BLOCK_ROWS;
#pragma unroll
        for (int first = 0; first < F::TOKENS; first += OUT_TOKENS) {
            if (F::GATHERS && first >= tokens) break;
            u8* mine = staging + group * OUT_BYTES + first / OUT_TOKENS % 2 * (OUT_BYTES / 2);
            const u32 mine_address = shared_address(mine);
#pragma unroll
            for (int pair = 0; pair < OUT_TOKENS / 16; ++pair) {
                // Four 8 x 8 matrices: tokens 0..7 and 8..15 of the pair, rows 0..7 and 8..15 of the warp's 16.
                const float* s = sums + first / 2 + pair * 8;
                u32 m[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const __nv_bfloat162 two = __floats2bfloat162_rn(s[2 * q] * scale, s[2 * q + 1] * scale);
                    m[q] = *reinterpret_cast<const u32*>(&two);
                }
                const int token = pair * 16 + (lane >> 4) * 8 + (lane & 7), column = 2 * warp + ((lane >> 3) & 1);
                const u32 to = mine_address + token * 128 + ((column ^ (lane & 7)) << 4);
                stmatrix_x4_trans(to, m);
            }
            named_barrier_sync(group + 1, 128);
#pragma unroll
            for (int pass = 0; pass < OUT_TOKENS / 16; ++pass) {
                const int token = pass * 16 + thread / 8, column = thread % 8, n = n0 + column * 8;
                const int m = token0 + first + token;
                if (m >= end || n >= N || (F::GATHERS && first + token >= tokens)) continue;
                const u8* from = mine + token * 128 + ((column ^ (token & 7)) << 4);
                __nv_bfloat16* to = out + (size_t)m * N + n;
                if (N % 8 == 0) {
                    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
                } else {
#pragma unroll 1
                    for (int e = 0; e < 8 && n + e < N; ++e) to[e] = reinterpret_cast<const __nv_bfloat16*>(from)[e];
                }
            }
        }
    }
};

template <class F>
__device__ __forceinline__ void gemm(const TensorMap& x, const u8* __restrict__ weight, __nv_bfloat16* __restrict__ out,
                                     float* partials, u32* flags, float scale, int M, int N, int K, int tile_tokens,
                                     int whole, int parts, int each, int rest) {
    extern __shared__ u8 raw[];
    if (threadIdx.x == 0) tma_prefetch_map(x);
    const u32 unaligned = shared_address(raw), base = (unaligned + 1023) & ~1023u;
    u8* shared = raw + (base - unaligned);
    pdl_launch_dependents();

    // Stage 1: barriers. The worker that is launched first has the end of the line: who waits, waits for earlier ones.
    Schedule s;
    s.row_tiles = (N + F::ROWS - 1) / F::ROWS;
    s.token_tiles = (M + F::TOKENS - 1) / F::TOKENS;
    s.steps = (K + F::SPAN * CHUNK_K - 1) / (F::SPAN * CHUNK_K);
    s.whole = whole, s.parts = parts, s.each = each, s.rest = rest, s.tile_tokens = tile_tokens;
    s.workers = gridDim.x;
    const u32 blocks = F::GATHERS ? cluster_size() : 1;
    s.worker = blocks > 1 ? blockIdx.x : s.workers - 1 - blockIdx.x;
    const Ring<F> ring{base};
    if (threadIdx.x == 32) ring.init();
    if (blocks > 1) {
        if (threadIdx.x == 0)
            mbarrier_init_expect_tx(reinterpret_cast<Mbarrier*>(shared + F::MBARRIER_AT), F::PARTIAL_FLOATS * 4);
        cluster_arrive_relaxed();
    }
    __syncthreads();

    // Stage 2: the producer, warpgroup 0.
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<F::PRODUCER>();
        const int loader = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
        if (loader < F::LOADERS && threadIdx.x % 32 == 0) {
            const int row_blocks = (N + BLOCK_ROWS - 1) / BLOCK_ROWS;
            const int chunks_per_block = (K + 2 * CHUNK_K - 1) / (2 * CHUNK_K) * 2;
            Producer<F> producer{x, weight, s, row_blocks, chunks_per_block, loader, l2_policy(s.token_tiles == 1)};
            producer.run(ring);
        }
        return;
    }

    // Stage 3: consumers, piece by piece.
    warpgroup_reg_alloc<F::CONSUMER>();
    Consumer<F> consumer;
    consumer.ring = ring;
    consumer.group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);
    consumer.warp = (threadIdx.x / 32) & 3;
    consumer.lane = threadIdx.x & 31;
    consumer.sixteen = blockDim.x * 16 / F::THREADS;
    pdl_wait();  // before scratch and out are touched
    for_each_vector(s, [&](const Piece& p) {
        consumer.accumulate(p.end - p.begin);
        u32 row_tile, token_tile;
        s.place(p.tile, row_tile, token_tile);
        int tokens = F::TOKENS, token0 = token_tile * tile_tokens;
        const int end = min(M, token0 + tile_tokens);
        if (F::GATHERS && blocks > 1) {
            tokens /= blocks;
            token0 += cluster_rank() * tokens;
            consumer.gather(shared, blocks, cluster_rank());
        } else if (p.begin > 0) {
            consumer.hand_over(partials, flags, s.worker);
            return;
        } else if (p.end < s.steps) {
            const u32 line = s.line(), first = line * s.parts;
            const u32 tile_end = (p.tile - whole * s.workers - line + 1) * s.steps;
            u32 last = s.worker + 1;
            while (last < first + s.parts && s.share(last - first) < tile_end) ++last;
            consumer.take_over(partials, flags, s.worker + 1, last);
        }
        consumer.store(out, shared + F::OUT_AT, scale, row_tile * F::ROWS, token0, tokens, end, N);
    });
}

#define GEMM(NAME, TOKENS, WARPGROUPS, SPAN, STAGES, GATHERS)                                                       \
    extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) NAME(                                   \
        const __grid_constant__ TensorMap x, /* [M, K], boxes of 64 k x tile_tokens, swizzled in 128 bytes */       \
        const u8* __restrict__ weight,       /* [ceil(N/64)][2 * ceil(K/128)][2304] */                              \
        __nv_bfloat16* __restrict__ out,     /* [M, N] */                                                           \
        float* partials,                     /* [grid][ROWS * TOKENS] */                                            \
        u32* flags,                          /* [grid][WARPGROUPS], zero before and after */                        \
        float scale, int M, int N, int K, int tile_tokens, int whole, int parts, int each, int rest) {              \
        gemm<Form<TOKENS, WARPGROUPS, SPAN, STAGES, GATHERS>>(                                                      \
            x, weight, out, partials, flags, scale * EXPONENT_GAP, M, N, K, tile_tokens, whole, parts, each, rest); \
    }
