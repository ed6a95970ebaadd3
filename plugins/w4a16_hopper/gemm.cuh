// W4A16 GEMM for sm_90a: out[m, n] = BF16(scale * sum_k x[m, k] * weight[n, k]), NVFP4 weights, BF16 activations.
//
// Persistent, warp-specialised, stream-K. Launched by launch.py, which gets the tile configuration and the schedule
// from work.py.
//
// Weights are the A operand of wgmma, decoded in registers from layout nvfp4_wgmma_64x64 (layout.py makes it):
//   chunks of 64 rows x 64 k, 2304 bytes each, along K inside a block of 64 rows; N padded to 64 and K to 128 by zeros
//   bytes 0..2047     [4 warps][32 lanes][4 steps of 16 k]: a word is the 8 weights one lane feeds to one wgmma
//   bytes 2048..2303  [4 warps][8 g][2 row halves][4 steps]: E5M3 scales
// Lane (g, t) = (lane / 4, lane % 4) of warp w holds rows 16 w + g and + 8, k = 16 step + 2 t, + 1, + 8, + 9.
// Activations are the B operand in shared memory, loaded by TMA. The result has weight rows as M, tokens as N.
//
// A block has one producer warpgroup, and WARPGROUPS consumer warpgroups with 64 rows x TOKENS tokens each. The
// pipeline has STAGES stages of SPAN chunks. One producer thread loads x, and one the weights of each consumer.
//
// Tiles have equally many tokens, at most TOKENS, and TMA boxes of x are no larger: bytes of a box outside x take
// longer than bytes inside. H200, us, boxes of TOKENS / of a tile: 33 x 14336 x 5120 28.7 / 23.3, 65 31.9 / 26.4, 129
// 56.3 / 39.5, 200 63.5 / 53.3. The other tokens of a stage hold old data; their sums affect no other token, and are
// not stored.
//
// Stream-K: tiles of (WARPGROUPS * 64 rows) x TOKENS. A worker (a block) computes `whole_tiles` tiles alone. The stages
// of the other tiles are cut into ranges, one for each tile or one for all of them, and the workers of a range take
// consecutive stages of it. The worker with the first stage of a tile adds the partials of the others in rising order
// of k, and rounds once. The blocks of a cluster, which split one tile, each do so for some of its tokens. The order
// depends on the tile configuration, (M, N, K), workers, ranges and cluster size only.
//
// Slower: multicast of x in a cluster; clusters of eight, or enough clusters of four to fill the device; 128 rows in a
// warpgroup; two blocks a multiprocessor; four consumers; decoding between the wgmma of one chunk; more than 8 stages;
// reducing only the tokens that a tile has, with a branch for each eight (65 x 2048 x 4096 19.9 us instead of 10.2).
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
// Tokens that the epilogue stages in shared memory at a time; 64 outputs of a token are 128 bytes.
constexpr int OUT_TOKENS = 32;
constexpr int OUT_BYTES = 2 * OUT_TOKENS * BLOCK_ROWS * 2;  // double-buffered
// Grouped rasterisation: up to this number of token tiles, then the next row tile, so that their x stays in L2.
constexpr u32 TOKEN_TILES_PER_PANEL = 8;

