// Shared memory of the other blocks of a cluster (PTX ISA 8.1). Below sm_90 a block stands alone: the barrier is the
// block's, every rank is the own one, and nothing is stored or awaited.
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

#if __CUDA_ARCH__ < 900
__device__ __forceinline__ void cluster_arrive_relaxed() {}
__device__ __forceinline__ void cluster_wait() {}
#endif

// A barrier of this block's shared memory, for one phase: so many bytes that blocks of the cluster store.
using Arrival = unsigned long long;

// By one thread; the cluster's barrier, reached relaxed or not, stands between this and the stores.
__device__ __forceinline__ void begin_arrival(Arrival* arrival) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((u32)__cvta_generic_to_shared(arrival)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// By one thread, before or after the first bytes have come.
__device__ __forceinline__ void announce_bytes(Arrival* arrival, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(arrival)),
                 "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void expect_bytes(Arrival* arrival, u32 bytes) {
    begin_arrival(arrival);
    announce_bytes(arrival, bytes);
}

// Both addresses are those of this block's own; the store is counted where it arrives.
__device__ __forceinline__ void store_to_rank(float4* p, float4 v, Arrival* arrival, u32 rank) {
#if __CUDA_ARCH__ >= 900
    u32 to, counted;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(counted) : "r"((u32)__cvta_generic_to_shared(arrival)), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(counted) : "memory");
#endif
}

__device__ __forceinline__ void store_to_rank(float* p, float v, Arrival* arrival, u32 rank) {
#if __CUDA_ARCH__ >= 900
    u32 to, counted;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(counted) : "r"((u32)__cvta_generic_to_shared(arrival)), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v),
                 "r"(counted) : "memory");
#endif
}

__device__ __forceinline__ void await_bytes(Arrival* arrival) {
#if __CUDA_ARCH__ >= 900
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"((u32)__cvta_generic_to_shared(arrival)) : "memory");
#endif
}
