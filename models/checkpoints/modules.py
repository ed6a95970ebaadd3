"""Logical weights by module name: what the config says and what the tensors are must agree, or nothing is read."""

from collections.abc import Mapping

from kernel_muster.models.checkpoints.checkpoint import Checkpoint
from kernel_muster.models.checkpoints.errors import CheckpointError, UnsupportedQuantError
from kernel_muster.models.checkpoints.finite import check_finite
from kernel_muster.models.checkpoints.packed import read_packed
from kernel_muster.models.checkpoints.quant_config import PLAIN, Style, quant_config
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.values import frozen

Weight = Nvfp4Weight | Bf16Weight
#: What is read of a module, by how its tensors are stored; None: plain. A scale beside a plain weight is a stranger.
_READ: Mapping[Style | None, tuple[str, ...]] = {
    None: ("weight",),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
#: Scales of quantised activations and of a quantised KV cache: activations and cache are BF16 here.
ACTIVATION_LEAVES = frozenset({"input_scale", "input_global_scale", "q_scale", "k_scale", "v_scale"})
# Projections that are no torch.nn.Linear in the models at hand, so that the target "Linear" does not mean them.
_NOT_LINEAR = ("mlp.gate", "embed_tokens")
_PLAIN_DTYPES = {"BF16": PLAIN, "F32": "f32", "F16": "f16"}
_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")


@frozen
class Found:
    """How a module's tensors are stored, whatever the config says."""

    quant: str
    style: Style | None
    tensor: str


class LogicalWeights:
    """Reads modules of a checkpoint as NVFP4 or BF16 weights ``(N, K)``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = quant_config(checkpoint)

    def has(self, module: str) -> bool:
        """Whether a module has a weight."""
        return not {"weight", "weight_packed"}.isdisjoint(self.checkpoint.leaves(module))

    def tensors(self, module: str) -> tuple[str, ...]:
        """Name the tensors that a module's logical weight is read from."""
        return tuple(f"{module}.{leaf}" for leaf in _READ[self._found(module).style])

    def quant(self, module: str) -> str:
        """Return nvfp4, bf16, or a format that cannot be read; CheckpointError if config and tensors differ."""
        return self._agreed(module).quant

    def load(self, module: str) -> Weight:
        """Read a module; UnsupportedQuantError if its format is not ours, CheckpointError if something is not right."""
        found = self._agreed(module)
        checkpoint = self.checkpoint
        if found.quant not in ("nvfp4", PLAIN):
            origin = self.config.expected(module).origin
            raise UnsupportedQuantError(checkpoint.entry(found.tensor).file, found.tensor, found.quant, origin)
        self._check_leaves(module, found.style)
        if found.style is not None and found.quant == "nvfp4":
            return read_packed(checkpoint, module, found.style)
        entry = checkpoint.entry(found.tensor)
        if len(entry.shape) != 2:
            raise CheckpointError(entry.file, found.tensor, "BF16 [N, K]", entry.described())
        values = checkpoint.tensor(found.tensor, ("BF16",))
        check_finite(checkpoint, found.tensor, values)
        return Bf16Weight(values)

    def _agreed(self, module: str) -> Found:
        """Return how a module is stored, if the config says the same."""
        found, expected = self._found(module), self.config.expected(module)
        file = self.checkpoint.entry(found.tensor).file
        is_plain = found.quant in _PLAIN_DTYPES.values()
        if expected.quant not in ("nvfp4", PLAIN) and not is_plain:
            # The config names a format that is not ours: its name says more than the tensors'.
            return Found(expected.quant, None, found.tensor)
        may_be_plain = expected.quant == PLAIN or (not expected.is_certain and module.endswith(_NOT_LINEAR))
        if found.quant != expected.quant and not (is_plain and may_be_plain):
            got = f"{found.quant} ({self.checkpoint.entry(found.tensor).described()})"
            raise CheckpointError(file, found.tensor, f"{expected.quant}, because {expected.origin}", got)
        if found.style is not None and found.style != self.config.style:
            got = f"the tensors of {found.style}"
            raise CheckpointError(file, found.tensor, f"the tensors of {self.config.style}", got)
        return found

    def _found(self, module: str) -> Found:
        leaves = frozenset(self.checkpoint.leaves(module))
        if {"weight", "weight_packed"} <= leaves:
            name = f"{module}.weight"
            file = self.checkpoint.entry(name).file
            raise CheckpointError(file, name, "one weight of a module", "weight_packed beside it")
        name = f"{module}.weight_packed" if "weight_packed" in leaves else f"{module}.weight"
        dtype = self.checkpoint.entry(name).dtype
        if dtype == "U8":
            style: Style = "compressed-tensors" if name.endswith("_packed") else "modelopt"
            return Found(self._four_bit(module, style, leaves), style, name)
        if dtype in _FP8_DTYPES:
            return Found("fp8", None, name)
        return Found(_PLAIN_DTYPES.get(dtype, dtype), None, name)

    def _four_bit(self, module: str, style: Style, leaves: frozenset[str]) -> str:
        """Tell NVFP4 from MXFP4, whose scales are E8M0 bytes without a global one."""
        scale = self.checkpoint.entries.get(f"{module}.weight_scale")
        global_leaf = "weight_global_scale" if style == "compressed-tensors" else "weight_scale_2"
        is_mxfp4 = scale is not None and scale.dtype in ("U8", "F8_E8M0") and global_leaf not in leaves
        return "mxfp4" if is_mxfp4 else "nvfp4"

    def _check_leaves(self, module: str, style: Style | None) -> None:
        """Refuse what would change the result and is not read: a bias, a scale of another style, zero points."""
        for leaf in self.checkpoint.leaves(module):
            if leaf not in ACTIVATION_LEAVES.union(_READ[style]):
                name, known = f"{module}.{leaf}", ", ".join(_READ[style])
                raise CheckpointError(self.checkpoint.entry(name).file, name, f"only {known}", "a tensor not read here")
