// The two gates of the gated delta rule, FP32 [M, Hv] from BF16 rows:
//
//   decay = exp(-exp(a_log) * softplus(a + dt_bias))           beta = sigmoid(b)
//
// a and b may be slices of one projection. Numerics: FP32. softplus(x) = max(x, 0) + log1p(exp(-|x|)) never overflows.
// A thread has one head of one row. Parameters that an earlier kernel writes are not __restrict__ (pdl.cuh). Launched
// by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "gdn_gates.cuh"
#include "global_memory.cuh"
#include "pdl.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS) compute_gdn_gates(
    const bf16* a,                      // [M, Hv], rows a_stride apart
    const bf16* b,                      // [M, Hv], rows b_stride apart
    const float* __restrict__ a_log,    // [Hv]
    const float* __restrict__ dt_bias,  // [Hv]
    float* decay,                       // [M, Hv]
    float* beta,                        // [M, Hv]
    long long a_stride, long long b_stride, long long M, int Hv) {
    pdl_launch_dependents();
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x, row = at / Hv;
    const int head = at - row * Hv;
    const float rate = expf(load_now(a_log + head)), bias = load_now(dt_bias + head);
    pdl_wait();
    if (row < M) {
        decay[at] = decay_of(a[row * a_stride + head], rate, bias);
        beta[at] = beta_of(b[row * b_stride + head]);
    }
}
