"""Numba kernels that quantise BF16 to NVFP4 and transpose it; also run on Numba's simulator, where arrays are flat.

``values`` are BF16 ``[N, K]``, two to a ``uint32`` with the even k in the low half; ``packed`` is ``[N, K/2]``, the
codes of eight values to a ``uint32``; block scales are ``[N, K/16]`` E4M3 bytes. Launched by ``launch.py``.

Numerics are those of ``registry.nvfp4.quantize``, operation by operation in FP32: divisions are ``div.rn``, nothing is
flushed to zero, and no product here is added to anything, so that none can be fused. A kernel cannot refuse: where a
value is NaN or infinite the global scale is NaN, and so is every block scale.

Integers are widened to ``int64`` where they are read: Numba makes a float64 of ``uint64 + int64``.
"""

import numpy as np
from numba import cuda

THREADS = 256
# A tile of the transposed copies: rows of a warp's width, and for quantising the groups that fill a block with them.
TILE = 32
TILE_GROUPS = THREADS // TILE
_LINES = 8 * TILE_GROUPS  # bytes of packed codes that a row of such a tile has
_PAD = TILE + 1  # bytes a line in shared memory: without it a column is one bank

_ZERO = np.float32(0)
_HALF = np.float32(0.5)
_E2M1_MAX = np.float32(6)
_E4M3_MAX = np.float32(448)
_GLOBAL_MAX = np.float32(6 * 448)
_E4M3_NORMAL = np.float32(2.0**-6)
_E4M3_STEPS = np.float32(512)  # subnormals are multiples of 2^-9
_E4M3_STEP = np.float32(2.0**-9)
_E4M3_REBIAS = (127 - 7) << 3
_E4M3_NAN = 0x7F
_INFINITY_BITS = 0x7F800000
_NAN = np.float32(np.nan)
# Halfway between the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6. A tie goes to the even code: up at every second one.
_MIDDLE_0, _MIDDLE_1, _MIDDLE_2, _MIDDLE_3 = np.float32(0.25), np.float32(0.75), np.float32(1.25), np.float32(1.75)
_MIDDLE_4, _MIDDLE_5, _MIDDLE_6 = np.float32(2.5), np.float32(3.5), np.float32(5)


@cuda.jit(device=True)
def _float(bits):
    """Return the FP32 value of BF16 bits."""
    return np.uint32(bits << 16).view(np.float32)


@cuda.jit(device=True)
def _global_scale(amax_bits):
    """Return ``global_scale_decode`` of the FP32 bits of the largest magnitude; NaN where that is not finite."""
    if amax_bits >= _INFINITY_BITS:
        return _NAN
    return np.uint32(amax_bits).view(np.float32) / _GLOBAL_MAX


@cuda.jit(device=True)
def _e4m3(value):
    """Round 0 to 448 to E4M3 bits, to nearest, ties to even."""
    if value < _E4M3_NORMAL:
        steps = value * _E4M3_STEPS  # exact
        code = np.int64(steps)
        rest = steps - np.float32(code)
        if rest > _HALF or (rest == _HALF and code & 1 == 1):
            code += 1
        return code
    bits = np.int64(value.view(np.uint32))
    # 20 of the 23 bits of the mantissa go; the carry of a round-up into the exponent is right as it is.
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - _E4M3_REBIAS


@cuda.jit(device=True)
def _e4m3_value(code):
    """Return the value of finite E4M3 bits without sign."""
    if code < 8:
        return np.float32(code) * _E4M3_STEP
    return np.uint32((code + _E4M3_REBIAS) << 20).view(np.float32)


@cuda.jit(device=True)
def _e2m1(bits, step):
    """Divide BF16 bits by ``step`` and round to an E2M1 code, ties to even, saturating; a step of 0 gives zeros."""
    code = (bits >> 15) << 3
    if step > _ZERO:
        size = _float(bits & 0x7FFF) / step
        code += np.int64(size > _MIDDLE_0) + np.int64(size >= _MIDDLE_1) + np.int64(size > _MIDDLE_2)
        code += np.int64(size >= _MIDDLE_3) + np.int64(size > _MIDDLE_4) + np.int64(size >= _MIDDLE_5)
        code += np.int64(size > _MIDDLE_6)
    return code


@cuda.jit(device=True)
def _block_scale(values, first, amax_bits):
    """Return the E4M3 bits of the scale of the group that begins at word ``first``."""
    largest = np.int64(0)
    for word in range(first, first + 8):
        pair = np.int64(values[word])
        largest = max(largest, pair & 0x7FFF, (pair >> 16) & 0x7FFF)
    if amax_bits >= _INFINITY_BITS:
        return np.int64(_E4M3_NAN)
    decode = _global_scale(amax_bits)
    ideal = _ZERO
    if decode > _ZERO:
        ideal = _float(largest) / (_E2M1_MAX * decode)
    return _e4m3(min(ideal, _E4M3_MAX))


