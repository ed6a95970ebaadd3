// What a launch that begins before the one ahead of it ends may do meanwhile with memory that others write: look at a
// value that counts only when it is read again, and bring into L2, where all see the same, what it will read then.
#pragma once

// Past L1, which would keep what it finds.
__device__ __forceinline__ int peek(const int* p) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p));
    return value;
}

__device__ __forceinline__ void bring_into_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// By one thread; both are multiples of 16 bytes. Threads that bring a line each take a turn each: 132 blocks that brought 16
// KB so were 0.15 us slower (H200).
__device__ __forceinline__ void bring_into_l2(const void* p, unsigned int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
#endif
}

// Hides from the compiler what a value is made of.
__device__ __forceinline__ void make_opaque(int& value) { asm volatile("" : "+r"(value)); }

// Loads of what no launch writes, where they stand: others are put off until their values are needed, behind the wait. The
// wait holds back neither the compiler nor ptxas where a load is ld.global.nc, as those of const __restrict__ parameters
// are: they may move behind it and before it. So kernels that rely on the wait do not call restrict what launches write.
// Of a GEMV of 5120 x 6144 x was read before the wait, and weights behind it.
__device__ __forceinline__ uint4 load_now(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ float4 load_now(const float4* p) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ float load_now(const float* p) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
