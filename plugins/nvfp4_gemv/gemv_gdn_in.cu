// What a gated delta net makes of up to 8 rows of x, each of a sequence of its own, in one launch: the fused projection
// [q | k | v | z] of NVFP4 weights, the convolution of q, k and v, and the gates decay and beta of a BF16 projection.
//
// Work: the first blocks own HEADS heads each: beta's and alpha's rows of ``ba``, and so the gates. The others own
// tiles of the fused projection as gemv_parts.cu has them; the thread that has a row's sum of a channel rounds it,
// convolves it with the last three inputs of the channel, which lie in the row's slot of ``state``, and moves these on.
// z is stored as it is.
//
// Numerics: the bits of gemv_parts.cu, causal_conv1d.cu, gdn_gates.cu and of dense_gemv.cuh's form for few features,
// each rounded to BF16 where these store. A slot outside the pool is padding: q, k and v are zeros, and no state is
// touched. sm_80 and newer. Launched by launch.py.
#include "causal_conv.cuh"
#include "dense_gemv.cuh"
#include "gdn_gates.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"
#include "splits.cuh"

// --- gates ---

constexpr int HEADS = 4;
constexpr int SHARES = Few::RANKS * Few::WARPS;  // of K, in dense_gemv.cuh
constexpr int ROUND_K = SHARES * BLOCK_K;

// Two shares of K stand in the rows of one A: rows 0..7 are the block's rows of ba (four of beta, four of alpha) at the
// first, rows 8..15 the same rows at the second. Each has an mma with x at its share, in which the other's rows are
// zeros, which leave sums as they are. A warp takes every WARPS-th pair of shares.
template <int WARPS, int DEPTH>
__device__ __forceinline__ void make_gates(
    const __nv_bfloat16* __restrict__ ba, const __nv_bfloat16* __restrict__ x, const float* __restrict__ a_log,
    const float* __restrict__ dt_bias, float* __restrict__ decay, float* __restrict__ beta, int M, int K, int heads) {
    __shared__ float partial[SHARES][8][2 * HEADS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int first = blockIdx.x * HEADS, head = first + g % HEADS;
    const __nv_bfloat16* row = ba + (size_t)(g < HEADS ? head : heads + head) * K;
    const int rounds = (K + ROUND_K - 1) / ROUND_K, units = (SHARES / 2 - warp + WARPS - 1) / WARPS * rounds;

    // Stage 1: each warp sums its shares, DEPTH blocks of k in flight. Rows beyond the last head are zeros.
    auto k_of = [&](int unit) {
        return (warp + unit / rounds * WARPS) * 2 * BLOCK_K + unit % rounds * ROUND_K + t * 16;
    };
    auto load = [&](int unit) {
        Rows16 v = {};
        const int k = k_of(unit);
        if (unit >= units || head >= heads) return v;
        const u8* p = reinterpret_cast<const u8*>(row + k);
        if (k < K) v.low[0] = load_codes_now(p), v.low[1] = load_codes_now(p + 16);
        if (k + BLOCK_K < K)
            v.high[0] = load_codes_now(p + 2 * BLOCK_K), v.high[1] = load_codes_now(p + 2 * BLOCK_K + 16);
        return v;
    };
    const int own = threadIdx.x % HEADS + first;
    if (threadIdx.x < HEADS && own < heads) prefetch_l2(a_log + own), prefetch_l2(dt_bias + own);
    // What is not on its way from the start comes from L2 later.
    for (int unit = DEPTH + lane / 8; unit < units; unit += 4) {
        const int n = lane % 8, head_n = first + n % HEADS, k = k_of(unit) - t * 16;
        const __nv_bfloat16* const p = ba + (size_t)(n < HEADS ? head_n : heads + head_n) * K + k;
        if (head_n < heads && k < K) prefetch_l2(p);
        if (head_n < heads && k + BLOCK_K < K) prefetch_l2(p + BLOCK_K);
    }
    Rows16 ring[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) ring[d] = load(d);
    pdl_wait();
    float c[4][1][4];
#pragma unroll 1
    for (int unit = 0; unit < units; unit += DEPTH) {
        uint4 xs[DEPTH][2][1][2];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                load_rows<1>(xs[d][i], x, K, unit + d < units ? M : 0, K, g, k_of(unit + d) + i * BLOCK_K);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (unit + d >= units) continue;
            const int round = (unit + d) % rounds;
            if (round == 0)
#pragma unroll
                for (int i = 0; i < 16; ++i) c[i / 4][0][i % 4] = 0.0f;
            multiply<1>(c, Rows16{{ring[d].low[0], ring[d].low[1]}, {}}, xs[d][0]);
            multiply<1>(c, Rows16{{}, {ring[d].high[0], ring[d].high[1]}}, xs[d][1]);
            ring[d] = load(unit + d + DEPTH);
            if (round < rounds - 1) continue;
            const int share = 2 * (warp + (unit + d) / rounds * WARPS);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (2 * t + (i & 1) < M)
                    partial[share + i / 2][2 * t + (i & 1)][g] = (c[0][0][i] + c[1][0][i]) + (c[2][0][i] + c[3][0][i]);
        }
    }

    // Stage 2: sums over the warps of a rank, then over ranks, in rising order; then the gates.
    __syncthreads();
    const int m = threadIdx.x / (2 * HEADS), i = threadIdx.x % (2 * HEADS);
    if (m >= M || own >= heads) return;
    const bool is_alpha = i >= HEADS;
    const float rate = is_alpha ? expf(a_log[own]) : 0.0f, bias = is_alpha ? dt_bias[own] : 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < Few::RANKS; ++r) {
        float of_rank = 0.0f;
#pragma unroll
        for (int w = 0; w < Few::WARPS; ++w) of_rank += partial[r * Few::WARPS + w][m][i];
        sum = Few::RANKS == 1 ? of_rank : sum + of_rank;
    }
    if (is_alpha) decay[(size_t)m * heads + own] = decay_of(rounded(sum), rate, bias);
    else beta[(size_t)m * heads + own] = beta_of(rounded(sum));
}

