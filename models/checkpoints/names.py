"""How checkpoints of the qwen3_5 and qwen3_6_moe kind name what our layers call ``layers.3.attn.q_proj``.

Text model at ``model.``, in multimodal checkpoints at ``model.language_model.`` or ``language_model.model.``. GDN
inputs come as ``in_proj_qkv`` and ``in_proj_z`` with ``in_proj_b`` and ``in_proj_a``, or fused and grouped by key head
as ``in_proj_qkvz`` with ``in_proj_ba`` (Qwen3-Next). Experts come one by one, or all in one tensor. A DFlash drafter's
checkpoint begins at ``layers.`` and has neither embedding nor head: those are its target's.
"""

import re
from collections.abc import Collection
from typing import Literal

from kernel_muster.MODEL_toml.hf.module_patterns import TEXT_PREFIXES
from kernel_muster.models.checkpoints.checkpoint import Checkpoint
from kernel_muster.models.checkpoints.errors import CheckpointError
from kernel_muster.registry.values import frozen

# module: one projection. qkvz, ba: the GDN's inputs. experts: a projection of every expert. array: a plain tensor.
Kind = Literal["module", "qkvz", "ba", "experts", "array"]
#: Our names of what lies in a layer: stack, index, part, the rest.
LAYER = re.compile(r"(layers|mtp)\.(\d{1,6})\.(attn|gdn|ffn|moe)\.(.+)")
_MODULES = {
    "attn": {f"{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
    "gdn": {"out_proj": "linear_attn.out_proj"},
    "ffn": {f"{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "moe": {"router": "mlp.gate"}
    | {f"shared_expert.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
_NORMS = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}
_ARRAYS = {
    "attn": _NORMS | {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"},
    "gdn": _NORMS
    | {
        "norm": "linear_attn.norm.weight",
        "conv1d": "linear_attn.conv1d.weight",
        "a_log": "linear_attn.A_log",
        "dt_bias": "linear_attn.dt_bias",
    },
    "ffn": {},
    "moe": {"shared_expert_gate": "mlp.shared_expert_gate.weight"},
}
_EXPERTS = {f"experts.{name}_proj": f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")}
_TOP_ARRAYS = {"embedding.table": "embed_tokens.weight", "final_norm.weight": "norm.weight"}
# The multi-token-prediction head lies beside the text model, not in it.
_MTP_ARRAYS = {
    "mtp.embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "mtp.hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm.weight": "mtp.norm.weight",
}
_DRAFTER = {"context.norm.weight": "hidden_norm.weight"}
#: Modules that an LM head of its own may be.
HEADS = ("lm_head", "language_model.lm_head", "model.language_model.lm_head")


@frozen
class Recipe:
    """What one of our weights is read from. ``path`` is a module, a tensor (array), or ``...experts.gate_proj``."""

    kind: Kind
    path: str


class Names:
    """The names of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.prefix = _text_prefix(checkpoint)

    def recipe(self, name: str) -> Recipe | None:
        """Return what a weight of ours is read from, or None if no checkpoint has such a thing."""
        if name == "lm_head.weight":
            return Recipe("module", self._lm_head())
        if name in _TOP_ARRAYS:
            return Recipe("array", self.prefix + _TOP_ARRAYS[name])
        if name in _MTP_ARRAYS:
            return Recipe("array", _MTP_ARRAYS[name])
        if name in _DRAFTER:
            return Recipe("array", _DRAFTER[name])
        if name in ("mtp.fc", "context.fc"):
            return Recipe("module", name.removeprefix("context."))
        match = LAYER.fullmatch(name)
        if match is None:
            return None
        where, index, part, rest = match.groups()
        stack = "mtp." if where == "mtp" else self.prefix
        return _layer_recipe(f"{stack}layers.{index}.", part, rest)

    def _lm_head(self) -> str:
        """The head's own weight, else the embedding's where the config ties them and no level of it contradicts."""
        for module in HEADS:
            if _has_weight(self._checkpoint.leaves(module)):
                return module
        tie = self._checkpoint.hf.tie
        if tie.value is not True:
            return HEADS[0]
        if tie.is_contested:
            wanted, got = f"a head: the levels of config.json disagree ({tie})", "none"
            raise CheckpointError(self._checkpoint.folder, f"{HEADS[0]}.weight", wanted, got)
        return f"{self.prefix}embed_tokens"


def _layer_recipe(layer: str, part: str, rest: str) -> Recipe | None:
    if rest in _MODULES[part]:
        return Recipe("module", layer + _MODULES[part][rest])
    if rest in _ARRAYS[part]:
        return Recipe("array", layer + _ARRAYS[part][rest])
    if part == "moe" and rest in _EXPERTS:
        return Recipe("experts", layer + _EXPERTS[rest])
    if part == "gdn" and rest == "qkvz_proj":
        return Recipe("qkvz", f"{layer}linear_attn.")
    if part == "gdn" and rest == "ba_proj":
        return Recipe("ba", f"{layer}linear_attn.")
    return None


def _text_prefix(checkpoint: Checkpoint) -> str:
    found = [prefix for prefix in TEXT_PREFIXES if _has_weight(checkpoint.leaves(f"{prefix}embed_tokens"))]
    if len(found) == 1:
        return found[0]
    if not found and {"hidden_norm.weight", "fc.weight"} <= checkpoint.entries.keys():
        return ""
    wanted = "one text model, at " + " or ".join(f"{prefix}embed_tokens" for prefix in TEXT_PREFIXES)
    raise CheckpointError(checkpoint.folder, None, wanted, f"{len(found)} of them")


def _has_weight(leaves: Collection[str]) -> bool:
    return "weight" in leaves or "weight_packed" in leaves
