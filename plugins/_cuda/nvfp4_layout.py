"""Layout ``nvfp4_mma_16x256``: NVFP4 weights as one lane of a tensor-core GEMV reads them.

Supertiles of 16 rows x 256 k, 2304 bytes each, along K inside a tile of 16 rows, tile by tile along N; N and K are
padded with zeros. A supertile is ``[4 blocks][8 g][4 t][4 j]`` words of codes, then ``[8 g][4 t][4 blocks][2 h]`` bytes
of scales, where n = 16 tile + 8 h + g and k = 256 supertile + 64 block + 16 t + 4 j + 2 p + e. The word of (h, p, e)
holds each code's sign and magnitude where three of the four (h, p) need only a shift and a mask to become BF16:

    (0, 0): sign 15, magnitude 8..6      (1, 0): sign 12, magnitude 5..3      (0, 1): sign 9, magnitude 2..0
    (1, 1): sign 14, magnitude 11, 10, 13                                      e = 1: the same plus 16

Scales are E5M3, bias 21: every finite, non-negative E4M3 value exactly, subnormals included. Experts ``(E, N, K)`` are
one after the other.
"""

from typing import Any

import numpy as np
from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.registry.contract.nvfp4 import GROUP, ROW_MAJOR, Nvfp4Weight, transpose
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.values import frozen

LAYOUT = "nvfp4_mma_16x256"
TILE_N, TILE_K = constants(INCLUDE_DIR / "nvfp4_mma.cuh", "TILE_N", "TILE_K")
SUPERTILE_BYTES = TILE_N * TILE_K // 2 + TILE_N * TILE_K // GROUP
# Rows a step of the re-layout takes: bounds the scratch it needs to about 100 MB at K = 5120.
_ROWS_PER_STEP = 8192


@frozen
class MmaWeight:
    """A logical weight ``(N, K)`` or ``(E, N, K)`` in this layout. ``data`` is u8, on the host or on a device.

    ``global_scale_decode`` is a number, or FP32 ``[E]`` on the device of ``data``.
    """

    data: Any
    global_scale_decode: Any
    shape: tuple[int, ...]
    layout: str = LAYOUT
    quant: str = "nvfp4"


