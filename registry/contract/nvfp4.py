"""NVFP4: E2M1 values with one E4M3 scale per 16 along K and one FP32 scale per tensor.

value[n, k] = E2M1[nibble] * E4M3(block_scale[n, k // 16]) * global_scale_decode

Packed bytes are ``[N, K/2]`` with the even k in the low nibble; block scales are the E4M3 bits as bytes ``[N, K/16]``;
``global_scale_decode`` = amax / (6 * 448). Source: NVIDIA TensorRT / Transformer Engine NVFP4 documentation, OCP
Microscaling Formats 1.0 for E2M1. Everything here is exact except :func:`quantize`, which rounds as it documents.
Leading axes (experts) pass through every function.
"""

from typing import Any

import ml_dtypes
import numpy as np
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.values import frozen
from numpy.typing import NDArray

GROUP = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0

ROW_MAJOR = "nvfp4_row_major"
TRANSPOSED = "nvfp4_transposed"

U8 = NDArray[np.uint8]


@frozen
class Nvfp4Weight:
    """A logical weight ``(..., N, K)`` in layout ``nvfp4_row_major`` or ``nvfp4_transposed``.

    Row-major: ``packed [..., N, K/2]``, ``block_scale [..., N, K/16]``. Transposed: ``packed [..., K/2, N]``,
    ``block_scale [..., K/16, N]``, in buffers of their own. ``global_scale_decode`` is FP32: a scalar array, or one
    value an expert. Shapes that do not belong together raise ContractError.
    """

    packed: U8
    block_scale: U8
    global_scale_decode: NDArray[np.float32]
    layout: str = ROW_MAJOR
    quant: str = "nvfp4"

    def __post_init__(self) -> None:
        if self.layout not in (ROW_MAJOR, TRANSPOSED):
            raise ContractError(f"nvfp4: layout is {self.layout!r}, expected {ROW_MAJOR} or {TRANSPOSED}")
        if len(self.packed.shape) < 2:
            raise ContractError(f"nvfp4: packed has shape {self.packed.shape}, expected (..., N, K/2)")
        *lead, rows, columns = self.shape
        groups = (rows, columns // GROUP) if self.layout == ROW_MAJOR else (columns // GROUP, rows)
        if columns % GROUP:
            raise ContractError(f"nvfp4: K is {columns}, expected a multiple of {GROUP}")
        for name, got, expected in (
            ("block_scale", self.block_scale.shape, (*lead, *groups)),
            ("global_scale_decode", np.shape(self.global_scale_decode), tuple(lead)),
        ):
            if got != expected:
                raise ContractError(f"nvfp4: {name} has shape {got}, expected {expected} for (N, K) = {rows, columns}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape ``(..., N, K)``."""
        *lead, rows, columns = self.packed.shape
        return (*lead, rows, 2 * columns) if self.layout == ROW_MAJOR else (*lead, columns, 2 * rows)

    def __getitem__(self, expert: int) -> "Nvfp4Weight":
        """Return one expert's weight."""
        return Nvfp4Weight(self.packed[expert], self.block_scale[expert], self.global_scale_decode[expert], self.layout)


def pack(codes: U8) -> U8:
    """Pack E2M1 codes ``[..., N, K]`` (0..15) into bytes ``[..., N, K/2]``, the even k in the low nibble."""
    if codes.shape[-1] % 2:
        raise ContractError(f"nvfp4.pack: K is {codes.shape[-1]}, expected an even number")
    if (codes > 0xF).any():
        raise ContractError(f"nvfp4.pack: a code is {codes.max()}, expected 0 to 15")
    packed: U8 = (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
    return packed


def unpack(packed: U8) -> U8:
    """Unpack bytes ``[..., N, K/2]`` into E2M1 codes ``[..., N, K]``."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2] = packed & 0xF
    codes[..., 1::2] = packed >> 4
    return codes


def encode_e2m1(values: NDArray[Any]) -> U8:
    """Round FP32 or narrower values to E2M1 codes, to nearest, ties to even, saturating at 6; a NaN is refused.

    Wider values are refused: ``ml_dtypes.float4_e2m1fn``, which rounds here, would first round them to FP32.
    """
    if values.dtype.itemsize > 4:
        raise ContractError(f"nvfp4.encode_e2m1: values are {values.dtype}, expected float32 or narrower")
    if np.isnan(values).any():
        raise ContractError("nvfp4.encode_e2m1: NaN in the values, expected finite numbers")
    clipped = np.clip(values, -E2M1_MAX, E2M1_MAX).astype(np.float32)
    codes: U8 = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    return codes


def decode_e2m1(codes: U8) -> NDArray[np.float32]:
    """Return the exact value of each code: 0, .5, 1, 1.5, 2, 3, 4, 6, with bit 3 as the sign."""
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([magnitude, -magnitude])
    values: NDArray[np.float32] = table[codes & 0xF]
    return values


def decode_e4m3(scales: U8) -> NDArray[np.float32]:
    """Return the exact value of each E4M3 byte; NaN and negative scales are refused."""
    if ((scales & 0x7F) == 0x7F).any():
        raise ContractError("nvfp4: a block scale is NaN")
    if (scales > 0x80).any():
        raise ContractError("nvfp4: a block scale is negative")
    values: NDArray[np.float32] = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def dequantize(weight: Nvfp4Weight) -> NDArray[np.float64]:
    """Return the weight ``[..., N, K]`` as float64, exactly."""
    weight = transpose(weight) if weight.layout == TRANSPOSED else weight
    values = decode_e2m1(unpack(weight.packed)).astype(np.float64)
    scales = np.repeat(decode_e4m3(weight.block_scale).astype(np.float64), GROUP, axis=-1)
    return values * scales * np.asarray(weight.global_scale_decode, np.float64)[..., None, None]


def quantize(values: NDArray[Any]) -> Nvfp4Weight:
    """Quantise ``[N, K]`` (BF16 or FP32) to NVFP4, row-major.

    All arithmetic is FP32: global = amax / (6 * 448); per group of 16, scale = E4M3(group amax / (6 * global)); each
    value is divided by (decoded scale * global) and rounded to E2M1 to nearest, ties to even. A group whose scale
    rounds to zero is all zeros, signs kept. NaN, infinities and a K that is not a multiple of 16 are refused.
    """
    x = values.astype(np.float32)
    if x.ndim != 2 or x.shape[1] % GROUP:
        raise ContractError(f"nvfp4.quantize: values have shape {x.shape}, expected (N, K) with K a multiple of 16")
    if not np.isfinite(x).all():
        raise ContractError("nvfp4.quantize: NaN or infinity in the values, expected finite numbers")
    amax = np.abs(x).max(initial=np.float32(0))
    decode = np.float32(amax / np.float32(E2M1_MAX * E4M3_MAX))
    groups = x.reshape(x.shape[0], x.shape[1] // GROUP, GROUP)
    group_amax = np.abs(groups).max(axis=2, initial=np.float32(0))
    with np.errstate(divide="ignore", invalid="ignore"):
        ideal = np.where(decode > 0, group_amax / (np.float32(E2M1_MAX) * decode), np.float32(0))
        bits = np.minimum(ideal, np.float32(E4M3_MAX)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        step = decode_e4m3(bits) * decode
        scaled = np.where(step[..., None] > 0, groups / step[..., None], np.copysign(np.float32(0), groups))
    return Nvfp4Weight(pack(encode_e2m1(scaled.reshape(x.shape))), bits, np.asarray(decode, np.float32))


def transpose(weight: Nvfp4Weight) -> Nvfp4Weight:
    """Return the other layout: row-major ``[N, K/2]`` and transposed ``[K/2, N]`` hold the same bytes."""
    other = TRANSPOSED if weight.layout == ROW_MAJOR else ROW_MAJOR
    return Nvfp4Weight(
        np.ascontiguousarray(np.swapaxes(weight.packed, -1, -2)),
        np.ascontiguousarray(np.swapaxes(weight.block_scale, -1, -2)),
        weight.global_scale_decode,
        other,
    )
