"""Dimensions of a model, read from its manifest: the only module here that knows the manifest's tables."""

from dataclasses import dataclass
from typing import Literal, Protocol

from kernel_muster.MODEL_toml.schema import AttentionTable, GdnTable, ModelTable, MoeTable
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.nvfp4 import GROUP

LayerKind = Literal["attn", "gdn"]
FfnKind = Literal["dense", "moe", "none"]
WeightQuant = Literal["nvfp4", "bf16"]
Router = Literal["softmax", "sigmoid"]

# One block routes a token: its shared arrays hold one FP32 score an expert beside the chosen ids and weights, and
# one counter an expert while sorting. 1024 experts and 32 choices stay below the 48 KB that need no opt-in.
MAX_EXPERTS, MAX_TOP_K = 1024, 32
# Sizes that the attention kernels of every target are written for.
HEAD_DIMS = (64, 128, 256)
_LAYER_KINDS: dict[str, LayerKind] = {"full": "attn", "gdn": "gdn"}


class HasModelTable(Protocol):
    """What a builder needs of a manifest."""

    @property
    def model(self) -> ModelTable:
        """The ``[model]`` table."""


@dataclass(frozen=True)
class AttentionDims:
    """Full attention with grouped queries."""

    q_heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    quant: WeightQuant

    @property
    def q_dim(self) -> int:
        """Features of the query (and of the gate, where there is one)."""
        return self.q_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Features of the key, and of the value."""
        return self.kv_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of the query projection: a gated one holds ``[q | gate]`` for each head."""
        return 2 * self.q_dim if self.gated else self.q_dim


@dataclass(frozen=True)
class GdnDims:
    """Gated delta net: linear attention with a short convolution."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_width: int

    @property
    def qkv_dim(self) -> int:
        """Features of ``[q all heads | k all | v all]``, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.z_dim

    @property
    def z_dim(self) -> int:
        """Features of the output gate, and of the value."""
        return self.value_heads * self.value_dim

    @property
    def qkvz_rows(self) -> int:
        """Rows of the fused input projection."""
        return self.qkv_dim + self.z_dim

    @property
    def ba_rows(self) -> int:
        """Rows of the projection of beta and alpha: two a value head."""
        return 2 * self.value_heads


@dataclass(frozen=True)
class MoeDims:
    """Routed experts, and a shared one unless its size is zero."""

    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    router: Router


@dataclass(frozen=True)
class ModelDims:
    """Everything that layers are built from. ``quant`` is that of all projections but attention's own."""

    name: str
    hidden: int
    vocab: int
    layer_kinds: tuple[LayerKind, ...]
    ffn: FfnKind
    quant: WeightQuant
    rms_eps: float
    norm_weight_offset: float
    attention: AttentionDims | None
    gdn: GdnDims | None
    intermediate: int
    moe: MoeDims | None
    mtp_layers: int

    def problems(self) -> list[str]:
        """Say what no kernel of these layers could serve, all at once, before any launch."""
        found = []
        if self.attention is not None and self.attention.head_dim not in HEAD_DIMS:
            found.append(f"head_dim is {self.attention.head_dim}, expected one of {', '.join(map(str, HEAD_DIMS))}")
        if self.moe is not None:
            found += _moe_problems(self.moe)
        if self.quant == "nvfp4":
            found += [f"{name} is {k}, expected a multiple of {GROUP}" for name, k in self._depths() if k % GROUP]
        return found

    def _depths(self) -> list[tuple[str, int]]:
        """Name every K of a quantised projection."""
        depths = [("hidden_size", self.hidden)]
        if self.attention is not None:
            depths.append(("attention heads x head_dim", self.attention.q_dim))
        if self.gdn is not None:
            depths.append(("gdn value_heads x value_dim", self.gdn.z_dim))
        if self.ffn == "dense":
            depths.append(("intermediate_size", self.intermediate))
        if self.moe is not None:
            depths += [("moe intermediate_size", self.moe.intermediate)]
            depths += [("moe shared_intermediate_size", self.moe.shared_intermediate)]
        return depths


def _moe_problems(moe: MoeDims) -> list[str]:
    found = []
    if moe.top_k > moe.experts:
        found.append(f"top_k is {moe.top_k}, expected at most the {moe.experts} experts")
    if moe.experts > MAX_EXPERTS:
        found.append(f"experts is {moe.experts}, the routing kernels' shared arrays hold {MAX_EXPERTS}")
    if moe.top_k > MAX_TOP_K:
        found.append(f"top_k is {moe.top_k}, the routing kernels' shared arrays hold {MAX_TOP_K}")
    return found


def model_dims(manifest: HasModelTable) -> ModelDims:
    """Read a manifest's dimensions; UsageError names everything that is missing or that no layer supports."""
    table = manifest.model
    problems = [f"{path} is missing" for path in table.missing_dimensions]
    problems += _unsupported(table)
    if problems:
        raise UsageError(f"{table.name} cannot be built: {'; '.join(problems)}")
    dims = _dims(table)
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


def _dims(table: ModelTable) -> ModelDims:
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
        attention=_attention(table.attention, quant) if table.attention else None,
        gdn=_gdn(table.gdn) if table.gdn else None,
        intermediate=table.intermediate_size or 0,
        moe=_moe(table.moe) if table.moe else None,
        mtp_layers=table.mtp.layers if table.mtp else 0,
    )


def _attention(table: AttentionTable, quant: WeightQuant) -> AttentionDims:
    stored: WeightQuant = quant if table.weights == "native" else "bf16"
    return AttentionDims(table.heads, table.kv_heads, table.head_dim, table.gated, stored)


def _gdn(table: GdnTable) -> GdnDims:
    return GdnDims(table.key_heads, table.key_dim, table.value_heads, table.value_dim, table.conv_width)


def _moe(table: MoeTable) -> MoeDims:
    shared = table.shared_intermediate_size or 0
    return MoeDims(table.experts, table.top_k, table.intermediate_size, shared, table.router)
