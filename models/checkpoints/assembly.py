"""Logical weights that are made of several modules: all experts, and the gated delta net's fused inputs."""

from functools import cached_property

import numpy as np
from kernel_muster.models.checkpoints.errors import CheckpointError
from kernel_muster.models.checkpoints.finite import check_finite
from kernel_muster.models.checkpoints.fusing import fuse, fuse_problem, take_rows
from kernel_muster.models.checkpoints.gdn_rows import GdnHeads, Rows, gdn_heads
from kernel_muster.models.checkpoints.modules import LogicalWeights, Weight
from kernel_muster.models.checkpoints.names import Recipe
from kernel_muster.models.checkpoints.quant_config import PLAIN
from kernel_muster.models.weights.source import WeightSpec, stack_experts
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from kernel_muster.registry.contract.weights import Bf16Weight

_GATE_UP = "gate_up_proj"


class Assembly:
    """Builds recipes out of modules, and remembers the tensors that it read."""

    def __init__(self, logical: LogicalWeights) -> None:
        self._logical, self._checkpoint = logical, logical.checkpoint
        self.used: set[str] = set()

    def build(self, recipe: Recipe, spec: WeightSpec) -> Weight:
        """Return the weight; CheckpointError says what is missing or does not belong together."""
        if recipe.kind == "experts":
            return self._experts(recipe.path, spec)
        modules = self._modules(recipe)
        if recipe.kind == "module":
            return self._load(modules[0])
        parts = {module: self._load(module) for module in modules}
        if problem := fuse_problem(parts):
            names = " | ".join(module.rpartition(".")[2] for module in modules)
            raise CheckpointError(self._checkpoint.folder, recipe.path + names, "parts of one weight", problem)
        whole = fuse(parts)
        rows = self._row_order(recipe)
        if rows is None:
            return whole
        if len(rows) != whole.shape[0]:
            got = f"{whole.shape[0]} rows"
            raise CheckpointError(self._checkpoint.folder, recipe.path, f"{len(rows)} rows, as config.json says", got)
        return take_rows(whole, rows)

    def quant(self, recipe: Recipe) -> str | None:
        """Return how a weight is stored, None if it is not there; ``bf16 and nvfp4`` if its parts differ."""
        if recipe.kind == "experts":
            base, leaf = _split(recipe.path)
            if self._fused_experts(base, leaf) in self._checkpoint.entries:
                return PLAIN
            modules: tuple[str, ...] = (f"{base}.0.{leaf}",)
        else:
            modules = self._modules(recipe)
        found = {self._logical.quant(module) for module in modules if self._logical.has(module)}
        return " and ".join(sorted(found)) or None

    @cached_property
    def _heads(self) -> GdnHeads:
        return gdn_heads(self._checkpoint)

    def _load(self, module: str) -> Weight:
        weight = self._logical.load(module)
        self.used.update(self._logical.tensors(module))
        return weight

    def _modules(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the modules that hold a weight's rows: the fused one if it is there."""
        if recipe.kind == "module":
            return (recipe.path,)
        fused, parts = ("in_proj_qkvz", ("qkv", "z")) if recipe.kind == "qkvz" else ("in_proj_ba", ("b", "a"))
        if self._logical.has(recipe.path + fused):
            return (recipe.path + fused,)
        return tuple(f"{recipe.path}in_proj_{part}" for part in parts)

    def _row_order(self, recipe: Recipe) -> Rows | None:
        is_fused = len(self._modules(recipe)) == 1
        if recipe.kind == "qkvz":
            return None if is_fused else self._heads.grouped()
        return self._heads.ungrouped_ba() if is_fused else None

    def _experts(self, path: str, spec: WeightSpec) -> Weight:
        base, leaf = _split(path)
        fused = self._fused_experts(base, leaf)
        if fused in self._checkpoint.entries:
            return self._from_fused(fused, leaf)
        count = spec.shape[0]
        if self._logical.has(f"{base}.{count}.{leaf}"):
            got = f"one of number {count}"
            raise CheckpointError(self._checkpoint.folder, base, f"experts 0 to {count - 1}", got)
        experts = [self._load(f"{base}.{index}.{leaf}") for index in range(count)]
        shapes = {expert.shape for expert in experts}
        quants = {expert.quant for expert in experts}
        if len(shapes) != 1 or len(quants) != 1:
            got = f"shapes {sorted(shapes)}, quantised as {sorted(quants)}"
            raise CheckpointError(self._checkpoint.folder, f"{base}.*.{leaf}", "experts that are alike", got)
        matrices = [expert for expert in experts if isinstance(expert, Nvfp4Weight)]
        if matrices:
            return stack_experts(matrices, (count,))
        return Bf16Weight(np.stack([expert.values for expert in experts if isinstance(expert, Bf16Weight)]))

    def _fused_experts(self, base: str, leaf: str) -> str:
        """Name the tensor of all experts: gate and up in one ``(E, 2I, H)``, down ``(E, H, I)``."""
        return f"{base}.{leaf if leaf == 'down_proj' else _GATE_UP}"

    def _from_fused(self, name: str, leaf: str) -> Bf16Weight:
        """Read BF16 experts that are one tensor; quantised ones in that form have no format that we know."""
        expected = self._logical.config.expected(name)
        entry = self._checkpoint.entry(name)
        if expected.is_certain and expected.quant != PLAIN:
            raise CheckpointError(entry.file, name, f"{expected.quant}, because {expected.origin}", entry.described())
        values = self._checkpoint.tensor(name, ("BF16",))
        if values.ndim != 3 or (name.endswith(_GATE_UP) and values.shape[1] % 2):
            raise CheckpointError(entry.file, name, "BF16 [experts, N, K]", entry.described())
        check_finite(self._checkpoint, name, values)
        self.used.add(name)
        half = values.shape[1] // 2
        rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}.get(leaf, slice(None))
        return Bf16Weight(np.ascontiguousarray(values[:, rows]))


def _split(path: str) -> tuple[str, str]:
    base, _, leaf = path.rpartition(".")
    return base, leaf
