// The two gates of the gated delta rule, FP32 [M, Hv], of BF16 rows:
//
//   decay = exp(-exp(a_log) * softplus(a + dt_bias))           beta = sigmoid(b)
//
// a and b may be slices of one projection. Numerics: FP32; softplus(x) = max(x, 0) + log1p(exp(-|x|)) never overflows. A
// thread has one head of one row. sm_80 and newer. Launched by launch.py.
#include "gdn_gates.cuh"
#include "launch.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS) compute_gdn_gates(
    const bf16* __restrict__ a,         // [M, Hv], rows a_stride apart
    const bf16* __restrict__ b,         // [M, Hv], rows b_stride apart
    const float* __restrict__ a_log,    // [Hv]
    const float* __restrict__ dt_bias,  // [Hv]
    float* __restrict__ decay,          // [M, Hv]
    float* __restrict__ beta,           // [M, Hv]
    long long a_stride, long long b_stride, long long M, int Hv) {
    allow_next_launch();
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x, row = at / Hv;
    const int head = at - row * Hv;
    const float rate = expf(a_log[head]), bias = dt_bias[head];
    wait_for_previous_launch();
    if (row < M) {
        decay[at] = decay_of(a[row * a_stride + head], rate, bias);
        beta[at] = beta_of(b[row * b_stride + head]);
    }
}
