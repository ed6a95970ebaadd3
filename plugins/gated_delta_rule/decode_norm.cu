// A decode step with the gated RMS norm of each head's result:
//
//   out = norm(bf16(q . S)) * weight * silu(gate)
//
// The bits are those of the step and the norm in two launches (rms_norm.cuh has the order of sums). The column tiles of
// a head exchange their sums of squares, as blocks of a cluster (from sm_90 on) or inside one block, with the same
// bits. Launched by launch.py. sm_80 and newer.
#include "any_size.cuh"
#include "bf16.cuh"
#include "cluster.cuh"
#include "global_memory.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "pdl.cuh"
#include "rms_norm.cuh"
#include "shared_memory.cuh"

constexpr int VALUE_DIM = 128, HEAD_TILES = VALUE_DIM / COLUMNS, LANE_COLUMNS = 4, VEC = 8;
static_assert(COLUMNS == 4 * VEC && HEAD_TILES == 4);
// Tiles of a head per block, and launch bounds. With few heads, each head uses more multiprocessors.
#if __CUDA_ARCH__ >= 900
constexpr int SMALL_M_TILES = 1, LARGE_M_TILES = 2;
#define SMALL_M_BOUNDS \
    __cluster_dims__(HEAD_TILES / SMALL_M_TILES, 1, 1) __launch_bounds__((SMALL_M_TILES * TILE_THREADS), 5)
#define LARGE_M_BOUNDS                                 \
    __cluster_dims__(HEAD_TILES / LARGE_M_TILES, 1, 1) \
        __launch_bounds__((LARGE_M_TILES * TILE_THREADS), __CUDA_ARCH__ == 900 ? 3 : 2)
#else
constexpr int SMALL_M_TILES = HEAD_TILES, LARGE_M_TILES = HEAD_TILES;
#define SMALL_M_BOUNDS __launch_bounds__((SMALL_M_TILES * TILE_THREADS))
#define LARGE_M_BOUNDS __launch_bounds__((LARGE_M_TILES * TILE_THREADS), 2)
#endif

// A weight, FP32 or BF16.
struct NormWeight {
    const void* at;
    bool is_bf16;
};
template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> load_weight(const NormWeight* weight, int vec) {
    if (!weight->is_bf16) return load_weight<WIDTH>(static_cast<const float*>(weight->at), vec);
    Values<WIDTH> v;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v.at[i] = __bfloat162float(static_cast<const bf16*>(weight->at)[vec * WIDTH + i]);
    return v;
}

__device__ __forceinline__ Values<LANE_COLUMNS> values_of(float4 v) { return {{v.x, v.y, v.z, v.w}}; }
__device__ __forceinline__ float4 of_values(const Values<LANE_COLUMNS>& v) {
    return make_float4(v.at[0], v.at[1], v.at[2], v.at[3]);
}

// Named barriers: one for each tile, for its threads. One for the first warps of all tiles. One for the factors of each
// tile.
constexpr int TILE_BARRIER = 1, SQUARES_BARRIER = TILE_BARRIER + HEAD_TILES, FACTORS_BARRIER = SQUARES_BARRIER + 1;

// Sums of squares of a head's vectors of 8 values, four vectors a tile. The first warp of each tile sends its own sums
// and receives all. It does not wait for the states of other warps, as it would with a barrier of the cluster.
template <int BLOCK_TILES>
struct HeadSquares {
    static constexpr int RANKS = HEAD_TILES / BLOCK_TILES;  // blocks of a cluster
    float4 tiles[HEAD_TILES];
    Mbarrier mbarrier;

