"""Dimensions of a model for its layers, and their limits."""

from typing import Literal

from kernel_muster.registry.contract.nvfp4 import GROUP
from kernel_muster.registry.values import frozen

LayerKind = Literal["attn", "gdn"]
FfnKind = Literal["dense", "moe", "none"]
WeightQuant = Literal["nvfp4", "bf16"]
Router = Literal["softmax", "sigmoid"]
Activation = Literal["silu"]

# One block routes a token. Its shared arrays hold one FP32 score for each expert beside the chosen ids and weights, and
# one counter for each expert while sorting. 1024 experts and 32 choices stay below the 48 KB limit without opt-in.
MAX_EXPERTS, MAX_TOP_K = 1024, 32
# Sizes supported by the attention kernels of every target.
HEAD_DIMS = (64, 128, 256)


@frozen
class YarnDims:
    """Frequencies stretched for contexts ``factor`` times as long as ``original_context``."""

    factor: float
    original_context: int


@frozen
class RopeDims:
    """Rotary positions: ``sections`` share the frequencies between time, height and width of a token."""

    theta: float
    rotary_dim: int
    sections: tuple[int, ...] = ()
    is_interleaved: bool = False
    yarn: YarnDims | None = None

    def problems(self) -> list[str]:
        """Return rotary options without a kernel."""
        found = []
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            found.append(f"rope rotates {self.rotary_dim} dimensions, expected an even number of at least 2")
        if self.sections and len(self.sections) != 3:
            found.append(f"rope.mrope_sections has {len(self.sections)} entries, expected 3: time, height, width")
        if self.yarn is not None and self.is_interleaved:
            found.append("rope has YaRN and interleaved mrope, no kernel serves both")
        return found


@frozen
class AttentionDims:
    """Full attention with grouped queries."""

    q_heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    quant: WeightQuant
    qk_norm: bool = False
    rope: RopeDims | None = None

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


@frozen
class GdnDims:
    """Gated delta net: linear attention with a short convolution."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_width: int

    @property
    def qkv_dim(self) -> int:
        """Features of ``[q all heads | k all | v all]``, the input of the convolution."""
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


@frozen
class MoeDims:
    """Routed experts, and a shared one unless its size is zero."""

    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    router: Router


@frozen
class DrafterDims:
    """A block-diffusion drafter: it reads ``target_layers`` of its target and fills ``gamma`` masks at once."""

    target: str
    gamma: int
    window: int
    mask_id: int
    target_layers: tuple[int, ...]

    def problems(self, vocab: int) -> list[str]:
        """Return all invalid dimensions."""
        found = []
        if self.gamma < 1 or self.window < 1:
            found.append(f"dflash gamma {self.gamma} and window {self.window}: expected at least 1 each")
        if not 0 <= self.mask_id < vocab:
            found.append(f"dflash.mask_token_id is {self.mask_id}, expected 0 to {vocab - 1}")
        if not self.target_layers or list(self.target_layers) != sorted({*self.target_layers}):
            found.append(f"dflash.target_layer_ids is {list(self.target_layers)}, expected rising layer numbers")
        return found


@frozen
class ModelDims:
    """The dimensions of all layers. ``quant`` is that of all projections except attention's.

    ``mtp_layers`` counts the multi-token-prediction head's layers. ``mtp_quant`` is the stored format of its weights.
    ``context`` is the largest number of tokens in a sequence. None if unknown.
    """

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
    mtp_quant: WeightQuant = "nvfp4"
    activation: Activation = "silu"
    is_tied: bool = False
    drafter: DrafterDims | None = None
    context: int | None = None

    @property
    def has_ffn(self) -> bool:
        """Whether an FFN stands behind each mixer."""
        return self.moe is not None or self.ffn == "dense"

    def problems(self) -> list[str]:
        """Return all dimensions that no kernel of these layers supports, before any launch."""
        found = []
        if self.attention is not None and self.attention.head_dim not in HEAD_DIMS:
            found.append(f"head_dim is {self.attention.head_dim}, expected one of {', '.join(map(str, HEAD_DIMS))}")
        if self.attention is not None and self.attention.rope is not None:
            found += self.attention.rope.problems()
        if self.moe is not None:
            found += _moe_problems(self.moe)
        if self.mtp_layers > 1:
            found.append(f"mtp.layers is {self.mtp_layers}, the head is built with one")
        if self.drafter is not None:
            found += self.drafter.problems(self.vocab)
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
