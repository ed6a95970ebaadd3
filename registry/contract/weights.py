"""Logical weights other than NVFP4, with the attributes a contract checks: layout, quant, shape."""

from typing import Any

from kernel_muster.registry.values import frozen
from numpy.typing import NDArray

BF16_ROW_MAJOR = "bf16_row_major"


@frozen
class Bf16Weight:
    """A weight ``(..., N, K)`` of BF16 values, row-major."""

    values: NDArray[Any]
    layout: str = BF16_ROW_MAJOR
    quant: str = "bf16"

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape ``(..., N, K)``."""
        return self.values.shape