    // By all threads, before the first exchange.
    __device__ __forceinline__ void begin() {
        if constexpr (RANKS > 1) {
            if (threadIdx.x == 0) mbarrier_init_expect_tx(&mbarrier, sizeof(tiles));
            cluster_arrive_relaxed();
        }
    }
    // By the warps of the exchange: waits until all blocks have started.
    __device__ __forceinline__ void wait_for_cluster() const {
        if constexpr (RANKS > 1) cluster_wait();
    }
    // For four values a lane. Lanes 8 r + i hold the same values for all r, and send their sums to rank r.
    __device__ __forceinline__ void send(int tile, int lane, const Values<LANE_COLUMNS>& v) {
        const float low = add_squares(v, 0.0f), sum = add_squares(v, __shfl_up_sync(0xffffffffu, low, 1));
        const int rank = lane / 8;
        if (lane % 2 == 0 || rank >= RANKS) return;
        float* const to = reinterpret_cast<float*>(&tiles[tile]) + lane % 8 / 2;
        if constexpr (RANKS > 1) dsmem_store_async(to, sum, &mbarrier, rank);
        else *to = sum;
    }
    // The total, in the order of a warp with a vector a lane.
    __device__ __forceinline__ float total() {
        if constexpr (RANKS > 1) dsmem_wait(&mbarrier);
        else named_barrier_sync(SQUARES_BARRIER, HEAD_TILES * 32);
        const float4 sum = add4(add4(tiles[0], tiles[2]), add4(tiles[1], tiles[3]));
        return (sum.x + sum.z) + (sum.y + sum.w);
    }
};

// The factors of four output columns as they are loaded. No instruction waits for them before they are widened.
struct RawFactors {
    uint4 weight;
    uint2 gate;

    __device__ __forceinline__ void load_weight(const NormWeight& from, int column) {
        if (from.is_bf16) {
            const uint2 v = load_now(reinterpret_cast<const uint2*>(static_cast<const bf16*>(from.at) + column));
            weight.x = v.x, weight.y = v.y;
        } else {
            weight = load_now(reinterpret_cast<const uint4*>(static_cast<const float*>(from.at) + column));
        }
    }
    __device__ __forceinline__ void load_gate(const bf16* from) {
        gate = load_now(reinterpret_cast<const uint2*>(from));
    }
    __device__ __forceinline__ float4 widened(bool is_bf16) const {
        if (is_bf16) return widen(make_uint2(weight.x, weight.y));
        return make_float4(
            __uint_as_float(weight.x), __uint_as_float(weight.y), __uint_as_float(weight.z), __uint_as_float(weight.w));
    }
};

// The factors in FP32. The second warp of a tile makes them after it has stored its state, while the squares are in
// flight.
struct Factors {
    float4 weight[COLUMNS / LANE_COLUMNS], gate[COLUMNS / LANE_COLUMNS];  // silu of the gate
};

template <int BLOCK_TILES>
__device__ __forceinline__ void sync_tile() {
    if constexpr (BLOCK_TILES == 1) __syncthreads();
    else named_barrier_sync(TILE_BARRIER + threadIdx.x / TILE_THREADS, TILE_THREADS);
}
__device__ __forceinline__ void factors_arrive(int tile) { named_barrier_arrive(FACTORS_BARRIER + tile, 64); }
__device__ __forceinline__ void factors_wait(int tile) { named_barrier_sync(FACTORS_BARRIER + tile, 64); }

