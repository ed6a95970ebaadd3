// wgmma of sm_90a with BF16 operands, A in registers or in shared memory, and the registers of a warpgroup (PTX ISA
// 8.0).
#pragma once
#include "types.cuh"

// --- registers of a warpgroup ---

template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// --- wgmma ---

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The descriptor of an operand in shared memory: rows of 64 BF16 k (128 bytes) with the 128-byte swizzle, groups of 8
// rows 1024 bytes apart. The tile starts at a multiple of 1024. A step of 16 k is 32 bytes, which is 2 in the
// descriptor: an address has 18 bits, of which the descriptor holds the upper 14.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address) {
    constexpr u64 SWIZZLE_128B = 1ull << 62, EIGHT_ROWS = (1024ull >> 4) << 32, UNUSED = 1ull << 16;
    return SWIZZLE_128B | EIGHT_ROWS | UNUSED | (address >> 4);
}

// The same for a transposed B: groups of 8 k are 1024 bytes apart, panels of 64 columns ``panel_bytes``.
__device__ __forceinline__ u64 wgmma_descriptor_transposed(u32 address, u32 panel_bytes) {
    constexpr u64 SWIZZLE_128B = 1ull << 62, EIGHT_ROWS = (1024ull >> 4) << 32;
    return SWIZZLE_128B | EIGHT_ROWS | (u64)(panel_bytes >> 4) << 16 | (address >> 4);
}

// Keeps the compiler from using the registers of a wgmma before the wait for it.
template <int COUNT>
__device__ __forceinline__ void wgmma_fence_operand(float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void wgmma_fence_operand(u32 (&values)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(values[i][j])::"memory");
}

// %0 to %127 and their registers, 16 at a time. wgmma takes N / 2 of them.
#define D0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define D1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define D3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define D4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define D5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define D6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define D7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define R32(d, i) R16(d, i), R16(d, i + 16)
#define R64(d, i) R32(d, i), R32(d, i + 32)
#define ARGS(...) __VA_ARGS__

// clang-format off
// d [64 x N] (+)= a [64 x 64] b [64 x N]^T, four steps of 16 k. An ``accumulate`` of 0 overwrites d. The four steps are
// one statement: four statements would each pass all registers of d through the compiler, which takes most of the
// compile time.
#define WGMMA_STEP(N, D, A, B, P) \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" D "}, " A ", " B ", " P ", 1, 1"
#define WGMMA_STEPS(P) \
    "{\n.reg .pred p, yes;\nsetp.ne.b32 p, " P ", 0;\nsetp.eq.b32 yes, 0, 0;\n"
#define NEXT_16_K(OF, B) \
    ".reg .b64 " OF "1, " OF "2, " OF "3;\nadd.s64 " OF "1, " B ", 2;\nadd.s64 " OF "2, " B ", 4;\n" \
    "add.s64 " OF "3, " B ", 6;\n"
template <int N>
struct Wgmma;
#define WGMMA(N, D, REGISTERS, A0, A1, A2, A3, B, P) \
    template <> \
    struct Wgmma<N> { \
        static __device__ __forceinline__ void run(float (&d)[N / 2], const u32 (&a)[4][4], u64 b, u32 accumulate) { \
            asm volatile(WGMMA_STEPS(P) NEXT_16_K("b", B) \
                         WGMMA_STEP(N, D, "{" A0 "}", B, "p") ", 0;\n" \
                         WGMMA_STEP(N, D, "{" A1 "}", "b1", "yes") ", 0;\n" \
                         WGMMA_STEP(N, D, "{" A2 "}", "b2", "yes") ", 0;\n" \
                         WGMMA_STEP(N, D, "{" A3 "}", "b3", "yes") ", 0;\n}" \
                         : REGISTERS \
                         : "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), \
                           "r"(a[1][2]), "r"(a[1][3]), "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), \
                           "r"(a[3][0]), "r"(a[3][1]), "r"(a[3][2]), "r"(a[3][3]), "l"(b), "r"(accumulate)); \
        } \
    };

