"""The tuned shapes: every projection of a model with more than one arm."""

from collections.abc import Iterable, Iterator

from kernel_muster.bench.data.shapes import Shape, distinct, projections_of
from kernel_muster.MODEL_toml.manifest import Manifest

#: The gates of a delta net: the one projection that is BF16 in every model.
_GATES = "gdn.ba"
#: Both sides of each built-in edge and of 64, the captured batch sizes, and one prefill of a few hundred rows. The wide
#: GEMV processes 32 rows at a time, so its cost rises at 33 and 65.
ROWS = (4, 8, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 256)


def tuned_shapes(manifests: Iterable[Manifest]) -> list[Shape]:
    """Return ``(name, N, K)`` of models' projections, as NVFP4 or BF16 weights."""
    return distinct((f"{one.name} {name}", n, k) for one in manifests for name, n, k in _shapes(one))


def _shapes(manifest: Manifest) -> Iterator[Shape]:
    yield from projections_of(manifest)
    model = manifest.model
    hidden, attention, moe = model.hidden_size or 0, model.attention, model.moe
    if attention is not None:
        yield "attn.kv_proj", attention.kv_heads * attention.head_dim, hidden
    if moe is not None and moe.shared_intermediate_size:
        yield "shared.gate_up", moe.shared_intermediate_size, hidden
        yield "shared.down", hidden, moe.shared_intermediate_size
    if model.gdn is not None:
        yield _GATES, 2 * model.gdn.value_heads, hidden


def only_bf16(shapes: Iterable[Shape]) -> frozenset[tuple[int, int]]:
    """Return ``(N, K)`` of the shapes without an NVFP4 weight."""
    return frozenset((n, k) for name, n, k in shapes if all(one.endswith(_GATES) for one in name.split(" / ")))