// Dk = Dv = 128. Grid: HEAD_TILES / BLOCK_TILES x value_heads x S.
template <int BLOCK_TILES>
__device__ __forceinline__ void delta_rule_norm(
    const bf16* qkv, const float* decay, const float* beta, const bf16* gate, const NormWeight& weight, float* pool,
    const int* slots, bf16* out, float eps, int pool_slots, int key_heads, int value_heads) {
    const Heads heads{key_heads, KEY_DIM, value_heads, VALUE_DIM};
    __shared__ WarpSums warp_sums[BLOCK_TILES];
    __shared__ Factors all_factors[BLOCK_TILES];
    __shared__ HeadSquares<BLOCK_TILES> squares;
    pdl_launch_dependents();
    const int block_tile = BLOCK_TILES == 1 ? 0 : threadIdx.x / TILE_THREADS;
    const TilePosition tile(heads, blockIdx.x * BLOCK_TILES + block_tile, blockIdx.y, blockIdx.z);
    const DecodeRow row(heads, tile, qkv, slots, pool, pool_slots);
    squares.begin();
    const TilePosition& at = row.at;
    const bool has_column = at.lane < COLUMNS / LANE_COLUMNS, is_writer = at.warp == 0 && has_column;
    const bool makes_factors = at.warp == 1 && has_column;
    auto out_offset = [&] { return ((size_t)at.sequence * heads.value_heads + at.head) * VALUE_DIM + at.column; };
    Factors& factors = all_factors[block_tile];
    constexpr bool IS_EARLY = BLOCK_TILES < HEAD_TILES;  // otherwise registers are scarce
    RawFactors raw;
    if (IS_EARLY && makes_factors) raw.load_weight(weight, at.column);
    row.prefetch_state();
    pdl_wait();

    // Stage 1: the step. Everything that does not need the state runs while the state is in flight.
    RowInputs in;
    StatePart state;
    if (IS_EARLY && makes_factors) raw.load_gate(gate + out_offset());
    const int slot = row.load(in, state, decay, beta);
    const StepOperands operands(in);
    if (!row.is_inside(slot)) {  // the same for all tiles of the head
        if (is_writer) *reinterpret_cast<uint2*>(out + out_offset()) = make_uint2(0, 0);
        return;
    }
    WarpSums& sums = warp_sums[block_tile];
    if (at.warp == 0) squares.wait_for_cluster();
    read_state(state, operands, sums, 0, at.warp, at.lane);
    sync_tile<BLOCK_TILES>();
    const float4 delta = delta_of(operands, sums.total(0, 0, at.lane & 7)), read_q = sums.total(0, 1, at.lane & 7);

    // Stage 2: the squares of the head. The state is updated and stored while they are in flight.
    const uint2 output = narrow(output_of(operands, delta, read_q));
    if (at.warp == 0) squares.send(at.column / COLUMNS, at.lane, values_of(widen(output)));
    apply_delta(state, operands, delta);
    state.store(row.state_of(slot), VALUE_DIM);
    if (makes_factors) {
        if (!IS_EARLY) raw.load_weight(weight, at.column), raw.load_gate(gate + out_offset());
        factors.weight[at.lane] = raw.widened(weight.is_bf16);
        factors.gate[at.lane] = of_values(silu(values_of(widen(raw.gate))));
    }
    if (at.warp == 1) factors_arrive(block_tile);
    if (at.warp != 0) return;

    // Stage 3: norm and gate.
    const float r = reciprocal_root(squares.total(), VALUE_DIM, eps);
    factors_wait(block_tile);
    if (!is_writer) return;
    const Values<LANE_COLUMNS> of = values_of(factors.weight[at.lane]), by = values_of(factors.gate[at.lane]);
    *reinterpret_cast<uint2*>(out + out_offset()) = narrow(of_values(gated(values_of(widen(output)), r, of, by)));
}

#define DELTA_RULE_NORM(NAME, TILES, BOUNDS)                                                                       \
    extern "C" __global__ void BOUNDS delta_rule_norm_##NAME(                                                      \
        const bf16* qkv,                 /* [S, 2 key_heads Dk + value_heads Dv] */                                \
        const float* decay,              /* [S, value_heads] */                                                    \
        const float* beta,               /* [S, value_heads] */                                                    \
        const bf16* gate,                /* [S, value_heads Dv] */                                                 \
        const void* __restrict__ weight, /* [Dv], FP32 or BF16 */                                                  \
        float* pool,                     /* [slots, value_heads, Dk, Dv] */                                        \
        const int* slots,                /* [S] */                                                                 \
        bf16* out,                       /* [S, value_heads Dv] */                                                 \
        float eps, int is_bf16, int pool_slots, int key_heads, int key_dim, int value_heads, int value_dim) {      \
        delta_rule_norm<TILES>(qkv, decay, beta, gate, {weight, (bool)is_bf16}, pool, slots, out, eps, pool_slots, \
                               key_heads, value_heads);                                                            \
    }

DELTA_RULE_NORM(small_m_128, SMALL_M_TILES, SMALL_M_BOUNDS)
DELTA_RULE_NORM(large_m_128, LARGE_M_TILES, LARGE_M_BOUNDS)

// The norm of a row that this block has written, in place.
template <int LANES, int WIDTH>
__device__ __forceinline__ void norm_in_place(const bf16* gate, const NormWeight& weight, bf16* row, int H, float eps) {
    if (threadIdx.x < LANES) norm_row<LANES, WIDTH>(Gated<NormWeight>{row, gate, &weight, row}, true, H, eps);
}

