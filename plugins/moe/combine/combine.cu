// Back from experts to tokens: the weighted sum of a token's choices, and the shared expert behind its gate.
// Numerics: FP32, sums in a fixed order, one rounding to BF16. Launched by launch.py. sm_80 and newer.
// What a launch before may write is not __restrict__: its loads might be moved before the wait.
#include "bf16.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"
#include "reduce.cuh"

constexpr int THREADS = 256, MAX_CHOICES = 1024, AHEAD = 8;

// A token's places in the sorted slots, -1 for one that is not there. For all threads of a block.
struct Places {
    const int* slots;
    int first, S, T;
    int (&places)[MAX_CHOICES];

    __device__ __forceinline__ void clear() {
        for (int t = threadIdx.x; t < T; t += blockDim.x) places[t] = -1;
        __syncthreads();
    }
    __device__ __forceinline__ void note(int slot, int i) {
        const u32 choice = (u32)(slot - first);
        if (slot >= 0 && choice < (u32)T) places[choice] = i;
    }
    __device__ __forceinline__ void find() {
        clear();
        for (int i = threadIdx.x; i < S; i += blockDim.x) note(own_slot(i), i);
        __syncthreads();
    }
    // Past L1, which would keep what it finds before the wait.
    __device__ __forceinline__ int own_slot(int i) const { return i < S ? load_relaxed(slots + i) : -1; }
};

// The sum over t, in order of t, of weights[token, t] * y[places[t]].
template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> weighted_sum(const bf16* y, const int (&places)[MAX_CHOICES],
                                                      const float* weights, int token, int piece, int T, int H) {
    Values<WIDTH> total = {};
    for (int begin = 0; begin < T; begin += AHEAD) {  // so many rows are in flight
        Raw<WIDTH> raw[AHEAD];
        float share[AHEAD];
        bool is_there[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {  // no branch: loads behind one would wait for each other
            const int t = min(begin + i, T - 1), place = begin + i < T ? places[t] : -1;
            is_there[i] = place >= 0;
            share[i] = weights[(size_t)token * T + t];
            raw[i] = load_raw<WIDTH>(y + (size_t)max(place, 0) * H, piece);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const Values<WIDTH> v = widen(raw[i]);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const float sum = fmaf(v.at[j], share[i], total.at[j]);
                total.at[j] = is_there[i] ? sum : total.at[j];
            }
        }
    }
    return total;
}

// out[m] = sum over t, in order of t, of weights[m, t] * y[place of slot m T + t]. Grid: (M, blocks that cover H /
// WIDTH).
//
// Where a thread has a slot at most, places are found before the launch ahead has ended, and looked at again
// afterwards: who sorted has ended long before, most of the time.
template <int WIDTH>
__device__ __forceinline__ void unpermute_reduce(const bf16* y, const int* slots, const float* weights, bf16* out,
                                                 int S, int T, int H) {
    __shared__ int places[MAX_CHOICES];
    pdl_launch_dependents();
    const int token = blockIdx.x, piece = blockIdx.y * blockDim.x + threadIdx.x;
    Places own{slots, token * T, S, T, places};
    bool is_known = S > (int)blockDim.x;  // that the slots are what they were when places were found
    int seen = -1;
    if (!is_known) {
        own.clear();
        seen = own.own_slot(threadIdx.x);
        own.note(seen, threadIdx.x);
        __syncthreads();
        if (threadIdx.x < T) prefetch_l2(weights + (size_t)token * T + threadIdx.x);
    }
    pdl_wait();
    if (is_known) own.find();
#pragma unroll 1
    for (;;) {
        const int now = is_known ? 0 : own.own_slot(threadIdx.x);
        if (piece < H / WIDTH) {  // again if places have changed
            const Values<WIDTH> sum = weighted_sum<WIDTH>(y, places, weights, token, piece, T, H);
            store<WIDTH>(out + (size_t)token * H, piece, sum);
        }
        if (is_known || __syncthreads_and(now == seen)) return;
        own.find();
        is_known = true;
    }
}