template <int TOKENS_, int WARPGROUPS_, int SPAN_, int STAGES_, int CLUSTER_REDUCES_>
struct TileConfig {
    static constexpr int TOKENS = TOKENS_, WARPGROUPS = WARPGROUPS_, SPAN = SPAN_, STAGES = STAGES_;
    static constexpr int THREADS = 128 * (WARPGROUPS + 1), ROWS = WARPGROUPS * BLOCK_ROWS;
    static constexpr int X_CHUNK_BYTES = TOKENS * CHUNK_K * 2, X_BYTES = SPAN * X_CHUNK_BYTES;
    static constexpr int W_BYTES = WARPGROUPS * SPAN * CHUNK_BYTES;
    static_assert(SPAN == 1 || SPAN == 2, "chunks alternate between two register buffers");
    static constexpr int W_OFFSET = STAGES * X_BYTES, OUT_OFFSET = W_OFFSET + STAGES * W_BYTES;
    // Partials of a cluster: each block reduces some of the tokens.
    static constexpr bool CLUSTER_REDUCES = CLUSTER_REDUCES_;
    static constexpr int PARTIAL_FLOATS = ROWS * TOKENS;
    static constexpr int PARTIALS_OFFSET = OUT_OFFSET + WARPGROUPS * OUT_BYTES;
    static constexpr int BARRIERS_OFFSET = PARTIALS_OFFSET + (CLUSTER_REDUCES ? PARTIAL_FLOATS * 4 : 0),
                         MBARRIER_OFFSET = BARRIERS_OFFSET + STAGES * 16;
    static constexpr int SHARED_BYTES = MBARRIER_OFFSET + 16 + 1024;  // the 128-byte swizzle needs 1024-byte alignment
    static_assert(SHARED_BYTES <= 227 * 1024, "over the shared memory of a block");
    static_assert(TOKENS % OUT_TOKENS == 0, "the epilogue stages whole groups of tokens");
    // Registers a thread. All have the same at launch; the producer hands most of its registers to the consumers.
    static constexpr int PRODUCER = WARPGROUPS == 2 ? 40 : 32;
    static constexpr int CONSUMER = WARPGROUPS == 2 ? 232 : 160;
    static constexpr int AT_LAUNCH = 65536 / THREADS / 8 * 8;
    static_assert(PRODUCER + WARPGROUPS * CONSUMER <= (WARPGROUPS + 1) * AT_LAUNCH, "more registers than there are");
    static constexpr int LOADERS = 1 + WARPGROUPS;  // producer warps that load
    static_assert(LOADERS <= 4, "a warpgroup has four warps");
};

// Stages start .. end of a tile: the whole tile, or a split-K part of it.
struct WorkUnit {
    u32 tile, start, end;
};

// The stream-K schedule of work.py: `whole_tiles` tiles of each worker, then ranges of stages with `workers_per_range`
// workers. Each has `stages_per_worker` stages of a range, and the first `remainder` workers one more.
struct Schedule {
    u32 row_tiles, token_tiles, steps, whole_tiles, workers, worker, workers_per_range, stages_per_worker, remainder,
        tile_tokens;

    __device__ __forceinline__ u32 tiles() const { return row_tiles * token_tiles; }
    // A division takes 30 instructions, during which no load is in flight: divisions by 1 are skipped.
    __device__ __forceinline__ u32 range_index() const {
        return workers_per_range == workers ? 0 : workers_per_range == 1 ? worker : worker / workers_per_range;
    }
    __device__ __forceinline__ u32 first_stage_of(u32 i) const { return stages_per_worker * i + min(i, remainder); }
    __device__ __forceinline__ void tile_coords(u32 tile, u32& row_tile, u32& token_tile) const {
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

// Visits the work units of a worker in order, in producer and consumers alike.
template <class Visit>
__device__ __forceinline__ void for_each_work_unit(const Schedule& s, Visit visit) {
    const u32 range = s.range_index(), index = s.worker - range * s.workers_per_range;
    const u32 end = s.first_stage_of(index + 1);
    u32 at = s.first_stage_of(index), tile = at < s.steps ? 0 : at / s.steps, start = at - tile * s.steps;
    tile += s.whole_tiles * s.workers + range;
    for (u32 done = 0; done < s.whole_tiles || at < end; ++done) {
        WorkUnit p{done * s.workers + s.worker, 0, s.steps};
        if (done >= s.whole_tiles) {
            p = {tile++, start, min(s.steps, start + end - at)};
            at += p.end - p.start, start = 0;
        }
        if (p.tile >= s.tiles()) break;  // the last wave of whole tiles may be partial
        visit(p);
    }
}

template <class F>
struct TmaPipeline {
    u32 base;
    u32 stage = 0, phase = 0;

    __device__ __forceinline__ u32 x(int chunk) const { return base + stage * F::X_BYTES + chunk * F::X_CHUNK_BYTES; }
    __device__ __forceinline__ u32 w(int group, int chunk) const {
        return base + F::W_OFFSET + stage * F::W_BYTES + (group * F::SPAN + chunk) * CHUNK_BYTES;
    }
    __device__ __forceinline__ u32 full() const { return base + F::BARRIERS_OFFSET + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 index) const {
        return base + F::BARRIERS_OFFSET + (F::STAGES + index) * 8;
    }
    __device__ __forceinline__ void next() {
        if (++stage == F::STAGES) stage = 0, phase ^= 1;
    }
    // By one thread: different addresses in a warp would be serialised.
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int i = 0; i < F::STAGES; ++i) {
            mbarrier_init(base + F::BARRIERS_OFFSET + i * 8, F::LOADERS);
            mbarrier_init(empty(i), F::WARPGROUPS * 4);
        }
        mbarrier_fence_init();
    }
    // By every consumer warp.
    __device__ __forceinline__ void release(u32 index, int lane) const {
        if (lane == 0) mbarrier_arrive(empty(index));
    }
};

