"""Shapes of a measurement: the projections of a model, or ``NxK`` as given."""

import re
from collections.abc import Iterable

from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.registry.errors import UsageError

Shape = tuple[str, int, int]


def shapes_of(manifests: Iterable[Manifest]) -> list[Shape]:
    """Return ``(name, N, K)`` of models' NVFP4 projections, as launched by their layers."""
    return [
        (f"{one.name} {role}", features, depth) for one in manifests for role, features, depth in projections_of(one)
    ]


def projections_of(manifest: Manifest) -> list[Shape]:
    """Return ``(role, N, K)`` of one model's NVFP4 projections."""
    model = manifest.model
    hidden = model.hidden_size
    if hidden is None:
        raise UsageError(f"{manifest.name}: its manifest gives no dimensions")
    found: list[Shape] = []
    if (attention := model.attention) is not None:
        queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        found.append(("attn.qkv", (2 if attention.gated else 1) * queries + 2 * keys, hidden))
        found.append(("attn.o_proj", hidden, queries))
    if (gdn := model.gdn) is not None:
        values = gdn.value_heads * gdn.value_dim
        found.append(("gdn.qkvz", 2 * gdn.key_heads * gdn.key_dim + 2 * values, hidden))
        found.append(("gdn.out_proj", hidden, values))
    if model.ffn == "dense" and model.intermediate_size is not None:
        found.append(("ffn.gate_up", model.intermediate_size, hidden))
        found.append(("ffn.down", hidden, model.intermediate_size))
    if model.vocab_size is not None:
        found.append(("lm_head", model.vocab_size, hidden))
    return found


def parse_shape(text: str) -> Shape:
    """Read ``NxK``. UsageError describes an error."""
    match = re.fullmatch(r"(\d{1,7})x(\d{1,6})", text)
    if match is None or not int(match[1]) or not int(match[2]) or int(match[2]) % 16:
        raise UsageError(f"--shape {text!r}: expected NxK with K a multiple of 16, for example 5120x6144")
    return text, int(match[1]), int(match[2])


def distinct(shapes: Iterable[Shape]) -> list[Shape]:
    """Keep the first of each (N, K), with all its names."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, features, depth in shapes:
        known = names.setdefault((features, depth), [])
        known.extend([name] if name not in known else [])
    return [(" / ".join(found), *size) for size, found in names.items()]
