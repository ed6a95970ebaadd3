// How NVFP4 becomes BF16, exactly: E2M1 bits are read as the BF16 of value x 2^-126, and multiplied by scale x 2^118.
// The rest, 2^8, goes into the global scale.
#pragma once

constexpr float EXPONENT_GAP = 256.0f;

// The product of two pairs of BF16, as text for an asm statement with a register ``minus_zero``. Below sm_90 there is
// only a fused multiply-add: the addition of -0 changes no product.
#if __CUDA_ARCH__ >= 900
#define PRODUCT(D, A, B) "mul.rn.bf16x2 " D ", " A ", " B ";\n"
#else
#define PRODUCT(D, A, B) "fma.rn.bf16x2 " D ", " A ", " B ", minus_zero;\n"
#endif
