// Hides from the compiler how a value is computed. It then keeps the value in a register, where it is computed here:
// without this it would compute the value again at each use, or later.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void make_opaque(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void make_opaque(u32& value) { asm volatile("" : "+r"(value)); }
template <class T>
__device__ __forceinline__ void make_opaque(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}