WGMMA(32, D0, ARGS(R16(d, 0)), "%16, %17, %18, %19", "%20, %21, %22, %23",
      "%24, %25, %26, %27", "%28, %29, %30, %31", "%32", "%33")
WGMMA(64, D0 ", " D1, ARGS(R32(d, 0)), "%32, %33, %34, %35", "%36, %37, %38, %39",
      "%40, %41, %42, %43", "%44, %45, %46, %47", "%48", "%49")
WGMMA(96, D0 ", " D1 ", " D2, ARGS(R32(d, 0), R16(d, 32)), "%48, %49, %50, %51", "%52, %53, %54, %55",
      "%56, %57, %58, %59", "%60, %61, %62, %63", "%64", "%65")
WGMMA(128, D0 ", " D1 ", " D2 ", " D3, ARGS(R64(d, 0)), "%64, %65, %66, %67", "%68, %69, %70, %71",
      "%72, %73, %74, %75", "%76, %77, %78, %79", "%80", "%81")
WGMMA(192, D0 ", " D1 ", " D2 ", " D3 ", " D4 ", " D5, ARGS(R64(d, 0), R32(d, 64)),
      "%96, %97, %98, %99", "%100, %101, %102, %103",
      "%104, %105, %106, %107", "%108, %109, %110, %111", "%112", "%113")
WGMMA(256, D0 ", " D1 ", " D2 ", " D3 ", " D4 ", " D5 ", " D6 ", " D7, ARGS(R64(d, 0), R64(d, 64)),
      "%128, %129, %130, %131", "%132, %133, %134, %135",
      "%136, %137, %138, %139", "%140, %141, %142, %143", "%144", "%145")

// The same with a in shared memory, in the same layout as b.
template <int N>
struct WgmmaShared;
#define WGMMA_SHARED(N, D, REGISTERS, A, B, P) \
    template <> \
    struct WgmmaShared<N> { \
        static __device__ __forceinline__ void run(float (&d)[N / 2], u64 a, u64 b, u32 accumulate) { \
            asm volatile(WGMMA_STEPS(P) NEXT_16_K("a", A) NEXT_16_K("b", B) \
                         WGMMA_STEP(N, D, A, B, "p") ", 0, 0;\n" \
                         WGMMA_STEP(N, D, "a1", "b1", "yes") ", 0, 0;\n" \
                         WGMMA_STEP(N, D, "a2", "b2", "yes") ", 0, 0;\n" \
                         WGMMA_STEP(N, D, "a3", "b3", "yes") ", 0, 0;\n}" \
                         : REGISTERS : "l"(a), "l"(b), "r"(accumulate)); \
        } \
    };

WGMMA_SHARED(64, D0 ", " D1, ARGS(R32(d, 0)), "%32", "%33", "%34")
WGMMA_SHARED(128, D0 ", " D1 ", " D2 ", " D3, ARGS(R64(d, 0)), "%64", "%65", "%66")
WGMMA_SHARED(192, D0 ", " D1 ", " D2 ", " D3 ", " D4 ", " D5, ARGS(R64(d, 0), R32(d, 64)), "%96", "%97", "%98")
WGMMA_SHARED(256, D0 ", " D1 ", " D2 ", " D3 ", " D4 ", " D5 ", " D6 ", " D7, ARGS(R64(d, 0), R64(d, 64)),
             "%128", "%129", "%130")
// clang-format on

// Single steps of 16 k. The first has both operands in shared memory, rows of k. d is overwritten if ``accumulate`` is
// 0.
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], u64 a, u64 b, u32 accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" D0 ", " D1 "}, %32, %33, p, 1, 1, 0, 0;\n}"
        : R32(d, 0)
        : "l"(a), "l"(b), "r"(accumulate));
}
// d += a b with a in registers and b [16 x N] transposed in shared memory: its rows are k, and N is contiguous.
__device__ __forceinline__ void wgmma_b_transposed(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" D0 ", " D1 ", " D2 ", " D3
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : R64(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_b_transposed(float (&d)[128], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" D0 ", " D1 ", " D2 ", " D3 ", " D4 ", " D5
                 ", " D6 ", " D7 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : R64(d, 0), R64(d, 64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
