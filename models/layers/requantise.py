"""Requantise BF16 projection weights to NVFP4 at load, through a kernel."""

from typing import Any

import numpy as np
from kernel_muster.registry.contract.nvfp4 import GROUP, Nvfp4Weight
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.selection.handles import AnyHandle


def requantise(quantize: AnyHandle, weight: Bf16Weight) -> Nvfp4Weight:
    """Return a BF16 weight ``(N, K)`` as NVFP4, row-major. Kernels then prepare their copies, also transposed ones.

    Rounds like ``quantize_bf16_to_nvfp4``: relative error of a value at most 1/6 above the smallest step.
    """
    values = weight.values
    rows, columns = values.shape

    def empty(*shape: int, dtype: type[Any] = np.uint8) -> Any:
        return np.empty_like(values, dtype=dtype, shape=shape)

    packed, scales = empty(rows, columns // 2), empty(rows, columns // GROUP)
    decode = empty(1, dtype=np.float32)
    quantize(values=values, out_packed=packed, out_block_scale=scales, out_global_scale=decode)
    return Nvfp4Weight(packed, scales, decode.reshape(()))
