"""Contracts of quantisation and transposition; all are exact to the bit.

A NaN or an infinity in the values raises on the host. A device cannot raise. There the global scale and all block
scales are NaN, which every reader of weights refuses, and the codes are signed zeros.
"""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import EXACT, F64, Array, Dims, f64
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import Signature, TensorParam

#: All magnitudes of E2M1, and of E4M3 by its exponent and mantissa bits: 0 to 448.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E4M3 = np.array([(c % 8 if c < 8 else 8 + c % 8) * 2.0 ** (max(c // 8, 1) - 10) for c in range(127)])


def _nearest_code(table: F64, magnitudes: F64) -> Array:
    """Return the index of the nearest entry, of two equally near ones the even, saturating at the last."""
    clipped = np.minimum(magnitudes, table[-1])
    upper = np.searchsorted(table, clipped)
    lower = np.maximum(upper - 1, 0)
    below, above = clipped - table[lower], table[upper] - clipped
    is_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    code: Array = np.where(is_lower, lower, upper).astype(np.uint8)
    return code


def _rounded(values: F64) -> F64:
    # A float64 quotient or product of float32 values, rounded to float32, is the float32 operation (53 >= 2 * 24 + 2).
    return values.astype(np.float32).astype(np.float64)


def _divided(numerators: F64, denominators: F64) -> F64:
    """Divide in FP32; 0 / 0 is 0."""
    is_zero = denominators == 0
    return _rounded(np.where(is_zero, 0.0, numerators / np.where(is_zero, 1.0, denominators)))


def _exact_quantize(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    x = f64(arguments["values"]).reshape(dims["N"], dims["K"] // nvfp4.GROUP, nvfp4.GROUP)
    decode = _rounded(np.abs(x).max(initial=0.0, keepdims=True) / (6.0 * 448.0))
    group_amax = np.abs(x).max(axis=2, keepdims=True)
    scale_code = _nearest_code(_E4M3, _divided(group_amax, _rounded(6.0 * decode)))
    step = _rounded(_E4M3[scale_code] * decode)
    code = _nearest_code(_E2M1, np.abs(_divided(x, step))) | (np.signbit(x).astype(np.uint8) << 3)
    pairs = code.reshape(dims["N"], dims["K"] // 2, 2)
    return {
        "out_packed": pairs[..., 0] | (pairs[..., 1] << 4),
        "out_block_scale": scale_code[..., 0],
        "out_global_scale": decode.reshape(1),
    }


def _weights(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Rows of very different size, so that block scales reach their subnormals and zero."""
    size = 2.0 ** -rng.integers(0, 24, (dims["N"], dims["K"] // nvfp4.GROUP))
    values = rng.standard_normal((dims["N"], dims["K"])) * np.repeat(size, nvfp4.GROUP, axis=1)
    return {"values": values.astype(numpy_dtype("bf16"))}


_QUANTIZED = (
    TensorParam("values", "bf16", ("N", "K")),
    TensorParam("out_packed", "u8", ("N", "K/2"), "out"),
    TensorParam("out_block_scale", "u8", ("N", "K/16"), "out"),
    TensorParam("out_global_scale", "f32", (1,), "out"),
)
_CASES = (
    Case("one_group", {"N": 1, "K": 16}),
    Case("odd_rows", {"N": 33, "K": 48}),
    Case("whole_tiles", {"N": 64, "K": 256}),
    Case("one_above_a_tile", {"N": 129, "K": 272}),
    Case("empty", {"N": 0, "K": 32}),
)

QUANTIZE = Contract(
    "quantize_bf16_to_nvfp4",
    "BF16 to NVFP4: FP32 arithmetic, E4M3 scale a group, values divided by the decoded scale, to nearest even",
    Signature(_QUANTIZED, multiples=(("K", nvfp4.GROUP),)),
    _exact_quantize,
    _CASES,
    EXACT,
    inputs=_weights,
)


def _exact_quantize_t(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    outputs = _exact_quantize(arguments, dims)
    copies = {f"{name}_t": outputs[name].T for name in ("out_packed", "out_block_scale")}
    return {**outputs, **copies}


QUANTIZE_T = Contract(
    "quantize_bf16_to_nvfp4_t",
    "quantize_bf16_to_nvfp4 which also writes the transposed copy: packed [K/2, N] and block scales [K/16, N]",
    Signature(
        (
            *_QUANTIZED,
            TensorParam("out_packed_t", "u8", ("K/2", "N"), "out"),
            TensorParam("out_block_scale_t", "u8", ("K/16", "N"), "out"),
        ),
        multiples=(("K", nvfp4.GROUP),),
    ),
    _exact_quantize_t,
    _CASES,
    EXACT,
    inputs=_weights,
)


def _exact_transpose(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    return {"out_packed": arguments["packed"].T, "out_block_scale": arguments["block_scale"].T}


def _bytes(dims: Dims, rng: "np.random.Generator") -> Arguments:
    shapes = {"packed": (dims["N"], 8 * dims["G"]), "block_scale": (dims["N"], dims["G"])}
    return {name: rng.integers(0, 256, shape, np.uint8) for name, shape in shapes.items()}


TRANSPOSE = Contract(
    "transpose_nvfp4",
    "packed [N, K/2] and block scales [N, K/16] to [K/2, N] and [K/16, N], byte by byte; G is K/16",
    Signature(
        (
            TensorParam("packed", "u8", ("N", "8*G")),
            TensorParam("block_scale", "u8", ("N", "G")),
            TensorParam("out_packed", "u8", ("8*G", "N"), "out"),
            TensorParam("out_block_scale", "u8", ("G", "N"), "out"),
        )
    ),
    _exact_transpose,
    (
        Case("one_group", {"N": 1, "G": 1}),
        Case("whole_tiles", {"N": 64, "G": 8}),
        Case("odd_rows", {"N": 33, "G": 3}),
        Case("one_above_a_tile", {"N": 65, "G": 17}),
        Case("empty", {"N": 0, "G": 2}),
    ),
    EXACT,
    inputs=_bytes,
)