@cuda.jit(device=True)
def _step(scale, amax_bits):
    """Return the divisor of a group's values; 0 if none of them is finite."""
    if scale == _E4M3_NAN:
        return _ZERO
    return _e4m3_value(scale) * _global_scale(amax_bits)


@cuda.jit(device=True)
def _eight_codes(values, first, step):
    """Return eight codes from the four words that begin at ``first``, the lowest k in the lowest bits."""
    packed = np.int64(0)
    for word in range(4):
        pair = np.int64(values[first + word])
        packed |= (_e2m1(pair & 0xFFFF, step) | (_e2m1(pair >> 16, step) << 4)) << (8 * word)
    return packed


@cuda.jit
def clear(amax):
    """Set ``amax (1,)`` to the bits of 0. One thread."""
    amax[0] = 0


@cuda.jit
def absmax(values, words, amax):
    """Raise ``amax (1,)`` to the FP32 bits of the largest magnitude in ``values``. Any grid of ``THREADS``.

    Bits without sign compare as the numbers do, NaN above infinity, and a maximum has no order.
    """
    block = cuda.shared.array(1, np.uint32)
    if cuda.threadIdx.x == 0:
        block[0] = 0
    cuda.syncthreads()
    largest = np.int64(0)
    for word in range(cuda.grid(1), words, cuda.gridsize(1)):
        pair = np.int64(values[word])
        largest = max(largest, pair & 0x7FFF, (pair >> 16) & 0x7FFF)
    cuda.atomic.max(block, 0, np.uint32(largest))
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.atomic.max(amax, 0, np.uint32(np.int64(block[0]) << 16))


@cuda.jit
def quantize(values, groups, amax, packed, block_scale):
    """Quantise ``groups`` groups of 16 values, one a thread; ``amax`` holds the bits that ``absmax`` left."""
    group = cuda.grid(1)
    if group < groups:
        amax_bits = np.int64(amax[0])
        scale = _block_scale(values, 8 * group, amax_bits)
        step = _step(scale, amax_bits)
        block_scale[group] = scale
        packed[2 * group] = np.uint32(_eight_codes(values, 8 * group, step))
        packed[2 * group + 1] = np.uint32(_eight_codes(values, 8 * group + 4, step))


@cuda.jit
def quantize_t(values, rows, row_groups, amax, packed, block_scale, packed_t, block_scale_t):
    """Quantise and write both layouts: a block of ``THREADS`` owns TILE rows x TILE_GROUPS groups, one group a thread.

    ``packed_t [K/2, N]`` and ``block_scale_t [K/16, N]`` go through shared memory, a warp writing TILE rows of a line.
    """
    codes = cuda.shared.array((_LINES, _PAD), np.uint8)
    scales = cuda.shared.array((TILE_GROUPS, _PAD), np.uint8)
    thread = cuda.threadIdx.x
    first_row, first_group = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE_GROUPS
    row, group = thread // TILE_GROUPS, thread % TILE_GROUPS
    if first_row + row < rows and first_group + group < row_groups:
        index = np.int64(first_row + row) * row_groups + first_group + group
        amax_bits = np.int64(amax[0])
        scale = _block_scale(values, 8 * index, amax_bits)
        step = _step(scale, amax_bits)
        block_scale[index] = scale
        scales[group, row] = scale
        for half in range(2):
            eight = _eight_codes(values, 8 * index + 4 * half, step)
            packed[2 * index + half] = np.uint32(eight)
            for byte in range(4):
                codes[8 * group + 4 * half + byte, row] = (eight >> (8 * byte)) & 0xFF
    cuda.syncthreads()
    row = thread % TILE
    if first_row + row < rows:
        for line in range(thread // TILE, _LINES, TILE_GROUPS):
            if first_group + line // 8 < row_groups:
                packed_t[(np.int64(8) * first_group + line) * rows + first_row + row] = codes[line, row]
        line = thread // TILE
        if first_group + line < row_groups:
            block_scale_t[np.int64(first_group + line) * rows + first_row + row] = scales[line, row]


@cuda.jit
def finish(global_scale):
    """Turn the bits of the largest magnitude in ``global_scale (1,)`` into those of the FP32 scale. One thread."""
    global_scale[0] = _global_scale(np.int64(global_scale[0])).view(np.uint32)


@cuda.jit
def transpose(source, rows, columns, target):
    """Write bytes ``source [rows, columns]`` to ``target [columns, rows]``: a block of (TILE, 8) owns a square tile."""
    tile = cuda.shared.array((TILE, _PAD), np.uint8)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    first_row, first_column = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
    for line in range(y, TILE, cuda.blockDim.y):
        if first_row + line < rows and first_column + x < columns:
            tile[line, x] = source[np.int64(first_row + line) * columns + first_column + x]
    cuda.syncthreads()
    for line in range(y, TILE, cuda.blockDim.y):
        if first_column + line < columns and first_row + x < rows:
            target[np.int64(first_column + line) * rows + first_row + x] = tile[x, line]
