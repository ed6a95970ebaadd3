// Names that every kernel uses: unsigned integers by their size in bits, and the mask of a whole warp.
#pragma once

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 ALL_LANES = 0xffffffffu;
