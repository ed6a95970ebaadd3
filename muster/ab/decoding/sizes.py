"""Models at reduced size: the same layers, kernels and policies, with dimensions that the host decodes in moments.

A reduced model keeps everything that decides the lookups: kinds of layers, gating, norms, routing, rotary positions,
the multi-token-prediction head, quantisation. Only the tiles of a deep K need the full width. A reduced model gives no
information about quality or speed at full size.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.schema import ModelTable
from kernel_muster.registry.errors import UsageError

Limits = Mapping[str, Mapping[str, int]]
#: Largest values at reduced size, by table. Depths stay multiples of 16 (the NVFP4 group). Sizes of heads and states
#: are the smallest that all kernels of attention and of the delta rule support. Those of experts fit the K step of 64.
#: A vocabulary of 256 holds the bytes of any text.
HOST: Limits = {
    "": {"hidden_size": 64, "vocab_size": 256, "intermediate_size": 128},
    "attention": {"heads": 4, "kv_heads": 2, "head_dim": 128},
    "gdn": {"key_heads": 1, "key_dim": 128, "value_heads": 2, "value_dim": 32},
    "moe": {"experts": 8, "top_k": 2, "intermediate_size": 64, "shared_intermediate_size": 64},
}
#: On a device, rows begin at multiples of 16 bytes, and states have the width of every model.
DEVICE: Limits = {
    "": {"hidden_size": 256, "vocab_size": 512, "intermediate_size": 512},
    "attention": {"heads": 4, "kv_heads": 2, "head_dim": 128},
    "gdn": {"key_heads": 2, "key_dim": 128, "value_heads": 8, "value_dim": 128},
    "moe": {"experts": 16, "top_k": 4, "intermediate_size": 128, "shared_intermediate_size": 128},
}
#: A drafter's block and context at reduced size: a run of a few dozen tokens exceeds this window.
_DRAFTS, _WINDOW = 4, 32


def reduced(manifest: Manifest, limits: Limits = HOST) -> Manifest:
    """Return a manifest whose model is small: one round of its layer pattern, and narrow layers."""
    table = manifest.model.model_dump()
    for name, most in limits.items():
        part = table[name] if name else table
        if part is not None:
            _limit(part, most)
    if table["attention"] is not None and table["rope"] is not None:
        _fit_sections(table["rope"], table["attention"]["head_dim"])
    if table["layer_pattern"] is not None:
        table["num_layers"] = len(table["layer_pattern"])
    return _with_table(manifest, table)


def with_layers(manifest: Manifest, layers: int) -> Manifest:
    """Return a manifest with fewer layers, of full width. UsageError if the pattern does not allow it."""
    pattern, most = manifest.model.layer_pattern or (), manifest.model.num_layers or 0
    step = max(len(pattern), 1)
    if not 0 < layers <= most or layers % step:
        raise UsageError(f"{manifest.name} with {layers} layers: expected a multiple of {step} up to {most}")
    return _with_table(manifest, manifest.model.model_dump() | {"num_layers": layers})


def sizing(*, is_reduced: bool, layers: int | None, limits: Limits = HOST) -> Callable[[Manifest], Manifest]:
    """Return the size of models: with a number of layers, reduced, or as in their manifests."""

    def size(manifest: Manifest) -> Manifest:
        manifest = manifest if layers is None else with_layers(manifest, layers)
        return reduced(manifest, limits) if is_reduced else manifest

    return size


def fitted_drafter(manifest: Manifest, full: Manifest, sized: Manifest, limits: Limits | None) -> Manifest:
    """Return a drafter's manifest that fits its target's size as the original fits the full size.

    Beside fewer layers it reads layers at the same relative depth. ``limits`` are those of a reduced target: then the
    drafter is reduced too, with few drafts and a short window. Malformed manifests are left to its builder.
    """
    dflash = dict(manifest.dflash)
    layers, last = len(sized.model.layer_kinds), len(full.model.layer_kinds) - 1
    reads = dflash.get("target_layer_ids")
    if layers <= last and isinstance(reads, list | tuple) and all(type(one) is int for one in reads):
        dflash["target_layer_ids"] = sorted({round(at * (layers - 1) / last) for at in reads})
    if limits is not None:
        manifest = reduced(manifest, limits)
        small = {"gamma": _DRAFTS, "window": _WINDOW, "mask_token_id": (sized.model.vocab_size or 1) - 1}
        dflash |= {name: min(dflash[name], most) for name, most in small.items() if type(dflash.get(name)) is int}
    return replace(manifest, document=manifest.document.model_copy(update={"dflash": dflash}))


def size_text(full: Manifest, sized: Manifest) -> str:
    """Return the reductions, dimension by dimension. Empty for a model of full size."""
    before, after = _flat(full.model.model_dump()), _flat(sized.model.model_dump())
    changed = [f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    return ", ".join(changed)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return found


def _limit(table: dict[str, Any], most: Mapping[str, int]) -> None:
    for name, value in most.items():
        if table[name] is not None:
            table[name] = min(table[name], value)


def _fit_sections(rope: dict[str, Any], head_dim: int) -> None:
    """Divide the frequencies of a smaller head among the sections in the old proportions."""
    sections = rope["mrope_sections"]
    if not sections:
        return
    pairs = int(head_dim * rope["partial_factor"]) // 2
    shares = [pairs * section / sum(sections) for section in sections]
    parts = [int(share) for share in shares]
    for at in sorted(range(len(parts)), key=lambda at: parts[at] - shares[at])[: pairs - sum(parts)]:
        parts[at] += 1
    rope["mrope_sections"] = tuple(parts)


def _with_table(manifest: Manifest, table: dict[str, Any]) -> Manifest:
    document = manifest.document.model_copy(update={"model": ModelTable.model_validate(table)})
    return replace(manifest, document=document)
