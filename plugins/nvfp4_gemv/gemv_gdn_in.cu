// The inputs of a gated delta net for up to 8 rows of x, one row of each sequence, in one launch: the fused NVFP4
// projection [q | k | v | z], the causal convolution of q, k and v, and the gates decay and beta of a BF16 projection.
// Launched by launch.py. sm_80 and newer.
//
// The first blocks compute the gates, HEADS heads each, from the rows of ``ba`` of beta and alpha. The others compute
// tiles of the fused projection as gemv_parts.cu does. Their epilogue rounds the sum of a channel, convolves it with
// the last three inputs of the channel in ``state``, and shifts these. z is stored unchanged.
//
// Numerics: the bits of gemv_parts.cu, causal_conv1d.cu, gdn_gates.cu and the small-N kernel of dense_gemm, with their
// roundings to BF16. A slot outside the pool is padding: q, k and v are zeros, and no state changes.
#include "causal_conv.cuh"
#include "dense_gemv.cuh"
#include "gdn_gates.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"
#include "splits.cuh"

// --- gates ---

constexpr int HEADS = 4;
constexpr int SLICES = SmallN::RANKS * SmallN::WARPS;  // split-K slices, as in the small-N kernel of dense_gemm
constexpr int ROUND_K = SLICES * BLOCK_K;

// The A operand holds two split-K slices: rows 0..7 are the block's rows of ba (four of beta, four of alpha) in the
// first slice, rows 8..15 the same rows in the second. Each slice has its own mma with x, in which the rows of the
// other slice are zeros and add nothing. A warp computes every WARPS-th pair of slices.
template <int WARPS, int DEPTH>
__device__ __forceinline__ void make_gates(
    const __nv_bfloat16* __restrict__ ba, const __nv_bfloat16* __restrict__ x, const float* __restrict__ a_log,
    const float* __restrict__ dt_bias, float* __restrict__ decay, float* __restrict__ beta, int M, int K, int heads) {
    __shared__ float partial[SLICES][8][2 * HEADS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int first = blockIdx.x * HEADS, head = first + g % HEADS;
    const __nv_bfloat16* row = ba + (size_t)(g < HEADS ? head : heads + head) * K;
    const int rounds = (K + ROUND_K - 1) / ROUND_K, steps = (SLICES / 2 - warp + WARPS - 1) / WARPS * rounds;

    // Stage 1: each warp sums its slices, with DEPTH blocks of k in flight. Rows after the last head are zeros.
    auto k_of = [&](int step) {
        return (warp + step / rounds * WARPS) * 2 * BLOCK_K + step % rounds * ROUND_K + t * 16;
    };
    auto load = [&](int step) {
        Rows16 v = {};
        const int k = k_of(step);
        if (step >= steps || head >= heads) return v;
        const u8* p = reinterpret_cast<const u8*>(row + k);
        if (k < K) v.low[0] = load_codes_now(p), v.low[1] = load_codes_now(p + 16);
        if (k + BLOCK_K < K)
            v.high[0] = load_codes_now(p + 2 * BLOCK_K), v.high[1] = load_codes_now(p + 2 * BLOCK_K + 16);
        return v;
    };
    const int gate_head = threadIdx.x % HEADS + first;
    if (threadIdx.x < HEADS && gate_head < heads) prefetch_l2(a_log + gate_head), prefetch_l2(dt_bias + gate_head);
    // Prefetches the blocks after the first DEPTH into L2.
    for (int step = DEPTH + lane / 8; step < steps; step += 4) {
        const int n = lane % 8, head_n = first + n % HEADS, k = k_of(step) - t * 16;
        const __nv_bfloat16* const p = ba + (size_t)(n < HEADS ? head_n : heads + head_n) * K + k;
        if (head_n < heads && k < K) prefetch_l2(p);
        if (head_n < heads && k + BLOCK_K < K) prefetch_l2(p + BLOCK_K);
    }
    Rows16 weights[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) weights[d] = load(d);
    pdl_wait();
    float c[4][1][4];
#pragma unroll 1
    for (int step = 0; step < steps; step += DEPTH) {
        uint4 xs[DEPTH][2][1][2];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                load_rows<1>(xs[d][i], x, K, step + d < steps ? M : 0, K, g, k_of(step + d) + i * BLOCK_K);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (step + d >= steps) continue;
            const int round = (step + d) % rounds;
            if (round == 0)
#pragma unroll
                for (int i = 0; i < 16; ++i) c[i / 4][0][i % 4] = 0.0f;
            multiply<1>(c, Rows16{{weights[d].low[0], weights[d].low[1]}, {}}, xs[d][0]);
            multiply<1>(c, Rows16{{}, {weights[d].high[0], weights[d].high[1]}}, xs[d][1]);
            weights[d] = load(step + d + DEPTH);
            if (round < rounds - 1) continue;
            const int slice = 2 * (warp + (step + d) / rounds * WARPS);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (2 * t + (i & 1) < M)
                    partial[slice + i / 2][2 * t + (i & 1)][g] = (c[0][0][i] + c[1][0][i]) + (c[2][0][i] + c[3][0][i]);
        }
    }

    // Stage 2: add the partials of the warps of a rank, then of the ranks, in rising order; then the gates.
    __syncthreads();
    const int m = threadIdx.x / (2 * HEADS), i = threadIdx.x % (2 * HEADS);
    if (m >= M || gate_head >= heads) return;
    const bool is_alpha = i >= HEADS;
    const float rate = is_alpha ? expf(a_log[gate_head]) : 0.0f, bias = is_alpha ? dt_bias[gate_head] : 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < SmallN::RANKS; ++r) {
        float rank_sum = 0.0f;
#pragma unroll
        for (int w = 0; w < SmallN::WARPS; ++w) rank_sum += partial[r * SmallN::WARPS + w][m][i];
        sum = SmallN::RANKS == 1 ? rank_sum : sum + rank_sum;
    }
    if (is_alpha) decay[(size_t)m * heads + gate_head] = decay_of(rounded(sum), rate, bias);
    else beta[(size_t)m * heads + gate_head] = beta_of(rounded(sum));
}

