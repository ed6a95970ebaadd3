"""A weight source for models: our names, the checkpoint's tensors, and a report of what was used."""

from collections import Counter
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from kernel_muster.models.checkpoints.arrays import read_array
from kernel_muster.models.checkpoints.assembly import Assembly
from kernel_muster.models.checkpoints.checkpoint import Checkpoint
from kernel_muster.models.checkpoints.errors import CheckpointError, MissingTensorError
from kernel_muster.models.checkpoints.modules import ACTIVATION_LEAVES, LogicalWeights, Weight
from kernel_muster.models.checkpoints.names import Names, Recipe
from kernel_muster.models.checkpoints.strangers import Strangers
from kernel_muster.models.weights.source import WeightSpec, stack_experts
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen


@frozen
class WeightReport:
    """Tensors by name: read, scales of activations and cache (not needed: those are BF16), never asked for, missing.

    ``requantised`` are our names of weights that were BF16 and became NVFP4 on request.
    """

    used: tuple[str, ...]
    activation_scales: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    requantised: tuple[str, ...]

    def lines(self) -> list[str]:
        """Say it in a few lines, unused tensors counted by their first name parts."""
        counts = Counter(".".join(name.split(".")[:2]) for name in self.unused)
        found = [f"{len(self.used)} tensors used, {len(self.activation_scales)} activation or cache scales not needed"]
        found += [f"unused: {count} below {where}" for where, count in sorted(counts.items())]
        found += [f"missing: {name}" for name in self.missing]
        return found + [f"requantised BF16 -> NVFP4: {name}" for name in self.requantised]


class CheckpointWeights:
    """Finds the logical weight of each of our names.

    ``requantise`` are wildcard patterns of our names (``layers.*.gdn.*_proj``): only there BF16 becomes NVFP4, through
    :func:`registry.nvfp4.quantize`, and only where NVFP4 is asked for.
    """

    def __init__(self, checkpoint: Checkpoint, requantise: Collection[str] = ()) -> None:
        self._patterns = _patterns(requantise)
        if not isinstance(checkpoint, Checkpoint):
            raise UsageError(f"checkpoint is {type(checkpoint).__name__}, expected what open_checkpoint returns")
        self.checkpoint = checkpoint
        self._names = Names(checkpoint)
        self._strangers = Strangers(checkpoint, self._names.prefix)
        self._logical = LogicalWeights(checkpoint)
        self._assembly = Assembly(self._logical)
        self._matched: set[str] = set()
        self._missing: set[str] = set()
        self._requantised: set[str] = set()

    def find(self, spec: WeightSpec) -> Any:
        """Return a weight; CheckpointError (a UsageError) says what is missing or does not fit."""
        recipe = self._names.recipe(spec.name)
        if recipe is None:
            raise CheckpointError(self.checkpoint.folder, spec.name, "a weight that checkpoints have", "an unknown one")
        self._strangers.check(spec.name)
        try:
            if recipe.kind == "array":
                self._assembly.used.add(recipe.path)
                return read_array(self.checkpoint, recipe.path, spec)
            value = self._assembly.build(recipe, spec)
        except MissingTensorError as error:
            self._missing.add(error.tensor or spec.name)
            raise
        return self._fitted(value, recipe, spec)

    def quant_of(self, name: str) -> str | None:
        """Return the quantisation that :meth:`find` will give: as stored, or nvfp4 where requantising was asked for."""
        recipe = self._names.recipe(name)
        if recipe is None or recipe.kind == "array":
            return None
        is_requantised = self._is_requantised(name)
        stored = self._assembly.quant(recipe)
        return "nvfp4" if stored == "bf16" and is_requantised else stored

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The patterns that no weight which was asked for so far has the name of."""
        return tuple(pattern for pattern in self._patterns if pattern not in self._matched)

    def report(self) -> WeightReport:
        """Say what was used so far."""
        used = self._assembly.used & set(self.checkpoint.entries)
        rest = [name for name in self.checkpoint.entries if name not in used]
        scales = [name for name in rest if name.rpartition(".")[2] in ACTIVATION_LEAVES]
        unused = set(rest).difference(scales)
        lists = (used, scales, unused, self._missing, self._requantised)
        return WeightReport(*(tuple(sorted(names)) for names in lists))

    def _is_requantised(self, name: str) -> bool:
        matching = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        self._matched.update(matching)
        return bool(matching)

    def _fitted(self, value: Weight, recipe: Recipe, spec: WeightSpec) -> Weight:
        is_requantised = self._is_requantised(spec.name)
        if is_requantised and spec.quant == "nvfp4":
            if isinstance(value, Nvfp4Weight):
                got = "nvfp4 weights already"
                raise CheckpointError(self.checkpoint.folder, spec.name, "bf16 weights to requantise, as asked", got)
            value = _requantise(value)
            self._requantised.add(spec.name)
        if value.quant != spec.quant or tuple(value.shape) != spec.shape:
            wanted, got = f"{spec.quant} {spec.shape} for {spec.name}", f"{value.quant} {tuple(value.shape)}"
            advice = "ask for it to be requantised" if (value.quant, spec.quant) == ("bf16", "nvfp4") else ""
            raise CheckpointError(self.checkpoint.folder, recipe.path, wanted, got, advice)
        return value


def _patterns(requantise: Collection[str]) -> tuple[str, ...]:
    if isinstance(requantise, str):  # each letter would be a pattern, and a * mean all weights
        raise UsageError(f"requantise is {requantise!r}, expected several patterns: [{requantise!r}]")
    if not isinstance(requantise, Collection) or not all(isinstance(one, str) for one in requantise):
        raise UsageError(f"requantise is {requantise!r}, expected several patterns, each of them text")
    return tuple(requantise)


def _requantise(weight: Bf16Weight) -> Nvfp4Weight:
    """Return a BF16 weight ``(..., N, K)`` as NVFP4, each matrix with a global scale of its own."""
    *lead, rows, columns = weight.shape
    matrices = np.reshape(weight.values, (-1, rows, columns))
    return stack_experts([nvfp4.quantize(matrix) for matrix in matrices], tuple(lead))