// sigmoid(x . gate_weight) of one row. For all threads of a block.
template <int WIDTH>
__device__ __forceinline__ float shared_gate(const bf16* x, const bf16* gate_weight, int H) {
    __shared__ float partial[THREADS / 32];
    float dot = 0.0f;
    for (int piece = threadIdx.x; piece < H / WIDTH; piece += THREADS) {
        const Values<WIDTH> v = load<WIDTH>(x, piece), w = load<WIDTH>(gate_weight, piece);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) dot = fmaf(v.at[i], w.at[i], dot);
    }
    return sigmoid(block_sum(dot, partial));
}

template <int WIDTH>
__device__ __forceinline__ void add_gated(Values<WIDTH>& sum, float gate, const bf16* shared, int piece) {
    const Values<WIDTH> v = load<WIDTH>(shared, piece);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum.at[i] = fmaf(gate, v.at[i], sum.at[i]);
}

// out[m] += sigmoid(x[m] . gate_weight) * shared[m]. Grid: M.
template <int WIDTH>
__device__ __forceinline__ void shared_gate_add(const bf16* x, const bf16* gate_weight, const bf16* shared, bf16* out,
                                                int H) {
    pdl_launch_dependents();
    pdl_wait();
    const size_t row = (size_t)blockIdx.x * H;
    const float gate = shared_gate<WIDTH>(x + row, gate_weight, H);
    for (int piece = threadIdx.x; piece < H / WIDTH; piece += THREADS) {
        Values<WIDTH> sum = load<WIDTH>(out + row, piece);
        add_gated<WIDTH>(sum, gate, shared + row, piece);
        store<WIDTH>(out + row, piece, sum);
    }
}

// unpermute_reduce, its sum rounded to BF16, and shared_gate_add. Grid: M.
template <int WIDTH>
__device__ __forceinline__ void unpermute_shared_add(const bf16* y, const int* slots, const float* weights,
                                                     const bf16* x, const bf16* gate_weight, const bf16* shared,
                                                     bf16* out, int S, int T, int H) {
    __shared__ int places[MAX_CHOICES];
    pdl_launch_dependents();
    pdl_wait();
    const int token = blockIdx.x;
    const size_t row = (size_t)token * H;
    Places{slots, token * T, S, T, places}.find();
    const float gate = shared_gate<WIDTH>(x + row, gate_weight, H);
    for (int piece = threadIdx.x; piece < H / WIDTH; piece += THREADS) {
        Values<WIDTH> sum = widen(narrow(weighted_sum<WIDTH>(y, places, weights, token, piece, T, H)));
        add_gated<WIDTH>(sum, gate, shared + row, piece);
        store<WIDTH>(out + row, piece, sum);
    }
}

#define COMBINE(WIDTH)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) unpermute_reduce_w##WIDTH(       \
        const bf16* y,          /* [S, H] */                                                  \
        const int* slots,       /* [S] */                                                     \
        const float* weights,   /* [M, T] */                                                  \
        bf16* __restrict__ out, /* [M, H] */                                                  \
        int S, int T, int H) {                                                                \
        unpermute_reduce<WIDTH>(y, slots, weights, out, S, T, H);                             \
    }                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) shared_gate_add_w##WIDTH(           \
        const bf16* x,                        /* [M, H] */                                    \
        const bf16* __restrict__ gate_weight, /* [H] */                                       \
        const bf16* shared,                   /* [M, H] */                                    \
        bf16* out,                            /* [M, H] */                                    \
        int H) {                                                                              \
        shared_gate_add<WIDTH>(x, gate_weight, shared, out, H);                               \
    }                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) unpermute_shared_add_w##WIDTH(   \
        const bf16* y,                        /* [S, H] */                                    \
        const int* slots,                     /* [S] */                                       \
        const float* weights,                 /* [M, T] */                                    \
        const bf16* x,                        /* [M, H] */                                    \
        const bf16* __restrict__ gate_weight, /* [H] */                                       \
        const bf16* shared,                   /* [M, H] */                                    \
        bf16* __restrict__ out,               /* [M, H] */                                    \
        int S, int T, int H) {                                                                \
        unpermute_shared_add<WIDTH>(y, slots, weights, x, gate_weight, shared, out, S, T, H); \
    }

COMBINE(1)
COMBINE(8)
