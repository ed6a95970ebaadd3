// Sums over a warp or a block in a fixed order. All lanes get the same bits.
#pragma once

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    return value;
}

// ``partial`` is shared memory without another use.
template <int WARPS>
__device__ __forceinline__ float block_sum(float value, float (&partial)[WARPS]) {
    value = warp_sum(value);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = value;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += partial[warp];
    return sum;
}
