// Moves half of the elements of a result by one step, up or down: as far as another rounding could, or further.
//
//   values [R, C], rows `stride` elements apart: BF16 by one unit in the last place, FP32 by 2^-16 of its value
//
// A hash of the element's number and a seed chooses the elements and directions (the finaliser of MurmurHash3, Appleby
// 2011, public domain). The host computes the same bits (nudging.py). Any size. Launched by
// nudge_plugin.py, without PDL, because it changes the output of the previous kernel. sm_80 and newer.

constexpr int THREADS = 256;
constexpr unsigned SIZE_BITS = 0x7FFF, LARGEST = 0x7F00;  // a step below LARGEST never gives infinity
constexpr float F32_STEP = 1.0f / 65536;

__device__ unsigned mixed(unsigned element, unsigned seed) {
    unsigned word = element * 0x9E3779B9u + seed;
    word = (word ^ (word >> 16)) * 0x85EBCA6Bu;
    word = (word ^ (word >> 13)) * 0xC2B2AE35u;
    return word ^ (word >> 16);
}

// +1, -1, or 0 for half of all elements.
__device__ int step_of(unsigned element, unsigned seed) {
    const unsigned choice = mixed(element, seed) & 3;
    return choice == 0 ? 1 : choice == 1 ? -1 : 0;
}

template <class Value, class Move>
__device__ void for_each(Value* values, long long rows, long long columns, long long stride, Move move) {
    const long long step = static_cast<long long>(gridDim.x) * THREADS;
    for (long long at = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x; at < rows * columns; at += step) {
        move(values[at / columns * stride + at % columns], static_cast<unsigned>(at));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) nudge_bf16(
    unsigned short* __restrict__ values,  // [R, C] BF16
    long long rows, long long columns, long long stride, int seed) {
    for_each(values, rows, columns, stride, [seed](unsigned short& value, unsigned element) {
        const unsigned size = value & SIZE_BITS;
        if (size > 0 && size < LARGEST) value = static_cast<unsigned short>(value + step_of(element, seed));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) nudge_f32(
    float* __restrict__ values,  // [R, C] FP32
    long long rows, long long columns, long long stride, int seed) {
    for_each(values, rows, columns, stride,
             [seed](float& value, unsigned element) { value *= 1 + step_of(element, seed) * F32_STEP; });
}
