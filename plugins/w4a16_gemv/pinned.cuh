// Loads that stay where they stand beside the wait for the launch ahead (PTX ISA 8.0): weights before it, what that launch
// wrote behind it. Neither the compiler nor ptxas moves a plain ld.global over the wait; they do move ld.global.nc, which
// all loads of const __restrict__ parameters become: x was then read before the wait (5120 x 6144), and weights behind it.
#pragma once
#include "nvfp4_mma.cuh"

__device__ __forceinline__ uint4 load_now(const __nv_bfloat16* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
// As load_codes and load_scales: weights are read once.
__device__ __forceinline__ uint4 load_codes_now(const u8* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_scales_now(const u8* p) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
