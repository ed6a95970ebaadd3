"""The transposed copy of a weight, made where its arrays lie."""

from typing import Any

import numpy as np
from kernel_muster.plugins._cuda.nvfp4_layout import module_of
from kernel_muster.registry.contract.nvfp4 import ROW_MAJOR, TRANSPOSED, Nvfp4Weight
from kernel_muster.registry.errors import ContractError

_NAN, _NEGATIVE_ZERO = 0x7F, 0x80


def to_transposed(weight: Nvfp4Weight) -> Nvfp4Weight:
    """Return codes ``[K/2, N]`` and scales ``[K/16, N]`` in buffers of their own, on the host (NumPy) or device (CuPy).

    The bytes are those of the row-major weight. Its ``global_scale_decode`` goes to the host, which reads it at each
    launch. ContractError for a scale that is NaN or negative, and for a weight that is not one row-major matrix.
    """
    if weight.layout != ROW_MAJOR or len(weight.shape) != 2:
        raise ContractError(
            f"{TRANSPOSED}: weight has layout {weight.layout} and shape {weight.shape}, expected {ROW_MAJOR} and (N, K)"
        )
    xp, scales = module_of(weight.packed), weight.block_scale
    if bool(((scales > _NEGATIVE_ZERO) | (scales == _NAN)).any()):
        raise ContractError(f"{TRANSPOSED}: a block scale is NaN or negative")
    packed, scales = xp.ascontiguousarray(weight.packed.T), xp.ascontiguousarray(scales.T)
    return Nvfp4Weight(packed, scales, _on_host(weight.global_scale_decode), TRANSPOSED)


def _on_host(scale: Any) -> Any:
    return np.asarray(float(scale), np.float32)
