// Shared memory of the other blocks of a cluster (PTX ISA 8.0). Below sm_90 a block stands alone: the barrier is the
// block's, and every rank is the own one.
#pragma once
#include "launch.cuh"

__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    cluster_arrive();
    cluster_wait();
#else
    __syncthreads();
#endif
}

__device__ __forceinline__ float load_from_rank(const float* p, u32 rank) {
#if __CUDA_ARCH__ >= 900
    u32 address = (u32)__cvta_generic_to_shared(p), remote;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
    return value;
#else
    return *p;
#endif
}