def e5m3_table() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the E5M3 byte of each E4M3 byte 0..127; the codes of a zero scale must be cleared."""
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    shift = np.frexp(np.maximum(mantissa, 1))[1] - 1  # position of a subnormal's leading bit
    normal = (exponent + 14) << 3 | mantissa
    subnormal = (12 + shift) << 3 | ((mantissa << (3 - shift)) & 7)
    return np.where(bits == 0, 0, np.where(exponent > 0, normal, subnormal)).astype(np.uint8)


def to_mma_layout(weight: Nvfp4Weight) -> MmaWeight:
    """Lay a weight ``(N, K)`` or ``(E, N, K)`` out again, exactly, where its arrays lie.

    NumPy's lie on the host, CuPy's on a device. ContractError for a scale that is NaN or negative, or a K that is not a
    multiple of 16.
    """
    xp = module_of(weight.packed)
    *experts, rows, columns = weight.shape
    if len(experts) > 1 or columns % GROUP:
        raise ContractError(
            f"{LAYOUT}: weight has shape {weight.shape}, expected (N, K) or (E, N, K) with K a multiple of {GROUP}"
        )
    tiles, supertiles = -(-rows // TILE_N), -(-columns // TILE_K)
    data = xp.empty((*experts, tiles, supertiles, SUPERTILE_BYTES), xp.uint8)
    if not experts:
        _lay_out(xp, weight, data)
        return MmaWeight(data.reshape(-1), float(weight.global_scale_decode), weight.shape)
    if rows % TILE_N == 0 and weight.layout == ROW_MAJOR:  # no expert ends inside a tile: all are one matrix
        packed, block_scale = (a.reshape(-1, a.shape[-1]) for a in (weight.packed, weight.block_scale))
        _lay_out(xp, Nvfp4Weight(packed, block_scale, np.array(1, np.float32)), data.reshape(-1, *data.shape[2:]))
    else:
        for expert in range(experts[0]):
            _lay_out(xp, weight[expert], data[expert])
    scales = xp.array(weight.global_scale_decode, xp.float32)
    return MmaWeight(data.reshape(-1), scales, weight.shape)


def _lay_out(xp: Any, weight: Nvfp4Weight, data: Any) -> None:
    """Write one weight ``(N, K)`` to ``data [tiles, supertiles, SUPERTILE_BYTES]``."""
    weight = transpose(weight) if weight.layout != ROW_MAJOR else weight
    if bool((weight.block_scale > 0x80).any()) or bool((weight.block_scale == 0x7F).any()):
        raise ContractError(f"{LAYOUT}: a block scale is NaN or negative")
    step = _ROWS_PER_STEP // TILE_N
    for start in range(0, data.shape[0], step):
        chunk = slice(start * TILE_N, (start + step) * TILE_N)
        data[start : start + step] = _supertiles(xp, weight.packed[chunk], weight.block_scale[chunk], data.shape[1])


def module_of(array: Any) -> Any:
    """Return the module of an array, NumPy or CuPy."""
    if type(array).__module__.partition(".")[0] != "cupy":
        return np
    import cupy

    return cupy


def _supertiles(xp: Any, packed: Any, scales: Any, supertiles: int) -> Any:
    rows = -(-packed.shape[0] // TILE_N) * TILE_N
    packed = padded(xp, packed, rows, supertiles * TILE_K // 2)
    scales = padded(xp, scales, rows, supertiles * TILE_K // GROUP) & 0x7F  # -0 is 0
    tiles = rows // TILE_N
    out = xp.empty((tiles, supertiles, SUPERTILE_BYTES), xp.uint8)
    # [tile, h, g, supertile, block, t, j, p]: one byte holds e = 0 in its low nibble
    codes = packed.reshape(tiles, 2, 8, supertiles, 4, 4, 4, 2)
    kept = xp.where(scales == 0, 0, 0xFF).astype(xp.uint8).reshape(tiles, 2, 8, supertiles, 4, 4, 1, 1)
    words = code_words(xp, codes & kept).transpose(0, 2, 3, 1, 4, 5, 6)
    out[:, :, : TILE_N * TILE_K // 2] = xp.ascontiguousarray(words).reshape(tiles, supertiles, -1)
    bytes_ = xp.asarray(e5m3_table())[scales].reshape(tiles, 2, 8, supertiles, 4, 4).transpose(0, 3, 2, 5, 4, 1)
    out[:, :, TILE_N * TILE_K // 2 :] = xp.ascontiguousarray(bytes_).reshape(tiles, supertiles, -1)
    return out


def padded(xp: Any, array: Any, rows: int, columns: int) -> Any:
    """Return a matrix of bytes with zeros added up to a size."""
    if array.shape == (rows, columns):
        return array
    larger = xp.zeros((rows, columns), xp.uint8)
    larger[: array.shape[0], : array.shape[1]] = array
    return larger


def code_words(xp: Any, codes: Any) -> Any:
    """Return bytes ``[tile, h, g, ..., p]``, e = 0 in the low nibble, as words: little-endian ``[tile, g, ..., 4]``."""
    word = xp.zeros((codes.shape[0], *codes.shape[2:-1]), xp.uint32)
    for e, nibble in ((0, codes & 0xF), (1, codes >> 4)):
        sign, magnitude = (nibble >> 3).astype(xp.uint32), (nibble & 7).astype(xp.uint32)
        place = 16 * e
        for h, p, sign_at, magnitude_at in ((0, 0, 15, 6), (1, 0, 12, 3), (0, 1, 9, 0)):
            word |= (sign[:, h, ..., p] << (sign_at + place)) | (magnitude[:, h, ..., p] << (magnitude_at + place))
        last = magnitude[:, 1, ..., 1]
        word |= ((last >> 2) << (11 + place)) | (((last >> 1) & 1) << (10 + place)) | ((last & 1) << (13 + place))
        word |= sign[:, 1, ..., 1] << (14 + place)
    return word.view(xp.uint8).reshape(*word.shape, 4)