// --- the producer: loader 0 loads x, loader 1 + i the weights of consumer i ---

template <class F>
struct Producer {
    const TensorMap& x;
    const u8* weight;
    const Schedule& schedule;
    int row_blocks, chunks_per_block, loader;
    u64 policy;
    const u8* chunks;  // of the current tile, at k = 0
    int token;

    __device__ __forceinline__ void start(const WorkUnit& p) {
        u32 row_tile, token_tile;
        schedule.tile_coords(p.tile, row_tile, token_tile);
        token = token_tile * schedule.tile_tokens;
        // A block beyond N repeats the last one; its results are not stored.
        const int block = min((int)row_tile * F::WARPGROUPS + loader - 1, row_blocks - 1);
        chunks = weight + (size_t)block * chunks_per_block * CHUNK_BYTES;
    }
    __device__ __forceinline__ void copy(const TmaPipeline<F>& pipeline, u32 step) const {
        constexpr u32 WEIGHT_BYTES = F::SPAN * CHUNK_BYTES;
        mbarrier_arrive_expect_tx(
            pipeline.full(), loader ? WEIGHT_BYTES : F::SPAN * CHUNK_K * 2 * schedule.tile_tokens);
        if (loader) {
            bulk_load(pipeline.w(loader - 1, 0), chunks + step * WEIGHT_BYTES, WEIGHT_BYTES, pipeline.full(), policy);
            return;
        }
#pragma unroll
        for (int i = 0; i < F::SPAN; ++i)
            tma_load_2d(pipeline.x(i), x, (step * F::SPAN + i) * CHUNK_K, token, pipeline.full());
    }
    __device__ __forceinline__ void run(TmaPipeline<F> pipeline) {
        // The previous kernel may write x, never weights.
        if (loader == 0) pdl_wait();
        for_each_work_unit(schedule, [&](const WorkUnit& p) {
            start(p);
#pragma unroll 1
            for (u32 step = p.start; step < p.end; ++step, pipeline.next()) {
                mbarrier_wait(pipeline.empty(pipeline.stage), pipeline.phase ^ 1);
                copy(pipeline, step);
            }
        });
    }
};

// --- consumers: a warpgroup each ---

template <class F>
struct Consumer {
    static constexpr int SUMS = F::TOKENS / 2;
    TmaPipeline<F> pipeline;
    int group, warp, lane;
    u32 sixteen;  // 16, opaque to the compiler (pair_of_scale)
    float sums[SUMS];
    u32 a[2][4][4];  // double buffer of 64 rows x 64 k: wgmma reads one while the other is decoded

