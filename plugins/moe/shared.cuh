// Shared memory by its 32-bit address: one wrapper for each instruction (PTX ISA 7.0).
#pragma once
#include "launch.cuh"

__device__ __forceinline__ uint4 load_shared(u32 p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p));
    return v;
}
__device__ __forceinline__ u32 load_shared_word(u32 p) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p));
    return v;
}
__device__ __forceinline__ void store_shared_word(u32 p, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory"); }
