"""RMS norms: BF16 rows ``(M, H)``, statistics in FP32, one rounding of the result."""

from typing import Any

from kernel_muster.models.layers.context import needed
from kernel_muster.registry.selection.handles import AnyHandle


class RmsNorm:
    """``x / rms(x) * (offset + weight)``, with or without adding x to a residual first.

    ``weight_offset`` is 1 for zero-centred weights, else 0.
    """

    def __init__(
        self, norm: AnyHandle, norm_residual: AnyHandle, weight: Any, eps: float, weight_offset: float
    ) -> None:
        self._norm, self._norm_residual = norm, norm_residual
        self._weight, self._constants = weight, {"eps": eps, "weight_offset": weight_offset}

    def forward(self, x: Any, out: Any) -> None:
        """Normalise x."""
        self._norm(x=x, weight=needed(self._weight, "norm"), **self._constants, out=out)

    def add(self, x: Any, residual: Any, out: Any) -> None:
        """Add x to the residual, in place and rounded to BF16, and normalise the sum."""
        weight = needed(self._weight, "norm")
        self._norm_residual(x=x, residual=residual, weight=weight, **self._constants, out=out)


class GatedRmsNorm:
    """``x / rms(x) * weight * silu(gate)``, over the features of each head."""

    def __init__(self, norm: AnyHandle, weight: Any, eps: float) -> None:
        self._norm, self._weight, self._eps = norm, weight, eps

    def forward(self, x: Any, gate: Any, out: Any) -> None:
        """Normalise x and gate it."""
        self._norm(x=x, gate=gate, weight=needed(self._weight, "norm"), eps=self._eps, out=out)
