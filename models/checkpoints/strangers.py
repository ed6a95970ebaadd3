"""Tensors that would change a result and that no layer reads: the bias of a norm, attention sinks, a second form.

A layer of the family that is served here has tensors of known names. Whatever else lies below a layer that is read, or
beside the embedding and the last norm, belongs to another model: left out in silence it would give other tokens. Stacks
that no layer asks for anything of (a vision tower, a head that is not built) are reported, and not judged.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from kernel_muster.models.checkpoints.checkpoint import Checkpoint
from kernel_muster.models.checkpoints.errors import CheckpointError
from kernel_muster.models.checkpoints.modules import ACTIVATION_LEAVES
from kernel_muster.models.checkpoints.names import HEADS, LAYER

_NORMS = r"(?:input|post_attention)_layernorm\.weight"
# Any leaf of a module: those are judged when it is read.
_LEAF = r"\.[^.]+"
#: What each part of a layer may hold; what lies where the layer's other part does is that one's to judge.
_PARTS = {
    "attn": rf"mlp\..+|{_NORMS}|self_attn\.(?:[qkvo]_proj{_LEAF}|[qk]_norm\.weight)",
    "gdn": rf"mlp\..+|{_NORMS}|linear_attn\.(?:(?:in_proj_(?:qkvz|qkv|z|ba|b|a)|out_proj){_LEAF}"
    r"|(?:conv1d|norm)\.weight|A_log|dt_bias)",
    "ffn": rf"(?!mlp\.).+|mlp\.(?:gate|up|down)_proj{_LEAF}",
    "moe": rf"(?!mlp\.).+|mlp\.(?:gate{_LEAF}|experts\.(?:\d+\.(?:gate|up|down)_proj{_LEAF}|gate_up_proj|down_proj)"
    rf"|shared_expert\.(?:gate|up|down)_proj{_LEAF}|shared_expert_gate\.weight)",
}
#: Weights that are fused or in parts: one form and the other.
_FORMS = {
    "gdn": ((rf"linear_attn\.in_proj_qkvz{_LEAF}", rf"linear_attn\.in_proj_(?:qkv|z){_LEAF}"),
            (rf"linear_attn\.in_proj_ba{_LEAF}", rf"linear_attn\.in_proj_[ba]{_LEAF}")),
    "moe": ((r"mlp\.experts\.gate_up_proj", rf"mlp\.experts\.\d+\.(?:gate|up)_proj{_LEAF}"),
            (r"mlp\.experts\.down_proj", rf"mlp\.experts\.\d+\.down_proj{_LEAF}")),
}  # fmt: skip
#: What may stand beside a stack's layers. A vision tower may hang below the text model's prefix.
_TOPS = {
    "text": r"(?:embed_tokens|norm)\.weight|visual\..+",
    "mtp": rf"fc{_LEAF}|(?:norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.weight",
    "drafter": rf"fc{_LEAF}|(?:norm|hidden_norm)\.weight",
}
# Follows from config.json: files of older releases hold it, and Hugging Face does not read it either.
_COMPUTED = ".inv_freq"
_MTP = "mtp."
_IN_LAYER = re.compile(r"layers\.\d+\.")


class Strangers:
    """Judges what lies beside a weight of ours, once for each part of a layer and each stack's top."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint, self._prefix = checkpoint, prefix
        self._judged: set[tuple[str, str]] = set()
        self._is_tie_judged = False

    def check(self, name: str) -> None:
        """Judge the surroundings of the weight that we call so; CheckpointError names a tensor that nothing reads."""
        stack, kind = self._prefix, "text" if self._prefix else "drafter"
        if name.startswith(_MTP):
            stack, kind = _MTP, "mtp"
        self._judge(stack, kind, _TOPS[kind])
        if name in ("lm_head.weight", "embedding.table"):
            self._judge_tied()
        if name == "lm_head.weight":
            self._judge_heads()
        elif match := LAYER.fullmatch(name):
            self._judge(f"{stack}layers.{match[2]}.", match[3], _PARTS[match[3]])

    @cached_property
    def _below(self) -> dict[str, list[str]]:
        """The tensors of each layer, and of each stack beside its layers, without the prefix that they share."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self._checkpoint.entries:
            for stack in {self._prefix, _MTP}:
                if name.startswith(stack):
                    layer = _IN_LAYER.match(name, len(stack))
                    start = len(stack) if layer is None else layer.end()
                    found[name[:start]].append(name[start:])
        return found

    def _judge(self, scope: str, part: str, known: str) -> None:
        if (scope, part) in self._judged:
            return
        names, pattern = self._below.get(scope, ()), re.compile(known)
        for name in names:
            if not pattern.fullmatch(name) and not _is_harmless(name) and not self._is_head(scope + name):
                self._refuse(scope + name)
        for one, other in _FORMS.get(part, ()):
            if (whole := _first(one, names)) and (rest := _first(other, names)):
                file = self._checkpoint.entry(scope + rest).file
                raise CheckpointError(file, scope + rest, "one form of a weight", f"{scope}{whole} beside it")
        self._judged.add((scope, part))

    def _judge_heads(self) -> None:
        """One head is read; what another one has, or one without a weight, is not."""
        held = [module for module in HEADS if self._checkpoint.leaves(module)]
        for module in held:
            leaves = self._checkpoint.leaves(module)
            if module != held[0] or {"weight", "weight_packed"}.isdisjoint(leaves):
                self._refuse(f"{module}.{leaves[0]}")

    def _judge_tied(self) -> None:
        """Refuse a head beside an embedding that the config ties it to, unless both have the same values."""
        table = f"{self._prefix}embed_tokens.weight"
        if self._checkpoint.hf.tie.value is not True or self._is_tie_judged:
            return
        for module in HEADS:
            for leaf in self._checkpoint.leaves(module):
                name = f"{module}.{leaf}"
                if leaf != "weight" or not self._has_same_bytes(name, table):
                    file = self._checkpoint.entry(name).file
                    wanted = f"the values of {table}, to which config.json ties the head"
                    raise CheckpointError(file, name, wanted, "others", "correct tie_word_embeddings in config.json")
        self._is_tie_judged = True

    def _has_same_bytes(self, name: str, other: str) -> bool:
        one, two = self._checkpoint.entry(name), self._checkpoint.entry(other)
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        first, second = (self._checkpoint.tensor(each.name, (one.dtype,)) for each in (one, two))
        return bool(np.array_equal(first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8)))

    def _is_head(self, name: str) -> bool:
        return name.rpartition(".")[0] in HEADS

    def _refuse(self, name: str) -> None:
        file = self._checkpoint.entry(name).file
        raise CheckpointError(file, name, "only tensors that the model's layers read", "a tensor not read here")


def _first(pattern: str, names: Sequence[str]) -> str | None:
    return next((name for name in names if re.fullmatch(pattern, name)), None)


def _is_harmless(name: str) -> bool:
    return name.rpartition(".")[2] in ACTIVATION_LEAVES or name.endswith(_COMPUTED)