// --- channels ---

// The layout of the fused weight: for each key head the rows [q | k | v | z].
struct HeadLayout {
    int key_heads, key_dim, group_values;

    __device__ __forceinline__ int features() const { return key_heads * (2 * key_dim + 2 * group_values); }
    __device__ __forceinline__ int channels() const { return key_heads * (2 * key_dim + group_values); }
    // The channel of feature n in [q | k | v]; for z the number of channels plus the index in z.
    __device__ __forceinline__ int channel_of(int n) const {
        const int group = 2 * key_dim + 2 * group_values, head = n / group, i = n - head * group, j = i - 2 * key_dim;
        const int keys = key_heads * key_dim;
        if (i < key_dim) return head * key_dim + i;
        if (j < 0) return keys + head * key_dim + i - key_dim;
        if (j < group_values) return 2 * keys + head * group_values + j;
        return channels() + head * group_values + j - group_values;
    }
};

// The convolution's operands of one channel of one row, loaded during the main loop of the projection. Before pdl_wait
// the slot is speculative, and used for a prefetch into L2 only.
struct Channel {
    const int* row_slot;
    const __nv_bfloat16* taps;
    __nv_bfloat16* state;
    int index, channels, pool;  // no channel if index >= channels
    int slot;
    uint2 channel_taps;
    unsigned short inputs[TAPS - 1];

    __device__ __forceinline__ bool is_channel() const { return index < channels; }
    __device__ __forceinline__ bool has_slot() const { return 0 <= slot && slot < pool; }
    __device__ __forceinline__ unsigned short* inputs_in_state() const {
        return reinterpret_cast<unsigned short*>(state + ((size_t)slot * channels + index) * (TAPS - 1));
    }
    __device__ __forceinline__ void before_wait() {
        if (!is_channel()) return;
        channel_taps = load_now(reinterpret_cast<const uint2*>(taps + (size_t)index * TAPS));
        slot = load_relaxed(row_slot);
        if (has_slot()) prefetch_l2(inputs_in_state());
    }
    __device__ __forceinline__ void after_wait() { slot = is_channel() ? *row_slot : -1; }
    __device__ __forceinline__ void after_first_round() {
        if (!has_slot()) return;
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) inputs[j] = inputs_in_state()[j];
    }
};

// The channels of a thread, which may have results of several rows.
template <int RESULTS>
struct Channels {
    Channel at[RESULTS];
    bool has_k;  // a warp without a slice of K has no first round

    __device__ __forceinline__ void before_wait() {
#pragma unroll
        for (int j = 0; j < RESULTS; ++j) at[j].before_wait();
    }
    __device__ __forceinline__ void after_wait() {
#pragma unroll
        for (int j = 0; j < RESULTS; ++j) at[j].after_wait();
        if (!has_k) after_first_round();
    }
    __device__ __forceinline__ void after_first_round() {
#pragma unroll
        for (int j = 0; j < RESULTS; ++j) at[j].after_first_round();
    }
};

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Stores the convolved channel to the row of ``qkv``, and the last three inputs to the state.
__device__ __forceinline__ void convolve(const Channel& channel, __nv_bfloat16 newest, __nv_bfloat16* qkv) {
    float value = 0.0f;
    if (channel.has_slot()) {
        const unsigned short (&inputs)[TAPS - 1] = channel.inputs;
        const uint2 w = channel.channel_taps;
        const float taps[TAPS] = {low_of(w.x), high_of(w.x), low_of(w.y), high_of(w.y)};
        const float window[TAPS - 1] = {low_of(inputs[0]), low_of(inputs[1]), low_of(inputs[2])};
        value = convolved(taps, window, __bfloat162float(newest));
        unsigned short* p = channel.inputs_in_state();
        p[0] = inputs[1], p[1] = inputs[2], p[2] = __bfloat16_as_ushort(newest);
    }
    qkv[channel.index] = rounded(value);
}