    // A scale byte as a pair of BF16. A shift would use the integer ALU, which decoding saturates; a multiplication by
    // an opaque factor uses another pipe (H200: 111 cycles a chunk instead of 125).
    __device__ __forceinline__ u32 pair_of_scale(u32 four, int byte) const {
        return __byte_perm(four, 0, 0x4040 | (byte << 8) | byte) * sixteen + SCALE_BASE;
    }
    template <int BUFFER>
    __device__ __forceinline__ void decode_chunk(int chunk) {
        const u32 at = pipeline.w(group, chunk);
        const uint4 codes = load_shared_16(at + (warp * 32 + lane) * 16);
        const uint2 scales = load_shared_8(at + CHUNK_CODES + warp * 64 + (lane >> 2) * 8);
        decode(codes.x, pair_of_scale(scales.x, 0), pair_of_scale(scales.y, 0), a[BUFFER][0]);
        decode(codes.y, pair_of_scale(scales.x, 1), pair_of_scale(scales.y, 1), a[BUFFER][1]);
        decode(codes.z, pair_of_scale(scales.x, 2), pair_of_scale(scales.y, 2), a[BUFFER][2]);
        decode(codes.w, pair_of_scale(scales.x, 3), pair_of_scale(scales.y, 3), a[BUFFER][3]);
    }
    template <int BUFFER>
    __device__ __forceinline__ void multiply_chunk(int chunk, u32 accumulate) {
        wgmma_fence();
        Wgmma<F::TOKENS>::run(sums, a[BUFFER], wgmma_descriptor(pipeline.x(chunk)), accumulate);
        wgmma_commit();
    }
    // Decodes a chunk while the previous one is multiplied, then issues its wgmma. After the wait the registers of the
    // previous chunk are free, and so is its stage if it was the last chunk there. With one chunk in a stage, stages
    // alternate between the register buffers. ``accumulate`` is 0 for the first stage of a work unit.
    //
    // Decoding between the four wgmma of the previous chunk was slower: each then needs its own fence.
    template <int BUFFER>
    __device__ __forceinline__ void next_stage(u32& previous, u32 accumulate) {
        mbarrier_wait(pipeline.full(), pipeline.phase);
        decode_chunk<BUFFER>(0);
        multiply_chunk<BUFFER>(0, accumulate);
        wgmma_wait<1>();
        if (accumulate) pipeline.release(previous, lane);
        if constexpr (F::SPAN == 2) {
            decode_chunk<1>(1);
            multiply_chunk<1>(1, 1);
            wgmma_wait<1>();
        }
        previous = pipeline.stage;
        pipeline.next();
    }
    __device__ __forceinline__ void accumulate(int steps) {
        u32 previous = 0;
        int done = 0;
        if constexpr (F::SPAN == 2) {
#pragma unroll 1
            for (; done < steps; ++done) next_stage<0>(previous, done);
        } else {
#pragma unroll 1
            for (; done < steps - 1; done += 2) {
                next_stage<0>(previous, done);
                next_stage<1>(previous, 1);
            }
            if (done < steps) next_stage<0>(previous, done);
        }
        wgmma_wait<0>();
        pipeline.release(previous, lane);
        wgmma_fence_operand(sums);
    }

    __device__ __forceinline__ int partial_offset() const { return group * SUMS / 4 * 128 + warp * 32 + lane; }
    // Stores the partials of a work unit that starts inside a tile, for the worker with the tile's first stage.
    __device__ __forceinline__ void store_partials(float* partials, u32* flags, int worker) {
        float4* to = reinterpret_cast<float4*>(partials + (size_t)worker * F::PARTIAL_FLOATS) + partial_offset();
#pragma unroll
        for (int j = 0; j < SUMS; j += 4)
            __stcg(to + j / 4 * 128, make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]));
        named_barrier_sync(group + 1, 128);  // the release below covers the stores of all threads
        if (warp == 0 && lane == 0) store_release(flags + worker * F::WARPGROUPS + group, 1);
    }
    // Adds the partials of workers first .. last - 1, in this order. Threads poll the flags in parallel.
    __device__ __forceinline__ void reduce_partials(const float* partials, u32* flags, int first, int last) {
        for (int other = first + warp * 32 + lane; other < last; other += 128) {
            u32* flag = flags + other * F::WARPGROUPS + group;
            while (!load_acquire(flag)) {}
            *flag = 0;  // for the next launch
        }
        named_barrier_sync(group + 1, 128);
        const float4* from =
            reinterpret_cast<const float4*>(partials + (size_t)first * F::PARTIAL_FLOATS) + partial_offset();
        // Loads of several workers at once were slower: 32 x 14336 x 5120 20.4 us instead of 19.4, 64 x 5120 x 6144
        // 14.2 instead of 13.9.
#pragma unroll 1
        for (int other = first; other < last; ++other, from += F::PARTIAL_FLOATS / 4)
#pragma unroll
            for (int j = 0; j < SUMS; j += 4) {
                const float4 v = __ldcg(from + j / 4 * 128);
                sums[j] += v.x, sums[j + 1] += v.y, sums[j + 2] += v.z, sums[j + 3] += v.w;
            }
    }

    // Reduce-scatter over the cluster: sends each block the partials of its tokens over DSMEM, and adds those of this
    // block's tokens in rising order of k. A block has a power of two times eight tokens.
    __device__ __forceinline__ void cluster_reduce(u8* shared, u32 blocks, u32 rank) {
        constexpr int FOURS = SUMS / 4, THREADS = F::WARPGROUPS * 128;
        float4* slots = reinterpret_cast<float4*>(shared + F::PARTIALS_OFFSET) + group * 128 + warp * 32 + lane;
        Mbarrier* mbarrier = reinterpret_cast<Mbarrier*>(shared + F::MBARRIER_OFFSET);
        const u32 shift = 31 - __clz(FOURS / blocks), per_block = 1u << shift;
        cluster_wait();  // all blocks of the cluster have started
#pragma unroll
        for (int i = 0; i < FOURS; ++i)
            dsmem_store_async(
                slots + (rank * per_block + (i & (per_block - 1))) * THREADS,
                make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]), mbarrier, i >> shift);
        dsmem_wait(mbarrier);
