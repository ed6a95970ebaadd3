// Thread block clusters and their distributed shared memory (DSMEM), PTX ISA 8.1.
//
// Below sm_90 a cluster is one block: the rank is 0, the cluster barrier is __syncthreads, a load reads the block's
// shared memory, and asynchronous stores do nothing.
#pragma once
#include "mbarrier.cuh"

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
// The number of blocks in the cluster.
__device__ __forceinline__ u32 cluster_size() {
    u32 size = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
    return size;
}

// The barrier of the cluster in two steps. A relaxed arrival orders no memory: it only says that a block has started.
// An ordinary one orders all memory of the device, and drops L1.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    cluster_arrive();
    cluster_wait();
#else
    __syncthreads();
#endif
}

// The address in the block of this rank that corresponds to an address in this block.
__device__ __forceinline__ u32 dsmem_address(u32 at, u32 rank) {
    u32 remote = at;
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at), "r"(rank));
#endif
    return remote;
}

__device__ __forceinline__ float dsmem_load(const float* p, u32 rank) {
#if __CUDA_ARCH__ >= 900
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(dsmem_address(shared_address(p), rank)) : "memory");
    return v;
#else
    return *p;
#endif
}
// From an address in the block of the other rank.
__device__ __forceinline__ float4 dsmem_load_16(u32 remote) {
    float4 v = {};
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(remote));
#endif
    return v;
}

// Stores to the block of a rank, asynchronously: the bytes count on that block's mbarrier. Both addresses are those of
// this block.
__device__ __forceinline__ void dsmem_store_async(float* p, float v, Mbarrier* barrier, u32 rank) {
#if __CUDA_ARCH__ >= 900
    const u32 to = dsmem_address(shared_address(p), rank), counter = dsmem_address(shared_address(barrier), rank);
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v), "r"(counter)
        : "memory");
#endif
}
__device__ __forceinline__ void dsmem_store_async(float4* p, float4 v, Mbarrier* barrier, u32 rank) {
#if __CUDA_ARCH__ >= 900
    const u32 to = dsmem_address(shared_address(p), rank), counter = dsmem_address(shared_address(barrier), rank);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(counter)
                 : "memory");
#endif
}
// Waits for the only phase of this block's mbarrier.
__device__ __forceinline__ void dsmem_wait(Mbarrier* barrier) {
    while (!mbarrier_try_wait(shared_address(barrier), 0)) {}
}