template <class P, int DEPTH>
__device__ __forceinline__ void gdn_in(
    const u8* weight, const __nv_bfloat16* ba, const __nv_bfloat16* x, const float* a_log, const float* dt_bias,
    const __nv_bfloat16* taps, __nv_bfloat16* state, const int* slots, __nv_bfloat16* qkv, __nv_bfloat16* z,
    float* decay, float* beta, float scale, int M, int K, const HeadLayout& layout, int heads, int R, int gate_blocks) {
    const GridPosition<P> at;
    if ((int)blockIdx.x < gate_blocks) {
        make_gates<P::WARPS, DEPTH>(ba, x, a_log, dt_bias, decay, beta, M, K, heads);
        return;
    }
    constexpr int COLUMNS = P::template ConfigOf<1>::TILES * TILE_N;
    constexpr int ROWS = P::WARPS * 32 / COLUMNS,
                  RESULTS = (8 + ROWS - 1) / ROWS;  // rows covered by the threads of a block
    const int N = layout.features(), channels = layout.channels(), group = at.group - gate_blocks / P::CLUSTER;
    const int feature = group * COLUMNS + threadIdx.x % COLUMNS, first = threadIdx.x / COLUMNS;
    const int index = feature < N ? layout.channel_of(feature) : channels;
    Channels<RESULTS> channel_hooks;
    channel_hooks.has_k = P::template ConfigOf<1>::STATIC_K > 0 || (int)(threadIdx.x >> 5) * TILE_K < K;
#pragma unroll
    for (int j = 0; j < RESULTS; ++j)
        channel_hooks.at[j] = {
            slots + first + j * ROWS, taps, state, first + j * ROWS < M ? index : channels, channels, R};
    auto finish = [&](const Channel& channel, int m, __nv_bfloat16 value) {
        if (channel.is_channel()) convolve(channel, value, qkv + (size_t)m * channels);
        else z[(size_t)m * (N - channels) + index - channels] = value;
    };
    gemv_tiles<1, P>(
        weight, x, K, scale * EXPONENT_GAP, M, N, K, group, at.rank,
        [&](int m, int, float value) {
            if (RESULTS == 1 || m < ROWS) finish(channel_hooks.at[0], m, rounded(value));
            else finish(channel_hooks.at[RESULTS - 1], m, rounded(value));
        },
        channel_hooks);
}

#define GEMV_GDN_IN(NAME, SPLIT, DEPTH)                                                                               \
    extern "C" __global__ void SPLIT_BOUNDS(SPLIT, 8) gemv_gdn_in_##NAME##_m8(                                        \
        const u8* __restrict__ weight,          /* [ceil(N/16)][ceil(K/256)][2304], N = key_heads * group */          \
        const __nv_bfloat16* __restrict__ ba,   /* [2 * heads, K], beta of all heads, then alpha of all */            \
        const __nv_bfloat16* x,                 /* [M, K] */                                                          \
        const float* __restrict__ a_log,        /* [heads] */                                                         \
        const float* __restrict__ dt_bias,      /* [heads] */                                                         \
        const __nv_bfloat16* __restrict__ taps, /* [C, 4], C = key_heads * (2 * key_dim + group_values) */            \
        __nv_bfloat16* state,                   /* [R, C, 3], in and out */                                           \
        const int* slots,                       /* [M] */                                                             \
        __nv_bfloat16* __restrict__ qkv,        /* [M, C], convolved */                                               \
        __nv_bfloat16* __restrict__ z,          /* [M, key_heads * group_values] */                                   \
        float* __restrict__ decay,              /* [M, heads] */                                                      \
        float* __restrict__ beta,               /* [M, heads] */                                                      \
        float scale, int M, int K, int key_heads, int key_dim, int group_values, int heads, int R, int gate_blocks) { \
        gdn_in<SPLIT, DEPTH>(weight, ba, x, a_log, dt_bias, taps, state, slots, qkv, z, decay, beta, scale, M, K,     \
                             {key_heads, key_dim, group_values}, heads, R, gate_blocks);                              \
    }

GEMV_GDN_IN(any, AnyK, 1)  // also for K2048SmallN, which has the same split
GEMV_GDN_IN(k2048, K2048, 1)
GEMV_GDN_IN(k5120_few, K5120SmallN, 1)
GEMV_GDN_IN(k5120, K5120, 1)
GEMV_GDN_IN(k5120_pair, K5120Pair, 2)
