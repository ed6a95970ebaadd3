"""The host kernel of the argmax family."""

import numpy as np
from kernel_muster.plugins._reference import Array, f32
from kernel_muster.registry.errors import ContractError


def argmax_bf16(logits: Array, out: Array) -> None:
    """Write to ``out [M]`` int32 the lowest index of each row's largest logit, ``logits [M, V]`` BF16.

    A NaN, or rows without a logit, raises ContractError before any write.
    """
    if logits.shape[1] == 0:
        raise ContractError(f"argmax_bf16: logits has shape {logits.shape}, expected at least one logit a row")
    values = f32(logits)
    for row in range(values.shape[0]):
        if np.isnan(values[row]).any():
            raise ContractError(f"argmax_bf16: NaN in row {row} of logits, expected numbers")
    for row in range(values.shape[0]):
        out[row] = np.flatnonzero(values[row] == values[row].max())[0]
