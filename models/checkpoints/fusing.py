"""Fused copies: rows of several weights below each other, where one global scale serves all of them."""

from collections.abc import Mapping, Sequence

import numpy as np
from kernel_muster.models.checkpoints.modules import Weight
from kernel_muster.models.weights.source import fuse_rows
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.errors import UsageError


def fuse_problem(parts: Mapping[str, Weight]) -> str | None:
    """Say why parts cannot be one weight, or None: other quantisation, other K, other global scale."""
    quants = {name: part.quant for name, part in parts.items()}
    if len(set(quants.values())) != 1:
        return "quantisations differ: " + _listed(quants)
    depths = {name: part.shape[-1] for name, part in parts.items()}
    if len(set(depths.values())) != 1 or any(len(part.shape) != 2 for part in parts.values()):
        return "shapes differ in K: " + _listed({name: list(part.shape) for name, part in parts.items()})
    scales = {name: float(part.global_scale_decode) for name, part in parts.items() if isinstance(part, Nvfp4Weight)}
    if len(set(scales.values())) > 1:
        return "global scales differ: " + _listed(scales)
    return None


def fuse(parts: Mapping[str, Weight]) -> Weight:
    """Return ``(sum of N, K)``, the parts' rows in order, exactly; UsageError says why not: keep them apart then."""
    if problem := fuse_problem(parts):
        raise UsageError(f"{' | '.join(parts)} cannot be one weight: {problem}; keep them apart")
    values = list(parts.values())
    if isinstance(values[0], Bf16Weight):
        return Bf16Weight(np.concatenate([part.values for part in values if isinstance(part, Bf16Weight)]))
    whole = fuse_rows([part for part in values if isinstance(part, Nvfp4Weight)])
    if whole is None:
        raise UsageError(f"{' | '.join(parts)} cannot be one weight: they are not row-major; keep them apart")
    return whole


def take_rows(weight: Weight, rows: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.intp]]) -> Weight:
    """Return ``(len(rows), K)``: rows of a row-major weight in another order, exactly."""
    if isinstance(weight, Bf16Weight):
        return Bf16Weight(weight.values[rows])
    return Nvfp4Weight(weight.packed[rows], weight.block_scale[rows], weight.global_scale_decode)


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
