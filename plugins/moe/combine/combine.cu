// From experts back to tokens: the weighted sum over the choices of a token, and the gated shared expert.
// Numerics: FP32, sums in a fixed order, one rounding to BF16. Launched by launch.py. sm_80 and newer.
// Outputs of earlier kernels are not __restrict__: the compiler moves loads of __restrict__ memory before pdl_wait.
#include "bf16.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"
#include "reduce.cuh"

constexpr int THREADS = 256, MAX_CHOICES = 1024, LOADS_IN_FLIGHT = 8;

// The positions of a token's choices in the sorted slots, -1 for none. For all threads of a block.
struct SlotPositions {
    const int* slots;
    int first, S, T;
    int (&positions)[MAX_CHOICES];

    __device__ __forceinline__ void clear() {
        for (int t = threadIdx.x; t < T; t += blockDim.x) positions[t] = -1;
        __syncthreads();
    }
    __device__ __forceinline__ void record(int slot, int i) {
        const u32 choice = (u32)(slot - first);
        if (slot >= 0 && choice < (u32)T) positions[choice] = i;
    }
    __device__ __forceinline__ void find() {
        clear();
        for (int i = threadIdx.x; i < S; i += blockDim.x) record(slot_at(i), i);
        __syncthreads();
    }
    // Bypasses L1, which would keep the value read before pdl_wait.
    __device__ __forceinline__ int slot_at(int i) const { return i < S ? load_relaxed(slots + i) : -1; }
};

// The sum over t, in order of t, of weights[token, t] * y[positions[t]].
template <int WIDTH>
__device__ __forceinline__ Values<WIDTH> weighted_sum(const bf16* y, const int (&positions)[MAX_CHOICES],
                                                      const float* weights, int token, int vec, int T, int H) {
    Values<WIDTH> total = {};
    for (int begin = 0; begin < T; begin += LOADS_IN_FLIGHT) {
        Raw<WIDTH> raw[LOADS_IN_FLIGHT];
        float weight[LOADS_IN_FLIGHT];
        bool is_valid[LOADS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT; ++i) {  // no branch: loads after a branch would be serialised
            const int t = min(begin + i, T - 1), position = begin + i < T ? positions[t] : -1;
            is_valid[i] = position >= 0;
            weight[i] = weights[(size_t)token * T + t];
            raw[i] = load_raw<WIDTH>(y + (size_t)max(position, 0) * H, vec);
        }
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT; ++i) {
            const Values<WIDTH> v = widen(raw[i]);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                const float sum = fmaf(v.at[j], weight[i], total.at[j]);
                total.at[j] = is_valid[i] ? sum : total.at[j];
            }
        }
    }
    return total;
}

// out[m] = sum over t, in order of t, of weights[m, t] * y[position of slot m T + t]. Grid: (M, blocks over H / WIDTH).
//
// With at most one slot for each thread, positions are found speculatively before pdl_wait and checked after it: the
// sort has usually ended long before.
template <int WIDTH>
__device__ __forceinline__ void unpermute_reduce(const bf16* y, const int* slots, const float* weights, bf16* out,
                                                 int S, int T, int H) {
    __shared__ int positions[MAX_CHOICES];
    pdl_launch_dependents();
    const int token = blockIdx.x, vec = blockIdx.y * blockDim.x + threadIdx.x;
    SlotPositions slot_positions{slots, token * T, S, T, positions};
    bool is_final = S > (int)blockDim.x;  // whether the positions can no longer change
    int slot_before_wait = -1;
    if (!is_final) {
        slot_positions.clear();
        slot_before_wait = slot_positions.slot_at(threadIdx.x);
        slot_positions.record(slot_before_wait, threadIdx.x);
        __syncthreads();
        if (threadIdx.x < T) prefetch_l2(weights + (size_t)token * T + threadIdx.x);
    }
    pdl_wait();
    if (is_final) slot_positions.find();
#pragma unroll 1
    for (;;) {
        const int slot_after_wait = is_final ? 0 : slot_positions.slot_at(threadIdx.x);
        if (vec < H / WIDTH) {  // repeated if a slot has changed
            const Values<WIDTH> sum = weighted_sum<WIDTH>(y, positions, weights, token, vec, T, H);
            store<WIDTH>(out + (size_t)token * H, vec, sum);
        }
        if (is_final || __syncthreads_and(slot_after_wait == slot_before_wait)) return;
        slot_positions.find();
        is_final = true;
    }
}

// sigmoid(x . gate_weight) of one row. For all threads of a block.
template <int WIDTH>
__device__ __forceinline__ float shared_gate(const bf16* x, const bf16* gate_weight, int H) {
    __shared__ float partial[THREADS / 32];
    float dot = 0.0f;
    for (int vec = threadIdx.x; vec < H / WIDTH; vec += THREADS) {
        const Values<WIDTH> v = load<WIDTH>(x, vec), w = load<WIDTH>(gate_weight, vec);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) dot = fmaf(v.at[i], w.at[i], dot);
    }
    return sigmoid(block_sum(dot, partial));
}

template <int WIDTH>
__device__ __forceinline__ void add_gated(Values<WIDTH>& sum, float gate, const bf16* shared, int vec) {
    const Values<WIDTH> v = load<WIDTH>(shared, vec);
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
    for (int vec = threadIdx.x; vec < H / WIDTH; vec += THREADS) {
        Values<WIDTH> sum = load<WIDTH>(out + row, vec);
        add_gated<WIDTH>(sum, gate, shared + row, vec);
        store<WIDTH>(out + row, vec, sum);
    }
}

// unpermute_reduce, its sum rounded to BF16, and shared_gate_add. Grid: M.
template <int WIDTH>
__device__ __forceinline__ void unpermute_shared_add(const bf16* y, const int* slots, const float* weights,
                                                     const bf16* x, const bf16* gate_weight, const bf16* shared,
                                                     bf16* out, int S, int T, int H) {
    __shared__ int positions[MAX_CHOICES];
    pdl_launch_dependents();
    pdl_wait();
    const int token = blockIdx.x;
    const size_t row = (size_t)token * H;
    SlotPositions{slots, token * T, S, T, positions}.find();
    const float gate = shared_gate<WIDTH>(x + row, gate_weight, H);
    for (int vec = threadIdx.x; vec < H / WIDTH; vec += THREADS) {
        Values<WIDTH> sum = widen(narrow(weighted_sum<WIDTH>(y, positions, weights, token, vec, T, H)));
        add_gated<WIDTH>(sum, gate, shared + row, vec);
        store<WIDTH>(out + row, vec, sum);
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