// --- channels ---

// Where a row of the fused weight goes, whose rows stand key head by key head as [q | k | v | z].
struct Order {
    int key_heads, key_dim, group_values;

    __device__ __forceinline__ int features() const { return key_heads * (2 * key_dim + 2 * group_values); }
    __device__ __forceinline__ int channels() const { return key_heads * (2 * key_dim + group_values); }
    // The channel of [q | k | v]; for a row of z its place there, behind all channels.
    __device__ __forceinline__ int place(int n) const {
        const int group = 2 * key_dim + 2 * group_values, head = n / group, i = n - head * group, j = i - 2 * key_dim;
        const int keys = key_heads * key_dim;
        if (i < key_dim) return head * key_dim + i;
        if (j < 0) return keys + head * key_dim + i - key_dim;
        if (j < group_values) return 2 * keys + head * group_values + j;
        return channels() + head * group_values + j - group_values;
    }
};

// What the thread of a row's channel needs beside its sum: it is under way while the weights are multiplied. Before the
// launch ahead has ended, the slot is only a guess at what to bring into L2.
struct Channel {
    const int* row_slot;
    const __nv_bfloat16* taps;
    __nv_bfloat16* state;
    int place, channels, pool;  // the channel is none where place is not below channels
    int slot;
    uint2 own_taps;
    unsigned short before[TAPS - 1];

    __device__ __forceinline__ bool is_one() const { return place < channels; }
    __device__ __forceinline__ bool has_slot() const { return 0 <= slot && slot < pool; }
    __device__ __forceinline__ unsigned short* own() const {
        return reinterpret_cast<unsigned short*>(state + ((size_t)slot * channels + place) * (TAPS - 1));
    }
    __device__ __forceinline__ void ahead() {
        if (!is_one()) return;
        own_taps = load_now(reinterpret_cast<const uint2*>(taps + (size_t)place * TAPS));
        slot = load_relaxed(row_slot);
        if (has_slot()) prefetch_l2(own());
    }
    __device__ __forceinline__ void begin() { slot = is_one() ? *row_slot : -1; }
    __device__ __forceinline__ void go_on() {
        if (!has_slot()) return;
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) before[j] = own()[j];
    }
};

