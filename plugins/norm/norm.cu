// RMS norms of BF16 rows: plain, with a residual, and gated.
//
//   rms_norm            out = x * r * (weight_offset + weight),              r = 1 / sqrt(mean(x^2) + eps)
//   rms_norm_residual   residual = BF16(residual + x), out = norm(residual)
//   rms_norm_gated      out = x * r * weight * silu(gate),                   weight FP32 or BF16
//
// The work split and the order of sums are in rms_norm.cuh. Parameters that an earlier kernel writes are not
// __restrict__ (pdl.cuh). Launched by launch.py. sm_80 and newer.
#include "bf16.cuh"
#include "rms_norm.cuh"

constexpr int ROWS_PER_BLOCK = 4;  // each by a warp

#define BOUNDS(LANES) __launch_bounds__(LANES == warp ? ROWS_PER_BLOCK * warp : LANES, LANES == warp ? 4 : 2)

template <int LANES>
__device__ __forceinline__ size_t row_of_thread() {
    return LANES == warp ? (size_t)blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / warp : blockIdx.x;
}

#define RMS_NORM(LANES, WIDTH)                                                                             \
    extern "C" __global__ void BOUNDS(LANES) rms_norm_##LANES##_w##WIDTH(                                  \
        const bf16* x,                   /* [M, H] */                                                      \
        const bf16* __restrict__ weight, /* [H] */                                                         \
        bf16* out,                       /* [M, H] */                                                      \
        float eps, float weight_offset, int M, int H) {                                                    \
        const size_t row = row_of_thread<LANES>();                                                         \
        norm_row<LANES, WIDTH>(Plain{x + row * H, weight, out + row * H, weight_offset}, row < M, H, eps); \
    }

#define RMS_NORM_RESIDUAL(LANES, WIDTH)                                                                            \
    extern "C" __global__ void BOUNDS(LANES) rms_norm_residual_##LANES##_w##WIDTH(                                 \
        const bf16* x,                   /* [M, H] */                                                              \
        bf16* residual,                  /* [M, H], in and out */                                                  \
        const bf16* __restrict__ weight, /* [H] */                                                                 \
        bf16* out,                       /* [M, H] */                                                              \
        float eps, float weight_offset, int M, int H) {                                                            \
        const size_t row = row_of_thread<LANES>(), at = row * H;                                                   \
        norm_row<LANES, WIDTH>(Residual{x + at, weight, residual + at, out + at, weight_offset}, row < M, H, eps); \
    }

#define RMS_NORM_GATED(LANES, WIDTH, WEIGHT, NAME)                                                   \
    extern "C" __global__ void BOUNDS(LANES) rms_norm_gated_##NAME##_##LANES##_w##WIDTH(             \
        const bf16* x,                     /* [M, H] */                                              \
        const bf16* gate,                  /* [M, H] */                                              \
        const WEIGHT* __restrict__ weight, /* [H] */                                                 \
        bf16* out,                         /* [M, H] */                                              \
        float eps, int M, int H) {                                                                   \
        const size_t row = row_of_thread<LANES>(), at = row * H;                                     \
        norm_row<LANES, WIDTH>(Gated<WEIGHT>{x + at, gate + at, weight, out + at}, row < M, H, eps); \
    }

#define PLAIN_ENTRIES(LANES, WIDTH) RMS_NORM(LANES, WIDTH) RMS_NORM_RESIDUAL(LANES, WIDTH)
#define GATED_ENTRIES(LANES, WIDTH) RMS_NORM_GATED(LANES, WIDTH, float, f32) RMS_NORM_GATED(LANES, WIDTH, bf16, bf16)

PLAIN_ENTRIES(warp, 1)
PLAIN_ENTRIES(warp, 8)
PLAIN_ENTRIES(block, 1)
PLAIN_ENTRIES(block, 8)
GATED_ENTRIES(warp, 1)
GATED_ENTRIES(warp, 8)
GATED_ENTRIES(block, 1)  // no model has a gate over such long rows

// Rows of up to 8192 values in vectors, held in registers. For few rows, a cluster of four blocks has a row (from sm_90
// on), which uses more multiprocessors. For more rows, a block has a row, with one vector a thread, or with two, which
// keeps more loads in flight for many rows. The bits are the same.
constexpr int MAX_THREADS = MAX_WARPS * warp;
#if __CUDA_ARCH__ >= 900
constexpr int CLUSTER = 4;
#define CLUSTER_BOUNDS __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(MAX_THREADS / CLUSTER)
#else
constexpr int CLUSTER = 1;
#define CLUSTER_BOUNDS __launch_bounds__(MAX_THREADS)
#endif

#define REGISTER_ENTRIES(NAME, RANKS, VECTORS, BOUNDS)                                                 \
    extern "C" __global__ void BOUNDS rms_norm_##NAME##_w8(                                            \
        const bf16* x,                   /* [M, H] */                                                  \
        const bf16* __restrict__ weight, /* [H] */                                                     \
        bf16* out,                       /* [M, H] */                                                  \
        float eps, float weight_offset, int M, int H) {                                                \
        const size_t at = (size_t)(blockIdx.x / RANKS) * H;                                            \
        norm_row_in_registers<RANKS, VECTORS>(Plain{x + at, weight, out + at, weight_offset}, H, eps); \
    }                                                                                                  \
    extern "C" __global__ void BOUNDS rms_norm_residual_##NAME##_w8(                                   \
        const bf16* x,                   /* [M, H] */                                                  \
        bf16* residual,                  /* [M, H], in and out */                                      \
        const bf16* __restrict__ weight, /* [H] */                                                     \
        bf16* out,                       /* [M, H] */                                                  \
        float eps, float weight_offset, int M, int H) {                                                \
        const size_t at = (size_t)(blockIdx.x / RANKS) * H;                                            \
        norm_row_in_registers<RANKS, VECTORS>(                                                         \
            Residual{x + at, weight, residual + at, out + at, weight_offset}, H, eps);                 \
    }

REGISTER_ENTRIES(cluster, CLUSTER, 1, CLUSTER_BOUNDS)
REGISTER_ENTRIES(vec1, 1, 1, __launch_bounds__(MAX_THREADS))
REGISTER_ENTRIES(vec2, 1, 2, __launch_bounds__(MAX_THREADS / 2))
