"""Dimensions of a model from its manifest: the only module here that knows the manifest's tables."""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from kernel_muster.MODEL_toml.schema import AttentionTable, GdnTable, ModelTable, MoeTable, RopeTable
from kernel_muster.models.dims import (
    AttentionDims,
    DrafterDims,
    GdnDims,
    LayerKind,
    ModelDims,
    MoeDims,
    RopeDims,
    WeightQuant,
    YarnDims,
)
from kernel_muster.registry.errors import UsageError

_LAYER_KINDS: dict[str, LayerKind] = {"full": "attn", "gdn": "gdn"}
_DFLASH_KEYS = ("gamma", "window", "mask_token_id")


class HasModelTable(Protocol):
    """A builder's view of a manifest. A drafter's builder also reads its ``dflash`` table."""

    @property
    def model(self) -> ModelTable:
        """The ``[model]`` table."""


def table_line(manifest: HasModelTable, error: UsageError) -> str:
    """Return ``file:line`` of the first key of an error, else that of the ``[model]`` table.

    It is empty for a manifest without a file.
    """
    where = getattr(manifest, "where", None)
    if not callable(where):
        return ""
    _, _, problems = str(error).partition("cannot be built: ")
    for name in re.findall(r"[a-z][a-z0-9_.]*", problems):
        parts = tuple(name.removeprefix("model.").split("."))
        found = (path for path in getattr(manifest, "lines", {}) if path[:1] == ("model",) and path[1:] != ())
        if path := next((path for path in found if path[-len(parts) :] == parts), ()):
            return str(where(*path))
    return str(where("model"))


def model_dims(manifest: HasModelTable) -> ModelDims:
    """Read a manifest's dimensions. UsageError lists all missing or unsupported keys."""
    table = manifest.model
    problems = [f"{path} is missing" for path in table.missing_dimensions]
    problems += _unsupported(table)
    if problems:
        raise UsageError(f"{table.name} cannot be built: {'; '.join(problems)}")
    dims = _dims(table, getattr(manifest, "dflash", {}))
    if problems := dims.problems():
        raise UsageError(f"{table.name} cannot be built: {'; '.join(problems)}")
    return dims


def _unsupported(table: ModelTable) -> list[str]:
    found = []
    if table.quant not in ("nvfp4", "bf16"):
        found.append(f"quant is {table.quant}, the layers take nvfp4 and bf16 (nothing is requantised silently)")
    if table.ffn == "moe" and table.quant == "bf16":
        found.append("quant is bf16, the expert kernels take nvfp4")
    if table.moe is not None and not table.moe.renormalise:
        found.append("moe.renormalise is false, the routing kernels scale the chosen weights to sum 1")
    return found


def _dims(table: ModelTable, dflash: Mapping[str, Any]) -> ModelDims:
    quant: WeightQuant = "bf16" if table.quant == "bf16" else "nvfp4"
    return ModelDims(
        name=table.name,
        hidden=table.hidden_size or 0,
        vocab=table.vocab_size or 0,
        layer_kinds=tuple(_LAYER_KINDS[kind] for kind in table.layer_kinds),
        ffn=table.ffn or "none",
        quant=quant,
        rms_eps=table.rms_norm_eps or 0.0,
        norm_weight_offset=1.0 if table.rms_norm_zero_centred else 0.0,
        attention=_attention(table.attention, quant, table.rope) if table.attention else None,
        gdn=_gdn(table.gdn) if table.gdn else None,
        intermediate=table.intermediate_size or 0,
        moe=_moe(table.moe) if table.moe else None,
        mtp_layers=table.mtp.layers if table.mtp else 0,
        mtp_quant=quant,
        is_tied=table.tie_word_embeddings,
        drafter=_drafter(table.name, dflash) if dflash else None,
        # a drafter keeps a window of its target's context, which has the limit
        context=None if dflash else table.context_length,
    )


def _attention(table: AttentionTable, quant: WeightQuant, rope: RopeTable | None) -> AttentionDims:
    stored: WeightQuant = quant if table.weights == "native" else "bf16"
    rotary = None if rope is None else _rope(rope, table.head_dim)
    return AttentionDims(table.heads, table.kv_heads, table.head_dim, table.gated, stored, table.qk_norm, rotary)


def _rope(table: RopeTable, head_dim: int) -> RopeDims:
    yarn = None
    if table.yarn_factor is not None and table.yarn_original_context is not None:
        yarn = YarnDims(table.yarn_factor, table.yarn_original_context)
    rotated = int(head_dim * table.partial_factor)
    return RopeDims(table.theta, rotated, table.mrope_sections, table.mrope_interleaved, yarn)


def _gdn(table: GdnTable) -> GdnDims:
    return GdnDims(table.key_heads, table.key_dim, table.value_heads, table.value_dim, table.conv_width)


def _moe(table: MoeTable) -> MoeDims:
    shared = table.shared_intermediate_size or 0
    return MoeDims(table.experts, table.top_k, table.intermediate_size, shared, table.router)


def _drafter(name: str, table: Mapping[str, Any]) -> DrafterDims:
    """Read a ``[dflash]`` table. UsageError lists all missing keys and wrong types."""
    problems = [
        f"dflash.{key} is {table.get(key)!r}, expected an integer"
        for key in _DFLASH_KEYS
        if not _is_int(table.get(key))
    ]
    layers = table.get("target_layer_ids")
    if not isinstance(layers, list | tuple) or not all(map(_is_int, layers)):
        problems.append(f"dflash.target_layer_ids is {layers!r}, expected a list of integers")
    if not isinstance(table.get("target"), str):
        problems.append(f"dflash.target is {table.get('target')!r}, expected the name of a model")
    if problems or layers is None:
        raise UsageError(f"{name} cannot be built: {'; '.join(problems)}")
    return DrafterDims(table["target"], table["gamma"], table["window"], table["mask_token_id"], tuple(layers))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
