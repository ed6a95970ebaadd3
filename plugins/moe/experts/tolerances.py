"""Bounds of errors of experts' results, for inputs that make every result a unit Gaussian."""

import numpy as np
from kernel_muster.plugins._contracts import (
    BF16_ROUNDING,
    F32_ROUNDING,
)
from kernel_muster.registry.contract.contracts import Tolerance

DEEPEST = 272
# Inputs are scaled so that gate, up and an expert's result are unit Gaussians; five deviations bound them.
LARGEST = 5.0


def dot_error(depth: int) -> float:
    """Bound the error of ``depth`` FP32 additions, as :func:`dot_tolerance`, for inputs scaled by 1/sqrt(depth)."""
    return float(36 * np.sqrt(depth) * F32_ROUNDING)


DOT = "FP32 sums of K products scaled by 1/sqrt(K) err by 36 sqrt(K) * 2^-24 (dot_tolerance)"


def activation_tolerance(depth: int) -> Tolerance:
    """Bound the error of ``silu(gate) * up`` of unit Gaussians that are sums over a depth."""
    return Tolerance(
        relative=4 * BF16_ROUNDING,
        absolute=LARGEST * (0.25 * BF16_ROUNDING + 2 * dot_error(depth)),
        derivation="gate, up and output are rounded to BF16 (2^-8 each); silu'(g) * g is below 1.28 silu(g) for g > 0 "
        f"and below 0.25 for g < 0, there times |up| < 5; {DOT}, K = {depth}",
    )


def down_tolerance(depth: int) -> Tolerance:
    """Bound the error of a down projection of a depth, rounded to BF16."""
    return Tolerance(
        relative=BF16_ROUNDING,
        absolute=dot_error(depth),
        derivation=f"one rounding to BF16; {DOT}, K = {depth}",
    )


def reduction_tolerance(depth: int) -> Tolerance:
    """Bound the error of the weighted sum over the choices of down projections of a depth."""
    return Tolerance(
        relative=BF16_ROUNDING,
        absolute=LARGEST * (BF16_ROUNDING + 16 * F32_ROUNDING) + dot_error(depth),
        derivation="output rounded to BF16; each expert's result, below 5, rounded to BF16 (2^-8) and weighted, "
        f"weights sum to 1; at most 16 FP32 additions over the choices; {DOT}, K = {depth}",
    )
