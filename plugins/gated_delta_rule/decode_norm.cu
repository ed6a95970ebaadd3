// The decode step with the gated RMS norm of each head's result, rounded to BF16 before it:
//
//   out = norm(bf16(q . S)) * weight * silu(gate)
//
// A head's tiles of columns share their sums of squares: as one block, or, so that few heads reach more multiprocessors, as
// a cluster of four (from sm_90 on); the bits are the same. Numerics: as delta_rule.cuh, then FP32, sums over tiles in
// rising order, one rounding. Launched by launch.py.
#include "any_size.cuh"
#include "cluster.cuh"

constexpr int VALUE_DIM = 128, HEAD_TILES = VALUE_DIM / COLUMNS;
#if __CUDA_ARCH__ >= 900
constexpr int SPREAD_TILES = 1;  // of a head that a block has
#define SPREAD_BOUNDS __cluster_dims__(HEAD_TILES, 1, 1) __launch_bounds__(TILE_THREADS)
#else
constexpr int SPREAD_TILES = HEAD_TILES;
#define SPREAD_BOUNDS __launch_bounds__(HEAD_TILES * TILE_THREADS)
#endif

__device__ __forceinline__ float norm_weight(const void* weight, bool is_bf16, int column) {
    return is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(weight)[column])
                   : static_cast<const float*>(weight)[column];
}

__device__ __forceinline__ float gated(float normalised, float weight, float gate) {
    return gate * (1.0f / (1.0f + expf(-gate))) * (normalised * weight);
}

template <int BLOCK_TILES>
__device__ __forceinline__ void meet_head() {
    if constexpr (BLOCK_TILES == 1) cluster_barrier();
    else __syncthreads();
}

// Dk = Dv = 128. Grid: S * value_heads heads, each BLOCK_TILES tiles of a block.
template <int BLOCK_TILES>
__device__ __forceinline__ void delta_rule_norm(const __nv_bfloat16* qkv, const float* decay, const float* beta,
                                                const __nv_bfloat16* gate, const void* weight, float* pool,
                                                const int* slots, __nv_bfloat16* out, float eps, bool is_bf16,
                                                int pool_slots, const Heads& heads) {
    __shared__ Exchange exchange[BLOCK_TILES];
    __shared__ float squares[BLOCK_TILES];
    __shared__ float4 gates[BLOCK_TILES][COLUMNS / 4], weights[BLOCK_TILES][COLUMNS / 4];
    allow_next_launch();
    wait_for_previous_launch();
    const int own_tile = threadIdx.x / TILE_THREADS, warp = threadIdx.x / 32 % TILE_WARPS, lane = threadIdx.x & 31;
    const int tile = BLOCK_TILES == 1 ? blockIdx.x % HEAD_TILES : own_tile;
    const int index = BLOCK_TILES == 1 ? blockIdx.x / HEAD_TILES : blockIdx.x;
    const int head = index % heads.value_heads, sequence = index / heads.value_heads, column = tile * COLUMNS + 4 * (lane & 7);
    const int slot = slots[sequence];
    const bool is_padding = (u32)slot >= (u32)pool_slots;
    float* const place = pool + ((size_t)(is_padding ? 0 : slot) * heads.value_heads + head) * heads.state_size() +
                         (size_t)(warp * 32 + (lane >> 3) * ROWS) * VALUE_DIM + column;
    const size_t at = (size_t)index * VALUE_DIM + column;

    // Stage 1: the step; one warp brings what the norm needs.
    float4 mixed = make_float4(0, 0, 0, 0);
    if (!is_padding) {
        RowInputs in;
        StatePart state;
        in.load(heads, qkv, decay, beta, sequence, head, column, warp, lane);
        state.load(place, VALUE_DIM);
        if (warp == 1 && lane < 8) {
            gates[own_tile][lane] = widen(*reinterpret_cast<const uint2*>(gate + at));
            weights[own_tile][lane] =
                make_float4(norm_weight(weight, is_bf16, column), norm_weight(weight, is_bf16, column + 1),
                            norm_weight(weight, is_bf16, column + 2), norm_weight(weight, is_bf16, column + 3));
        }
        mixed = widen(narrow(step(state, RowStep(in), exchange[own_tile], warp, lane)));
        state.store(place, VALUE_DIM);
    }

    // Stage 2: the mean square of the head.
    float sum = mixed.x * mixed.x + mixed.y * mixed.y + mixed.z * mixed.z + mixed.w * mixed.w;
#pragma unroll
    for (int distance = 1; distance < 8; distance <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (warp == 0 && lane == 0) squares[own_tile] = sum;
    meet_head<BLOCK_TILES>();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_TILES; ++i) total += BLOCK_TILES == 1 ? load_from_rank(&squares[0], i) : squares[i % BLOCK_TILES];

    // Stage 3: norm and gate.
    if (warp == 0 && lane < 8) {
        const float scale = 1.0f / sqrtf(total / VALUE_DIM + eps);
        const float4 g = gates[own_tile][lane], w = weights[own_tile][lane];
        const float4 normed = make_float4(gated(mixed.x * scale, w.x, g.x), gated(mixed.y * scale, w.y, g.y),
                                          gated(mixed.z * scale, w.z, g.z), gated(mixed.w * scale, w.w, g.w));
        *reinterpret_cast<uint2*>(out + at) = is_padding ? make_uint2(0, 0) : narrow(normed);
    }
    if (BLOCK_TILES == 1) meet_head<BLOCK_TILES>();  // nobody leaves while others read its shared memory
}

