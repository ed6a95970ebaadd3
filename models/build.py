"""Build a model from a manifest and lookups: layers ask for their kernels here, once, and never again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernel_muster.models.dims import HasModelTable, ModelDims, model_dims
from kernel_muster.models.layers.attention import Attention
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.dense_ffn import DenseFfn
from kernel_muster.models.layers.embedding import Embedding
from kernel_muster.models.layers.ffn import FfnComponent, NoneFfn
from kernel_muster.models.layers.gdn import Gdn
from kernel_muster.models.layers.lm_head import LmHead
from kernel_muster.models.layers.moe_ffn import MoeFfn
from kernel_muster.models.layout import WeightPlanner
from kernel_muster.models.scratch import Scratch, ScratchPlan
from kernel_muster.models.weights import GivenWeights, PlanOnly, WeightSource
from kernel_muster.registry.builders import Maturity
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.lookups import Lookups

MATURITY: Maturity = "partial"
MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_6_moe")
#: Rows of one prefill pass; decode never has more than the padded ladder's last rung.
MAX_ROWS = 2048


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: a mixer (attention or gated delta net) and an FFN."""

    index: int
    mixer: Attention | Gdn
    ffn: FfnComponent


@dataclass(frozen=True)
class Model:
    """A built model; without weights it is a plan that cannot compute."""

    dims: ModelDims
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    lm_head: LmHead
    scratch: Scratch
    maturity: Maturity = MATURITY


def build_model(
    manifest: HasModelTable,
    kernels: Lookups,
    weights: Mapping[str, Any] | WeightSource | None = None,
    max_rows: int = MAX_ROWS,
) -> Model:
    """Look every kernel up, layer by layer, plan weights and scratch, and return the model.

    Nothing is found globally. A model that cannot be built is UsageError, and a finding of the boot.
    """
    try:
        dims = model_dims(manifest)
    except UsageError as error:
        kernels.request_failed(f"manifest {manifest.model.name}", str(error))
        raise
    if weights is not None and not kernels.target.is_cpu:
        raise UsageError(f"{dims.name}: weights on {kernels.target}: layers compute on cpu only, build a plan instead")
    source = GivenWeights(weights) if isinstance(weights, Mapping) else weights or PlanOnly()
    check_requests(dims, kernels, source)
    scratch = Scratch(ScratchPlan())
    ctx = LayerContext(kernels, WeightPlanner(kernels.layouts, source), scratch, max_rows)
    embedding = Embedding(ctx.for_layer("embedding"), dims.vocab, dims.hidden)
    layers = tuple(build_layer(ctx, dims, index) for index in range(len(dims.layer_kinds)))
    lm_head = LmHead(ctx.for_layer("lm_head"), dims.vocab, dims.hidden, dims.quant)
    return Model(dims, embedding, layers, lm_head, scratch)


def build_layer(ctx: LayerContext, dims: ModelDims, index: int) -> DecoderLayer:
    """Build one decoder layer, labelled ``layers.<i>.attn|gdn`` and ``layers.<i>.ffn|moe``."""
    kind = dims.layer_kinds[index]
    mixer: Attention | Gdn
    if kind == "attn" and dims.attention is not None:
        mixer = Attention(ctx.for_layer(f"layers.{index}.attn"), dims, dims.attention)
    elif kind == "gdn" and dims.gdn is not None:
        mixer = Gdn(ctx.for_layer(f"layers.{index}.gdn"), dims, dims.gdn)
    else:
        raise UsageError(f"{dims.name}: layer {index} is {kind}, whose dimensions are missing")
    return DecoderLayer(index, mixer, build_ffn(ctx, dims, index))


def build_ffn(ctx: LayerContext, dims: ModelDims, index: int) -> FfnComponent:
    """Build one layer's FFN: dense, experts, or none."""
    if dims.moe is not None:
        return MoeFfn(ctx.for_layer(f"layers.{index}.moe"), dims.hidden, dims.moe)
    if dims.ffn == "dense":
        return DenseFfn(ctx.for_layer(f"layers.{index}.ffn"), dims.hidden, dims.intermediate, dims.quant)
    return NoneFfn()


def check_requests(dims: ModelDims, kernels: Lookups, source: WeightSource) -> None:
    """Refuse, once a model, what levers ask for and this model cannot do."""
    levers = kernels.levers
    if levers.flag("MUSTER_FP4_PROJ_DECODE"):
        stored = _attention_quant(dims, source)
        if stored != "bf16":
            why = f"has {stored} weights already, there is nothing to requantise" if stored else "is not there"
            kernels.request_failed("MUSTER_FP4_PROJ_DECODE", f"attention of {dims.name} {why}")
    if dims.moe is None:
        for name in ("MUSTER_FP32_ROUTING", "MUSTER_MOE_GROUPED_DECODE"):
            if levers.flag(name):
                kernels.request_failed(name, f"{dims.name} has no experts")
    if levers.flag("MUSTER_MTP_GATE_FORCE"):
        why = "its builder does not build the MTP head" if dims.mtp_layers else "it has no MTP head"
        kernels.request_failed("MUSTER_MTP_GATE_FORCE", f"{dims.name}: {why}")


def _attention_quant(dims: ModelDims, source: WeightSource) -> str | None:
    """Return how attention weights are stored: as found, else as the manifest says; None without attention."""
    if dims.attention is None:
        return None
    first = dims.layer_kinds.index("attn")
    return source.quant_of(f"layers.{first}.attn.q_proj") or dims.attention.quant
