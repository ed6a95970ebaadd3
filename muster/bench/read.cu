// The floor of all memory-bound kernels: only reads the same bytes, and is timed in the same call, so that it includes
// launch, ramp and tail. Grid: ceil(count / 4096) blocks of 512 threads, 8 loads of 16 bytes each. Launched by
// plugin.py. sm_80 and newer.
using u32 = unsigned int;

constexpr int LOADS = 8;

extern "C" __global__ void __launch_bounds__(512) read_bytes(const uint4* __restrict__ data, u32* __restrict__ out,
                                                             long long count /* of 16 bytes */) {
    const long long first = (long long)blockIdx.x * blockDim.x * LOADS + threadIdx.x;
    uint4 v[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
        const uint4* p = data + first + j * 512;
        v[j] = make_uint4(0, 0, 0, 0);
        if (first + j * 512 < count)
            asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "l"(p));
    }
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < LOADS; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    if (sum == 0x9e3779b9u) out[0] = sum;  // keeps the loads
}