#define DELTA_RULE_NORM(NAME, TILES, BOUNDS)                                                                         \
    extern "C" __global__ void BOUNDS delta_rule_norm_##NAME(                                                        \
        const __nv_bfloat16* __restrict__ qkv,  /* [S, 2 key_heads Dk + value_heads Dv] */                           \
        const float* __restrict__ decay,        /* [S, value_heads] */                                               \
        const float* __restrict__ beta,         /* [S, value_heads] */                                               \
        const __nv_bfloat16* __restrict__ gate, /* [S, value_heads Dv] */                                            \
        const void* __restrict__ weight,        /* [Dv], FP32 or BF16 */                                             \
        float* __restrict__ pool,               /* [slots, value_heads, Dk, Dv] */                                   \
        const int* __restrict__ slots,          /* [S] */                                                            \
        __nv_bfloat16* __restrict__ out,        /* [S, value_heads Dv] */                                            \
        float eps, int is_bf16, int pool_slots, int key_heads, int key_dim, int value_heads, int value_dim) {        \
        delta_rule_norm<TILES>(qkv, decay, beta, gate, weight, pool, slots, out, eps, is_bf16, pool_slots,           \
                               Heads{key_heads, key_dim, value_heads, value_dim});                                   \
    }

DELTA_RULE_NORM(spread_128, SPREAD_TILES, SPREAD_BOUNDS)
DELTA_RULE_NORM(block_128, HEAD_TILES, __launch_bounds__(HEAD_TILES * TILE_THREADS, 2))

// Any Dk and Dv. Grid: S * value_heads.
extern "C" __global__ void __launch_bounds__(ANY_THREADS) delta_rule_norm_any(
    const __nv_bfloat16* __restrict__ qkv,   // [S, 2 key_heads Dk + value_heads Dv]
    const float* __restrict__ decay,         // [S, value_heads]
    const float* __restrict__ beta,          // [S, value_heads]
    const __nv_bfloat16* __restrict__ gate,  // [S, value_heads Dv]
    const void* __restrict__ weight,         // [Dv], FP32 or BF16
    float* __restrict__ pool,                // [slots, value_heads, Dk, Dv]
    const int* __restrict__ slots,           // [S]
    __nv_bfloat16* __restrict__ out,         // [S, value_heads Dv]
    float eps, int is_bf16, int pool_slots, int key_heads, int key_dim, int value_heads, int value_dim) {
    __shared__ float sums[3][ANY_WARPS], squares[ANY_WARPS];
    allow_next_launch();
    wait_for_previous_launch();
    const Heads heads{key_heads, key_dim, value_heads, value_dim};
    const int head = blockIdx.x % value_heads, sequence = blockIdx.x / value_heads, slot = slots[sequence];
    const bool is_padding = (u32)slot >= (u32)pool_slots;
    float* const state = pool + ((size_t)(is_padding ? 0 : slot) * value_heads + head) * heads.state_size();
    const size_t at = (size_t)blockIdx.x * value_dim;
    const AnyRow in(heads, qkv, sequence, head, decay[blockIdx.x], beta[blockIdx.x], sums);
    float sum = 0.0f;
    for (int column = threadIdx.x; column < value_dim; column += ANY_THREADS) {
        const __nv_bfloat16 mixed = __float2bfloat16_rn(is_padding ? 0.0f : in.step(heads, state, column, nullptr));
        out[at + column] = mixed;
        sum += __bfloat162float(mixed) * __bfloat162float(mixed);
    }
    const float scale = 1.0f / sqrtf(AnyRow::total(sum, squares) / value_dim + eps);
    for (int column = threadIdx.x; column < value_dim && !is_padding; column += ANY_THREADS) {
        const float normalised = __bfloat162float(out[at + column]) * scale;
        out[at + column] = __float2bfloat16_rn(
            gated(normalised, norm_weight(weight, is_bf16, column), __bfloat162float(gate[at + column])));
    }
}