// Those of a thread, which may have results of several rows.
template <int RESULTS>
struct Channels {
    Channel at[RESULTS];
    bool has_share;  // of K: what has none is not told to go on

    __device__ __forceinline__ void ahead() {
#pragma unroll
        for (int j = 0; j < RESULTS; ++j) at[j].ahead();
    }
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int j = 0; j < RESULTS; ++j) at[j].begin();
        if (!has_share) go_on();
    }
    __device__ __forceinline__ void go_on() {
#pragma unroll
        for (int j = 0; j < RESULTS; ++j) at[j].go_on();
    }
};

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Stores what the projection gave for the thread's channel, convolved, in the row of ``qkv``, and the channel's last
// three inputs.
__device__ __forceinline__ void convolve(const Channel& channel, __nv_bfloat16 newest, __nv_bfloat16* qkv) {
    float value = 0.0f;
    if (channel.has_slot()) {
        const unsigned short (&before)[TAPS - 1] = channel.before;
        const uint2 w = channel.own_taps;
        const float taps[TAPS] = {low_of(w.x), high_of(w.x), low_of(w.y), high_of(w.y)};
        const float window[TAPS - 1] = {low_of(before[0]), low_of(before[1]), low_of(before[2])};
        value = convolved(taps, window, __bfloat162float(newest));
        unsigned short* p = channel.own();
        p[0] = before[1], p[1] = before[2], p[2] = __bfloat16_as_ushort(newest);
    }
    qkv[channel.place] = rounded(value);
}

template <class P, int DEPTH>
__device__ __forceinline__ void gdn_in(
    const u8* weight, const __nv_bfloat16* ba, const __nv_bfloat16* x, const float* a_log, const float* dt_bias,
    const __nv_bfloat16* taps, __nv_bfloat16* state, const int* slots, __nv_bfloat16* qkv, __nv_bfloat16* z,
    float* decay, float* beta, float scale, int M, int K, const Order& order, int heads, int R, int gate_blocks) {
    const Place<P> at;
    if ((int)blockIdx.x < gate_blocks) {
        make_gates<P::WARPS, DEPTH>(ba, x, a_log, dt_bias, decay, beta, M, K, heads);
        return;
    }
    constexpr int COLUMNS = P::template ShapeOf<1>::TILES * TILE_N;
    constexpr int ROWS = P::WARPS * 32 / COLUMNS, RESULTS = (8 + ROWS - 1) / ROWS;  // rows that the threads span
    const int N = order.features(), channels = order.channels(), group = at.group - gate_blocks / P::CLUSTER;
    const int own = group * COLUMNS + threadIdx.x % COLUMNS, first = threadIdx.x / COLUMNS;
    const int place = own < N ? order.place(own) : channels;
    Channels<RESULTS> mine;
    mine.has_share = P::template ShapeOf<1>::STATIC_K > 0 || (int)(threadIdx.x >> 5) * TILE_K < K;
#pragma unroll
    for (int j = 0; j < RESULTS; ++j)
        mine.at[j] = {slots + first + j * ROWS, taps, state, first + j * ROWS < M ? place : channels, channels, R};
    auto finish = [&](const Channel& channel, int m, __nv_bfloat16 value) {
        if (channel.is_one()) convolve(channel, value, qkv + (size_t)m * channels);
        else z[(size_t)m * (N - channels) + place - channels] = value;
    };
    gemv_tiles<1, P>(
        weight, x, K, scale * EXPONENT_GAP, M, N, K, group, at.rank,
        [&](int m, int, float value) {
            if (RESULTS == 1 || m < ROWS) finish(mine.at[0], m, rounded(value));
            else finish(mine.at[RESULTS - 1], m, rounded(value));
        },
        mine);
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

GEMV_GDN_IN(any, AnyK, 1)  // K2048Few too, which has the same split: no delta net has so few features
GEMV_GDN_IN(k2048, K2048, 1)
GEMV_GDN_IN(k5120_few, K5120Few, 1)
GEMV_GDN_IN(k5120, K5120, 1)
GEMV_GDN_IN(k5120_pair, K5120Pair, 2)
