"""Layout ``nvfp4_wgmma_64x64``: NVFP4 weights as the lanes of a warpgroup feed them to wgmma.

Chunks of 64 rows x 64 k, 2304 bytes each, along K inside a block of 64 rows, block by block along N; N is padded to 64
and K to 128, with zeros. A chunk is ``[4 w][8 g][4 t][4 j]`` words of codes, then ``[4 w][8 g][2 h][4 j]`` bytes of
scales, where n = 64 block + 16 w + 8 h + g and k = 64 chunk + 16 j + 8 p + 2 t + e. Unlike the GEMV's layout, k has its
natural order inside a chunk: activations arrive by TMA, which cannot permute.

The word of (h, p, e) and the byte of a scale: :mod:`kernel_muster.plugins._cuda.nvfp4_layout`.
"""

from pathlib import Path
from typing import Any

from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.nvfp4_layout import MmaWeight, code_words, e5m3_table, module_of, padded
from kernel_muster.registry.contract.nvfp4 import GROUP, ROW_MAJOR, Nvfp4Weight, transpose
from kernel_muster.registry.errors import ContractError

LAYOUT = "nvfp4_wgmma_64x64"
BLOCK_N, CHUNK_K = constants(Path(__file__).with_name("gemm.cuh"), "BLOCK_ROWS", "CHUNK_K")
CODE_BYTES = BLOCK_N * CHUNK_K // 2
CHUNK_BYTES = CODE_BYTES + BLOCK_N * CHUNK_K // GROUP
# Rows a step of the re-layout takes: bounds the scratch it needs to about 100 MB at K = 5120.
_ROWS_A_STEP = 8192


def chunks_of(depth: int) -> int:
    """Return how many chunks K takes: an even number, because some tile configurations take two at a time."""
    return 2 * -(-depth // (2 * CHUNK_K))


def to_wgmma_layout(weight: Nvfp4Weight) -> MmaWeight:
    """Lay a weight ``(N, K)`` out again, exactly, where its arrays lie: on the host, or CuPy's on a device.

    ContractError for a scale that is NaN or negative, or a K that is not a multiple of 16.
    """
    xp = module_of(weight.packed)
    if len(weight.shape) != 2 or weight.shape[1] % GROUP:
        raise ContractError(
            f"{LAYOUT}: weight has shape {weight.shape}, expected (N, K) with K a multiple of {GROUP}: "
            "lay experts out one by one"
        )
    logical = transpose(weight) if weight.layout != ROW_MAJOR else weight
    if bool((logical.block_scale > 0x80).any()) or bool((logical.block_scale == 0x7F).any()):
        raise ContractError(f"{LAYOUT}: a block scale is NaN or negative")
    rows, columns = weight.shape
    data = xp.empty((-(-rows // BLOCK_N), chunks_of(columns), CHUNK_BYTES), xp.uint8)
    step = _ROWS_A_STEP // BLOCK_N
    for start in range(0, data.shape[0], step):
        some = slice(start * BLOCK_N, (start + step) * BLOCK_N)
        data[start : start + step] = _chunks(xp, logical.packed[some], logical.block_scale[some], data.shape[1])
    return MmaWeight(data.reshape(-1), float(weight.global_scale_decode), weight.shape, LAYOUT)


def _chunks(xp: Any, packed: Any, scales: Any, count: int) -> Any:
    blocks = -(-packed.shape[0] // BLOCK_N)
    packed = padded(xp, packed, blocks * BLOCK_N, count * CHUNK_K // 2)
    scales = padded(xp, scales, blocks * BLOCK_N, count * CHUNK_K // GROUP) & 0x7F  # -0 is 0
    out = xp.empty((blocks, count, CHUNK_BYTES), xp.uint8)
    warps = blocks * 4
    # [warp, h, g, chunk, j, p, t]: one byte holds e = 0 in its low nibble
    kept = xp.where(scales == 0, 0, 0xFF).astype(xp.uint8).reshape(warps, 2, 8, count, 4, 1, 1)
    codes = packed.reshape(warps, 2, 8, count, 4, 2, 4) & kept
    words = code_words(xp, codes.transpose(0, 1, 2, 3, 6, 4, 5))  # [warp, g, chunk, t, j, 4]
    by_lane = words.reshape(blocks, 4, 8, count, 4, 4, 4).transpose(0, 3, 1, 2, 4, 5, 6)
    out[:, :, :CODE_BYTES] = xp.ascontiguousarray(by_lane).reshape(blocks, count, -1)
    bytes_ = xp.asarray(e5m3_table())[scales].reshape(blocks, 4, 2, 8, count, 4).transpose(0, 4, 1, 3, 2, 5)
    out[:, :, CODE_BYTES:] = xp.ascontiguousarray(bytes_).reshape(blocks, count, -1)
    return out
