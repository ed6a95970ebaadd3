// Barriers in shared memory that count arrivals and the bytes of asynchronous copies (PTX ISA 8.0). Below sm_90 the
// functions do nothing: callers have neither clusters nor TMA.
#pragma once
#include "shared_memory.cuh"

using Mbarrier = u64;

// By one thread. Other threads see it after mbarrier_fence_init and a barrier of the block, or of the cluster.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_fence_init() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
// Arrives, and announces the bytes of copies that complete the phase. The first bytes may have come before.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// Waits for the end of the phase of this parity. The first phase has parity 0.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
    // clang-format off
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
    // clang-format on
#endif
}
// Whether that phase has ended, after waiting for a while.
__device__ __forceinline__ u32 mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 done = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
    return done;
}

// A barrier of one phase, which ends with one arrival and so many bytes from the blocks of a cluster. By one thread. A
// barrier of the cluster, relaxed or not, stands between this and the stores.
__device__ __forceinline__ void mbarrier_init_expect_tx(Mbarrier* barrier, u32 bytes) {
    mbarrier_init(shared_address(barrier), 1);
    mbarrier_fence_init();
    mbarrier_arrive_expect_tx(shared_address(barrier), bytes);
}
