// Named barriers of a block, for some of its warps (PTX ISA 7.0). Number 0 is __syncthreads; 1 to 15 are free.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void named_barrier_sync(u32 number, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// Arrives without waiting: for the producer of what the other warps wait for.
__device__ __forceinline__ void named_barrier_arrive(u32 number, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
