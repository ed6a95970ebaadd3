// Asynchronous copies from global to shared memory: cp.async by each thread (PTX ISA 7.0), and bulk copies by one
// thread, of contiguous bytes or of a box of a tensor by TMA (PTX ISA 8.0, from sm_90 on).
#pragma once
#include "shared_memory.cuh"

// --- cp.async ---

// 16 bytes past L1, of which the first ``bytes`` are read (0 or 16): the others become zeros.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_16_zfill(u32 to, const void* from, bool exists) {
    cp_async_16(to, from, exists ? 16 : 0);
}
// The same, fetching 128 bytes into L2.
__device__ __forceinline__ void cp_async_16_l2_128(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// 4 bytes through L1, likewise.
__device__ __forceinline__ void cp_async_4(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of the thread's groups are in flight.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Makes the writes of cp.async visible to wgmma and to TMA.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- bulk copies; their bytes count on an mbarrier ---

// The driver's CUtensorMap, opaque.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// A box of a matrix, from this column and row on.
__device__ __forceinline__ void tma_load_2d(u32 to, const TensorMap& map, int column, int row, u32 mbarrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(mbarrier)
        : "memory");
}
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 mbarrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(mbarrier)
                 : "memory");
}
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 mbarrier, u64 l2_policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(mbarrier), "l"(l2_policy)
        : "memory");
}
// L2 evicts data first if it is read only once.
__device__ __forceinline__ u64 l2_policy(bool is_read_once) {
    u64 first, normal;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return is_read_once ? first : normal;
}
