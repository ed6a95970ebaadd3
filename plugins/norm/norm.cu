// RMS norms of BF16 rows: plain, with a residual that x is added to first, and gated.
//
//   rms_norm            out = x * r * (weight_offset + weight),              r = 1 / sqrt(mean(x^2) + eps)
//   rms_norm_residual   residual = BF16(residual + x), out = norm(residual)
//   rms_norm_gated      out = x * r * weight * silu(gate),                   weight FP32 or BF16
//
// How a row is done, and in which order it is summed: rms_norm.cuh. What launches write is not __restrict__: pdl.cuh says
// why. sm_80 and newer. Launched by launch.py.
#include "bf16.cuh"
#include "rms_norm.cuh"

constexpr int ROWS_PER_BLOCK = 4;  // of a warp each

#define BOUNDS(LANES) __launch_bounds__(LANES == warp ? ROWS_PER_BLOCK * warp : LANES, LANES == warp ? 4 : 2)

template <int LANES>
__device__ __forceinline__ size_t row_of_thread() {
    return LANES == warp ? (size_t)blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / warp : blockIdx.x;
}

#define RMS_NORM(LANES, WIDTH)                                                                                   \
    extern "C" __global__ void BOUNDS(LANES) rms_norm_##LANES##_w##WIDTH(                                        \
        const bf16* x,                   /* [M, H] */                                                            \
        const bf16* __restrict__ weight, /* [H] */                                                               \
        bf16* out,                       /* [M, H] */                                                            \
        float eps, float weight_offset, int M, int H) {                                                          \
        const size_t row = row_of_thread<LANES>();                                                               \
        norm_row<LANES, WIDTH>(Plain{x + row * H, weight, out + row * H, weight_offset}, row < M, H, eps);       \
    }

#define RMS_NORM_RESIDUAL(LANES, WIDTH)                                                                          \
    extern "C" __global__ void BOUNDS(LANES) rms_norm_residual_##LANES##_w##WIDTH(                               \
        const bf16* x,                   /* [M, H] */                                                            \
        bf16* residual,                  /* [M, H], in and out */                                                \
        const bf16* __restrict__ weight, /* [H] */                                                               \
        bf16* out,                       /* [M, H] */                                                            \
        float eps, float weight_offset, int M, int H) {                                                          \
        const size_t row = row_of_thread<LANES>(), at = row * H;                                                 \
        norm_row<LANES, WIDTH>(Residual{x + at, weight, residual + at, out + at, weight_offset}, row < M, H, eps); \
    }

#define RMS_NORM_GATED(LANES, WIDTH, WEIGHT, NAME)                                                               \
    extern "C" __global__ void BOUNDS(LANES) rms_norm_gated_##NAME##_##LANES##_w##WIDTH(                         \
        const bf16* x,                     /* [M, H] */                                                          \
        const bf16* gate,                  /* [M, H] */                                                          \
        const WEIGHT* __restrict__ weight, /* [H] */                                                             \
        bf16* out,                         /* [M, H] */                                                          \
        float eps, int M, int H) {                                                                               \
        const size_t row = row_of_thread<LANES>(), at = row * H;                                                 \
        norm_row<LANES, WIDTH>(Gated<WEIGHT>{x + at, gate + at, weight, out + at}, row < M, H, eps);             \
    }

#define PLAIN_FORMS(LANES, WIDTH) RMS_NORM(LANES, WIDTH) RMS_NORM_RESIDUAL(LANES, WIDTH)
#define GATED_FORMS(LANES, WIDTH) RMS_NORM_GATED(LANES, WIDTH, float, f32) RMS_NORM_GATED(LANES, WIDTH, bf16, bf16)

PLAIN_FORMS(warp, 1)
PLAIN_FORMS(warp, 8)
PLAIN_FORMS(block, 1)
PLAIN_FORMS(block, 8)
GATED_FORMS(warp, 1)
GATED_FORMS(warp, 8)
GATED_FORMS(block, 1)  // no model has a gate over rows that long

// Rows of up to 8192 values in vectors: one block a row, of a thread for each vector, or for two so that of many rows more
// loads are on their way; or, so that few rows come and go over more multiprocessors, four blocks of a cluster (from sm_90
// on). The bits are the same.
constexpr int MAX_THREADS = MAX_WARPS * warp;
#if __CUDA_ARCH__ >= 900
constexpr int TEAM = 4;
#define TEAM_BOUNDS __cluster_dims__(TEAM, 1, 1) __launch_bounds__(MAX_THREADS / TEAM)
#else
constexpr int TEAM = 1;
#define TEAM_BOUNDS __launch_bounds__(MAX_THREADS)
#endif

#define WIDE_FORMS(NAME, RANKS, VECTORS, BOUNDS)                                                                 \
    extern "C" __global__ void BOUNDS rms_norm_##NAME##_w8(                                                      \
        const bf16* x,                   /* [M, H] */                                                            \
        const bf16* __restrict__ weight, /* [H] */                                                               \
        bf16* out,                       /* [M, H] */                                                            \
        float eps, float weight_offset, int M, int H) {                                                          \
        const size_t at = (size_t)(blockIdx.x / RANKS) * H;                                                      \
        norm_row_in_registers<RANKS, VECTORS>(Plain{x + at, weight, out + at, weight_offset}, H, eps);                   \
    }                                                                                                            \
    extern "C" __global__ void BOUNDS rms_norm_residual_##NAME##_w8(                                             \
        const bf16* x,                   /* [M, H] */                                                            \
        bf16* residual,                  /* [M, H], in and out */                                                \
        const bf16* __restrict__ weight, /* [H] */                                                               \
        bf16* out,                       /* [M, H] */                                                            \
        float eps, float weight_offset, int M, int H) {                                                          \
        const size_t at = (size_t)(blockIdx.x / RANKS) * H;                                                      \
        norm_row_in_registers<RANKS, VECTORS>(Residual{x + at, weight, residual + at, out + at, weight_offset}, H, eps); \
    }

WIDE_FORMS(team, TEAM, 1, TEAM_BOUNDS)
WIDE_FORMS(wide, 1, 1, __launch_bounds__(MAX_THREADS))
WIDE_FORMS(many, 1, 2, __launch_bounds__(MAX_THREADS / 2))