#pragma unroll
        for (int i = 0; i < FOURS / 2; ++i) {
            if (i >= per_block) break;
            float4 v = slots[i * THREADS];
#pragma unroll 1
            for (u32 other = 1; other < blocks; ++other) {
                const float4 more = slots[(other * per_block + i) * THREADS];
                v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
            }
            sums[4 * i] = v.x, sums[4 * i + 1] = v.y, sums[4 * i + 2] = v.z, sums[4 * i + 3] = v.w;
        }
    }

    // The epilogue: transposes OUT_TOKENS tokens at a time through shared memory, so that a row of out gets 128 bytes
    // from each warpgroup.
    __device__ __forceinline__ void store(__nv_bfloat16* __restrict__ out, u8* staging, float scale, int row0,
                                          int token0, int tokens, int end, int N) {
        named_barrier_sync(group + 1, 128);  // the previous values have been read
        const int thread = warp * 32 + lane, n0 = row0 + group * BLOCK_ROWS;
#pragma unroll
        for (int first = 0; first < F::TOKENS; first += OUT_TOKENS) {
            if (F::CLUSTER_REDUCES && first >= tokens) break;
            u8* warp_staging = staging + group * OUT_BYTES + first / OUT_TOKENS % 2 * (OUT_BYTES / 2);
            const u32 staging_address = shared_address(warp_staging);
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
                const u32 to = staging_address + token * 128 + ((column ^ (lane & 7)) << 4);
                stmatrix_x4_trans(to, m);
            }
            named_barrier_sync(group + 1, 128);
#pragma unroll
            for (int pass = 0; pass < OUT_TOKENS / 16; ++pass) {
                const int token = pass * 16 + thread / 8, column = thread % 8, n = n0 + column * 8;
                const int m = token0 + first + token;
                if (m >= end || n >= N || (F::CLUSTER_REDUCES && first + token >= tokens)) continue;
                const u8* from = warp_staging + token * 128 + ((column ^ (token & 7)) << 4);
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
                                     int whole_tiles, int workers_per_range, int stages_per_worker, int remainder) {
    extern __shared__ u8 raw[];
    if (threadIdx.x == 0) tma_prefetch_map(x);
    const u32 unaligned = shared_address(raw), base = (unaligned + 1023) & ~1023u;
    u8* shared = raw + (base - unaligned);
    pdl_launch_dependents();

    // Prologue. The blocks that start first have the last stages of a range: a worker waits only for blocks before it.
    Schedule s;
    s.row_tiles = (N + F::ROWS - 1) / F::ROWS;
    s.token_tiles = (M + F::TOKENS - 1) / F::TOKENS;
    s.steps = (K + F::SPAN * CHUNK_K - 1) / (F::SPAN * CHUNK_K);
    s.whole_tiles = whole_tiles, s.workers_per_range = workers_per_range, s.stages_per_worker = stages_per_worker,
    s.remainder = remainder, s.tile_tokens = tile_tokens;
    s.workers = gridDim.x;
    const u32 blocks = F::CLUSTER_REDUCES ? cluster_size() : 1;
    s.worker = blocks > 1 ? blockIdx.x : s.workers - 1 - blockIdx.x;
    const TmaPipeline<F> pipeline{base};
    if (threadIdx.x == 32) pipeline.init();
    if (blocks > 1) {
        if (threadIdx.x == 0)
            mbarrier_init_expect_tx(reinterpret_cast<Mbarrier*>(shared + F::MBARRIER_OFFSET), F::PARTIAL_FLOATS * 4);
        cluster_arrive_relaxed();
    }
    __syncthreads();

    // The producer, warpgroup 0.
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<F::PRODUCER>();
        const int loader = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
        if (loader < F::LOADERS && threadIdx.x % 32 == 0) {
            const int row_blocks = (N + BLOCK_ROWS - 1) / BLOCK_ROWS;
            const int chunks_per_block = (K + 2 * CHUNK_K - 1) / (2 * CHUNK_K) * 2;
            Producer<F> producer{x, weight, s, row_blocks, chunks_per_block, loader, l2_policy(s.token_tiles == 1)};
            producer.run(pipeline);
        }
        return;
    }

    // The consumers.
    warpgroup_reg_alloc<F::CONSUMER>();
    Consumer<F> consumer;
    consumer.pipeline = pipeline;
    consumer.group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);
    consumer.warp = (threadIdx.x / 32) & 3;
    consumer.lane = threadIdx.x & 31;
    consumer.sixteen = blockDim.x * 16 / F::THREADS;
    pdl_wait();  // before the first access to scratch and out
    for_each_work_unit(s, [&](const WorkUnit& p) {
        consumer.accumulate(p.end - p.start);
        u32 row_tile, token_tile;
        s.tile_coords(p.tile, row_tile, token_tile);
        int tokens = F::TOKENS, token0 = token_tile * tile_tokens;
        const int end = min(M, token0 + tile_tokens);
        if (F::CLUSTER_REDUCES && blocks > 1) {
            tokens /= blocks;
            token0 += cluster_rank() * tokens;
            consumer.cluster_reduce(shared, blocks, cluster_rank());
        } else if (p.start > 0) {
            consumer.store_partials(partials, flags, s.worker);
            return;
        } else if (p.end < s.steps) {
            const u32 range = s.range_index(), first = range * s.workers_per_range;
            const u32 tile_end = (p.tile - whole_tiles * s.workers - range + 1) * s.steps;
            u32 last = s.worker + 1;
            while (last < first + s.workers_per_range && s.first_stage_of(last - first) < tile_end) ++last;
            consumer.reduce_partials(partials, flags, s.worker + 1, last);
        }
        consumer.store(out, shared + F::OUT_OFFSET, scale, row_tile * F::ROWS, token0, tokens, end, N);
    });
}

#define GEMM(NAME, TOKENS, WARPGROUPS, SPAN, STAGES, CLUSTER_REDUCES)                                         \
    extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) NAME(                             \
        const __grid_constant__ TensorMap x, /* [M, K], boxes of 64 k x tile_tokens, swizzled in 128 bytes */ \
        const u8* __restrict__ weight,       /* [ceil(N/64)][2 * ceil(K/128)][2304] */                        \
        __nv_bfloat16* __restrict__ out,     /* [M, N] */                                                     \
        float* partials,                     /* [grid][ROWS * TOKENS] */                                      \
        u32* flags,                          /* [grid][WARPGROUPS], zero before and after */                  \
        float scale, int M, int N, int K, int tile_tokens, int whole_tiles, int workers_per_range,            \
        int stages_per_worker, int remainder) {                                                               \
        gemm<TileConfig<TOKENS, WARPGROUPS, SPAN, STAGES, CLUSTER_REDUCES>>(                                  \
            x, weight, out, partials, flags, scale * EXPONENT_GAP, M, N, K, tile_tokens, whole_tiles,         \
            workers_per_range, stages_per_worker, remainder);                                                 \
    }