// The step of a head with Dk = 128 and a Dv that no model has: two tiles at a time.
__device__ __forceinline__ void step_tiles(const Heads& heads, const bf16* qkv, const float* decay, const float* beta,
                                           float* pool, const int* slots, bf16* out, int pool_slots,
                                           WarpSums& warp_sums) {
    const int tiles = heads.value_dim / COLUMNS, group = threadIdx.x / TILE_THREADS;
    auto sync = [&] { named_barrier_sync(1 + group, TILE_THREADS); };
#pragma unroll 1
    for (int tile = group; tile < tiles; tile += ANY_THREADS / TILE_THREADS) {
        const int head = blockIdx.x % heads.value_heads, sequence = blockIdx.x / heads.value_heads;
        const DecodeRow row(heads, TilePosition(heads, tile, head, sequence), qkv, slots, pool, pool_slots);
        RowInputs in;
        StatePart state;
        const int slot = row.load(in, state, decay, beta);
        const float4 output = step(state, StepOperands(in), warp_sums, row.at, sync);
        state.store(row.state_of(slot), heads.value_dim);
        bf16* const to = out + (size_t)blockIdx.x * heads.value_dim + row.at.column;
        if (row.at.warp == 0 && row.at.lane < COLUMNS / LANE_COLUMNS) *reinterpret_cast<uint2*>(to) = narrow(output);
        sync();
    }
}

// Any Dk and Dv. Grid: S * value_heads.
extern "C" __global__ void __launch_bounds__(ANY_THREADS) delta_rule_norm_any(
    const bf16* qkv,                  // [S, 2 key_heads Dk + value_heads Dv]
    const float* decay,               // [S, value_heads]
    const float* beta,                // [S, value_heads]
    const bf16* gate,                 // [S, value_heads Dv]
    const void* __restrict__ weight,  // [Dv], FP32 or BF16
    float* pool,                      // [slots, value_heads, Dk, Dv]
    const int* slots,                 // [S]
    bf16* out,                        // [S, value_heads Dv]
    float eps, int is_bf16, int pool_slots, int key_heads, int key_dim, int value_heads, int value_dim) {
    static_assert(ANY_THREADS == block);
    __shared__ float sums[3][ANY_WARPS];
    __shared__ WarpSums warp_sums[ANY_THREADS / TILE_THREADS];
    pdl_launch_dependents();
    pdl_wait();
    const Heads heads{key_heads, key_dim, value_heads, value_dim};
    const int head = blockIdx.x % value_heads, sequence = blockIdx.x / value_heads, slot = slots[sequence];
    const bool is_padding = (u32)slot >= (u32)pool_slots;
    float* const state = pool + ((size_t)(is_padding ? 0 : slot) * value_heads + head) * heads.state_size();
    const size_t at = (size_t)blockIdx.x * value_dim;
    if (key_dim == KEY_DIM && value_dim % COLUMNS == 0 && !is_padding) {
        step_tiles({key_heads, KEY_DIM, value_heads, value_dim}, qkv, decay, beta, pool, slots, out, pool_slots,
                   warp_sums[threadIdx.x / TILE_THREADS]);
    } else {
        const AnyRow in(heads, qkv, sequence, head, decay[blockIdx.x], beta[blockIdx.x], sums);
#pragma unroll 1
        for (int column = threadIdx.x; column < value_dim; column += ANY_THREADS)
            out[at + column] = __float2bfloat16_rn(is_padding ? 0.0f : in.step(heads, state, column, nullptr));
    }
    __syncthreads();
    if (is_padding) return;
    const NormWeight weights{weight, (bool)is_bf16};
    const bool is_short = value_dim <= MAX_WARP_ROW;
    if (is_short && value_dim % 8 == 0) norm_in_place<warp, 8>(gate + at, weights, out + at, value_dim, eps);
    else if (is_short) norm_in_place<warp, 1>(gate + at, weights, out + at, value_dim, eps);
    else norm_in_place<block, 1>(gate + at, weights, out + at, value_dim, eps);
}
