"""The context for building a layer, and its arrays."""

from dataclasses import replace
from typing import Any

import numpy as np
from kernel_muster.models.memory.memory import Memory
from kernel_muster.models.memory.scratch import Scratch
from kernel_muster.models.weights.layout import WeightPlanner
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.values import frozen


@frozen
class LayerContext:
    """Labelled lookups, the weight planner, scratch, and the most rows of one pass."""

    kernels: Lookups
    planner: WeightPlanner
    scratch: Scratch
    max_rows: int

    def for_layer(self, label: str) -> "LayerContext":
        """Return this context for one layer: lookups, weights and scratch carry its label."""
        return replace(self, kernels=self.kernels.for_layer(label))

    @property
    def label(self) -> str:
        """The layer's label: ``layers.3.attn``."""
        return self.kernels.layer

    @property
    def memory(self) -> Memory:
        """Where weights and activations lie."""
        return self.planner.memory

    @property
    def levers(self) -> Levers:
        """The frozen levers."""
        return self.kernels.levers

    @property
    def arch(self) -> str:
        """The architecture for thresholds."""
        arch = self.kernels.target.arch
        return CPU if arch is None else str(arch)

    def spec(self, name: str, rows: int, columns: int, quant: str) -> WeightSpec:
        """Describe a projection ``(N, K)`` of this layer."""
        return WeightSpec(f"{self.label}.{name}", (rows, columns), quant)

    def stored(self, name: str, default: str) -> str:
        """Return the stored quantisation of a weight, else the default. UsageError if no kernel supports it."""
        stored = self.planner.source.quant_of(f"{self.label}.{name}") or default
        if stored not in ("nvfp4", "bf16"):
            raise UsageError(
                f"{self.label}.{name} is quantised as {stored}, expected nvfp4 or bf16; nothing is requantised silently"
            )
        return stored

    def array(self, name: str, *shape: int) -> Any | None:
        """Return a small BF16 array of this layer, or None in a plan."""
        return self.planner.array(f"{self.label}.{name}", *shape)

    def plan_scratch(self, user: str, buffer: str, size_bytes: int, steps: tuple[int, int]) -> None:
        """Plan a use of scratch in this layer."""
        self.scratch.plan.use(self.label, user, buffer, size_bytes, steps)


def new_rows(x: Any, columns: int) -> Any:
    """Return an uninitialised array ``(M, columns)`` of x's type, for M rows of x."""
    return np.empty_like(x, shape=(x.shape[0], columns))


def needed(array: Any | None, name: str) -> Any:
    """Return an array that a plan lacks. UsageError in a plan."""
    if array is None:
        raise UsageError(f"{name}: the model was planned without weights and cannot compute")
    return array
