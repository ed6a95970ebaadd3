// Programmatic dependent launch (PDL), PTX ISA 7.8. Below sm_90 both functions do nothing.
//
// A kernel that is launched with PDL may start while the kernel before it still runs. It may then read weights, which
// no kernel writes. It may not read activations, nor write anything, before pdl_wait. Speculative work on memory that
// others write is possible in two ways: load_relaxed, if the value is read again after the wait, and prefetch_l2,
// because L2 is coherent (global_memory.cuh).
//
// Neither the compiler nor ptxas keeps an ld.global.nc on its side of the wait. Loads from const __restrict__
// parameters become ld.global.nc. Kernels that rely on the wait therefore do not declare a parameter __restrict__ if an
// earlier kernel writes it. In a GEMV of 5120 x 6144, x was read before the wait, and weights after it.
#pragma once
#include "types.cuh"

// Lets the next kernel start as soon as all blocks of this one have called it or ended.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel before this one has ended and its writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether a block belongs to the first wave, which may start while the kernel before this one still runs.
__device__ __forceinline__ bool is_in_first_wave(int blocks_per_multiprocessor) {
    u32 multiprocessors;
    asm volatile("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
    return blockIdx.x < multiprocessors * blocks_per_multiprocessor;
}
