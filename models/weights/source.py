"""Sources of logical weights: none (a plan), a loaded mapping, or random numbers."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
from kernel_muster.models.memory.memory import Memory
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.nvfp4 import GROUP, Nvfp4Weight
from kernel_muster.registry.contract.weights import BF16_ROW_MAJOR, Bf16Weight
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen


@frozen
class WeightSpec:
    """A layer's weight: ``quant`` is nvfp4, bf16 (both projections, ``(..., N, K)``) or array (BF16)."""

    name: str
    shape: tuple[int, ...]
    quant: str

    @property
    def size_bytes(self) -> int:
        """Bytes of one copy, in any layout: 0.5625 a weight and one FP32 a matrix for NVFP4, 2 for BF16."""
        elements = prod(self.shape)
        if self.quant != "nvfp4":
            return 2 * elements
        matrices = elements // (self.shape[-1] * self.shape[-2]) if elements else 0
        return elements // 2 + elements // GROUP + 4 * matrices

    @property
    def logical_layout(self) -> str:
        """The layout of the logical weight itself."""
        return nvfp4.ROW_MAJOR if self.quant == "nvfp4" else BF16_ROW_MAJOR


class WeightSource(Protocol):
    """Gives the value of a weight, or None in a plan."""

    def find(self, spec: WeightSpec) -> Any | None:
        """Return the logical weight. UsageError if it does not fit."""

    def quant_of(self, name: str) -> str | None:
        """Return the stored quantisation of a weight, or None if unknown."""


class PlanOnly:
    """No weights: layers look up and plan, and cannot compute."""

    def find(self, spec: WeightSpec) -> None:
        """Return None."""

    def quant_of(self, name: str) -> str | None:
        """Return None."""


class QuantsOf(PlanOnly):
    """A plan of weights that are known: no values, and the quantisation of each."""

    def __init__(self, weights: Any) -> None:
        self._source = GivenWeights(weights) if isinstance(weights, Mapping) else weights

    def quant_of(self, name: str) -> str | None:
        """Return the quantisation of a weight, where its source knows it."""
        return None if self._source is None else self._source.quant_of(name)


class GivenWeights:
    """Weights by name: Nvfp4Weight, Bf16Weight, or a BF16 array for norms and gates."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = dict(weights)

    def find(self, spec: WeightSpec) -> Any:
        """Return a weight by its name. UsageError for a missing or wrong one."""
        if spec.name not in self._weights:
            raise UsageError(f"{spec.name}: no such weight, expected {spec.quant} {spec.shape}")
        value = self._weights[spec.name]
        quant = getattr(value, "quant", "array")
        if quant != spec.quant or tuple(value.shape) != spec.shape:
            raise UsageError(f"{spec.name} is {quant} {tuple(value.shape)}, expected {spec.quant} {spec.shape}")
        return value

    def quant_of(self, name: str) -> str | None:
        """Return the quantisation of an existing weight."""
        return getattr(self._weights.get(name), "quant", None)


class SyntheticWeights:
    """Random weights for tests and measurements: Gaussian, scaled by 1/sqrt(K); the same for a seed and a name."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def find(self, spec: WeightSpec) -> Any:
        """Make a weight."""
        rng = np.random.default_rng([self._seed, *spec.name.encode()])
        if spec.quant == "array":
            return (rng.standard_normal(spec.shape) * 0.1).astype(numpy_dtype("bf16"))
        *lead, rows, columns = spec.shape
        values = rng.standard_normal(spec.shape) / np.sqrt(max(columns, 1))
        if spec.quant == "bf16":
            return Bf16Weight(values.astype(numpy_dtype("bf16")))
        matrices = values.astype(np.float32).reshape(-1, rows, columns)
        return stack_experts([nvfp4.quantize(matrix) for matrix in matrices], tuple(lead))

    def quant_of(self, name: str) -> None:
        """Return None: it makes every requested weight."""


def moved_to(memory: Memory, weight: Any | None) -> Any | None:
    """Return a weight with its arrays in a memory. Its global scale stays on the host, which reads it at launch."""
    if weight is None or memory.is_host:
        return weight
    if isinstance(weight, Bf16Weight):
        return Bf16Weight(memory.put(weight.values))
    if isinstance(weight, Nvfp4Weight):
        packed, scales = memory.put(weight.packed), memory.put(weight.block_scale)
        return Nvfp4Weight(packed, scales, weight.global_scale_decode, weight.layout)
    return memory.put(weight)


def stack_experts(matrices: Sequence[Nvfp4Weight], lead: tuple[int, ...]) -> Nvfp4Weight:
    """Stack matrices of one shape along leading axes (without axes: the one matrix itself)."""
    packed = np.stack([matrix.packed for matrix in matrices])
    scales = np.stack([matrix.block_scale for matrix in matrices])
    globals_ = np.array([matrix.global_scale_decode for matrix in matrices], np.float32)
    return Nvfp4Weight(
        packed.reshape(*lead, *packed.shape[1:]), scales.reshape(*lead, *scales.shape[1:]), globals_.reshape(lead)
    )


def fuse_rows(weights: Sequence[Nvfp4Weight]) -> Nvfp4Weight | None:
    """Stack row-major weights of one K. None unless their global scales are equal (or there is none)."""
    scales = {float(weight.global_scale_decode) for weight in weights}
    if len(scales) != 1 or any(weight.layout != nvfp4.ROW_MAJOR for weight in weights):
        return None
    return Nvfp4Weight(
        np.concatenate([weight.packed for weight in weights]),
        np.concatenate([weight.block_scale for weight in weights]),
        weights[0].global_scale_decode,
    )
