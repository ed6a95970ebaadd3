"""Build a model from a manifest and lookups: layers ask for their kernels here, once, and never again."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_muster.MODEL_toml.hf.check import doubts, joined, type_problem
from kernel_muster.MODEL_toml.hf.config import CONFIG_NAME, HfConfig, config_of
from kernel_muster.MODEL_toml.hf.contradictions import contradictions
from kernel_muster.models.decisions import check_levers
from kernel_muster.models.dims import ModelDims
from kernel_muster.models.ffn.dense_ffn import DenseFfn
from kernel_muster.models.ffn.moe_ffn import MoeFfn
from kernel_muster.models.heads.embedding import Embedding
from kernel_muster.models.heads.lm_head import LmHead
from kernel_muster.models.heads.mtp import MtpHead
from kernel_muster.models.heads.sampler import Sampler
from kernel_muster.models.layers.attention import Attention
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.decoder import DecoderLayer, OutputNorm
from kernel_muster.models.layers.ffn import FfnComponent, NoneFfn
from kernel_muster.models.layers.gdn import Gdn
from kernel_muster.models.manifest_dims import HasModelTable, model_dims, table_line
from kernel_muster.models.memory.memory import HostMemory, Memory, enough_memory, memory_of, need_device
from kernel_muster.models.memory.scratch import Scratch, ScratchPlan
from kernel_muster.models.memory.state import is_int
from kernel_muster.models.model import Model
from kernel_muster.models.weights.layout import WeightPlanner
from kernel_muster.models.weights.random_weights import in_memory
from kernel_muster.models.weights.source import GivenWeights, PlanOnly, QuantsOf, WeightSource
from kernel_muster.registry.contract.builders import Maturity
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.selection.lookups import Lookups

# Text alone. A builder may serve where its models were judged at full size, from a quantised checkpoint to the logits
# of every token. benchmarks/records/full_size_h200.md: both formats, the dense and the expert model.
RECORDED = (("sm_90a", "2026-12-01"),)
MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_6_moe")
#: Rows of one prefill pass; decode never exceeds the largest captured batch size.
MAX_ROWS, MOST_ROWS = 2048, 1 << 20
#: Supported modalities. The vision tower of multimodal checkpoints is not built.
MODALITIES = ("text",)


def build_model(
    manifest: HasModelTable,
    kernels: Lookups,
    weights: Mapping[str, Any] | WeightSource | None = None,
    max_rows: int = MAX_ROWS,
    modalities: Iterable[str] = MODALITIES,
) -> Model:
    """Look every kernel up, layer by layer, plan weights and scratch, and return the model.

    There is no global state. A model that cannot be built is UsageError, and a finding of the boot. So is a model with
    images, because there is no vision tower.
    """
    try:
        dims = model_dims(manifest)
        check_modalities(dims.name, modalities)
        if dims.drafter is not None:
            raise UsageError(f"{dims.name} cannot be built: it is a drafter of {dims.drafter.target}, not a model")
    except UsageError as error:
        kernels.request_failed(f"manifest {manifest.model.name}", error, where=table_line(manifest, error))
        raise
    try:
        check_checkpoint(manifest, kernels, weights)
    except UsageError as error:
        checkpoint: Any = getattr(weights, "checkpoint", None)
        where = str(Path(checkpoint.folder) / CONFIG_NAME)
        kernels.request_failed(f"checkpoint of {manifest.model.name}", error, where=where)
        raise
    model = build_from_dims(dims, kernels, weights, max_rows)
    check_patterns(dims.name, kernels, weights)
    check_levers(dims.name, kernels, lambda plan: build_plan(dims, plan, weights, max_rows))
    return model


def build_plan(dims: ModelDims, kernels: Lookups, weights: object, max_rows: int) -> Model:
    """Build a model without weights; of a checkpoint that is known, each weight keeps its quantisation."""
    if weights is None:  # all layers of a kind decide alike
        dims = replace(dims, layer_kinds=tuple(dict.fromkeys(dims.layer_kinds)))
    ctx = open_context(dims, kernels, QuantsOf(weights), max_rows, HostMemory())
    return _build(ctx, dims, kernels)


def build_from_dims(
    dims: ModelDims,
    kernels: Lookups,
    weights: Mapping[str, Any] | WeightSource | None = None,
    max_rows: int = MAX_ROWS,
) -> Model:
    """Build a model of any size. The caller checks the dimensions."""
    ctx = open_context(dims, kernels, weights, max_rows)
    try:
        with enough_memory(ctx.memory, f"{dims.name} with weights"), ctx.memory.active():
            model = _build(ctx, dims, kernels)
    except UsageError as error:
        if isinstance(error.__cause__, MemoryError):
            kernels.request_failed(f"weights of {dims.name}", error)
        raise
    ctx.memory.release()
    return model


def _build(ctx: LayerContext, dims: ModelDims, kernels: Lookups) -> Model:
    check_requests(dims, kernels, ctx.planner.source)
    embedding = Embedding(ctx.for_layer("embedding"), dims.vocab, dims.hidden)
    layers = tuple(build_layer(ctx, dims, index) for index in range(len(dims.layer_kinds)))
    norm = OutputNorm(ctx.for_layer("final_norm"), dims)
    lm_head = build_lm_head(ctx, dims, embedding)
    sampler = Sampler(ctx.for_layer("sampler"))
    mtp = build_mtp(ctx, dims)
    return Model(
        dims,
        embedding,
        layers,
        norm,
        lm_head,
        sampler,
        mtp,
        ctx.scratch,
        ctx.max_rows,
        maturity_on(str(ctx.kernels.target.arch or CPU)),
        ctx.memory,
        tuple(ctx.planner.planned),
    )


def maturity_on(arch: str) -> Maturity:
    """Return the maturity of built models on an architecture."""
    return "production" if any(name == arch for name, _ in RECORDED) else "partial"


def check_checkpoint(manifest: HasModelTable, kernels: Lookups, weights: object) -> None:
    """Refuse a checkpoint of another model, even with equal shapes. UsageError. A part of the model's own will do.

    Remaining doubts about its config.json become findings of the boot.
    """
    checkpoint = getattr(weights, "checkpoint", None)  # a plan must not import the checkpoint reader
    config = getattr(checkpoint, "hf", None) or getattr(checkpoint, "config", None)
    if checkpoint is None or not isinstance(config, HfConfig | Mapping):
        return
    hf = config_of(config)
    dflash = getattr(manifest, "dflash", None)
    found = joined(contradictions(manifest.model, hf, dflash=dflash, known=None, has_all_layers=False))
    if why := type_problem(manifest, hf) or found:
        where = f"{manifest.model.name} cannot be built from {checkpoint.folder}"
        raise UsageError(f"{where}, whose config.json contradicts its manifest: {why}")
    for doubt in doubts(manifest, hf):
        kernels.noticed(doubt)


def check_patterns(name: str, kernels: Lookups, weights: object) -> None:
    """Refuse requantise patterns without a match in the model: the weights would keep their size."""
    if unmatched := getattr(weights, "unmatched", ()):
        error = UsageError(f"no weight of {name} is named like {', '.join(unmatched)}: correct the requantise patterns")
        kernels.request_failed(f"weights of {name}", error)
        raise error


def check_modalities(name: str, modalities: Iterable[str]) -> None:
    """Refuse unsupported modalities. UsageError."""
    if others := sorted(set(modalities) - set(MODALITIES)):
        raise UsageError(
            f"{name} cannot be built for {', '.join(others)}: the vision tower is not built; give it text only"
        )


def open_context(
    dims: ModelDims, kernels: Lookups, weights: Mapping[str, Any] | WeightSource | None, max_rows: int,
    shared: Memory | None = None,
) -> LayerContext:  # fmt: skip
    """Return the context of layers. UsageError for weights without a device to compute on."""
    if not is_int(max_rows) or not 1 <= max_rows <= MOST_ROWS:
        raise UsageError(f"{dims.name}: max_rows is {max_rows!r}, expected 1 to {MOST_ROWS}")
    has_values = not (weights is None or isinstance(weights, PlanOnly))
    if has_values:
        need_device(kernels.target, f"{dims.name} with weights")
    source = GivenWeights(weights) if isinstance(weights, Mapping) else weights or PlanOnly()
    memory = shared or (memory_of(kernels.target) if has_values else HostMemory())
    planner = WeightPlanner(kernels.layouts, in_memory(source, memory), memory)
    scratch = Scratch(ScratchPlan(), lambda size: memory.empty((size,), "u8"))
    return LayerContext(kernels, planner, scratch, max_rows)


def build_lm_head(ctx: LayerContext, dims: ModelDims, embedding: Embedding) -> LmHead:
    """Build the LM head, on the embedding's table where the model has one for both."""
    table = embedding.table if dims.is_tied else None
    tied = None if table is None else Bf16Weight(table)
    return LmHead(ctx.for_layer("lm_head"), dims.vocab, dims.hidden, "bf16" if dims.is_tied else dims.quant, tied)


def build_mtp(ctx: LayerContext, dims: ModelDims) -> MtpHead | None:
    """Build the multi-token-prediction head, if the model has one."""
    if not dims.mtp_layers or dims.attention is None:
        return None
    return MtpHead(ctx.for_layer("mtp"), dims, dims.attention, build_ffn)


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
    return DecoderLayer(index, mixer, build_ffn(ctx, dims, f"layers.{index}"))


def build_ffn(ctx: LayerContext, dims: ModelDims, layer: str) -> FfnComponent:
    """Build one layer's FFN: dense, experts, or none."""
    if dims.moe is not None:
        return MoeFfn(ctx.for_layer(f"{layer}.moe"), dims.hidden, dims.moe)
    if dims.ffn == "dense":
        own = ctx.for_layer(f"{layer}.ffn")
        return DenseFfn(own, dims.hidden, dims.intermediate, dims.quant, dims.activation)
    return NoneFfn()


def check_requests(dims: ModelDims, kernels: Lookups, source: WeightSource) -> None:
    """Refuse, once for each model, lever requests that this model cannot honour."""
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
    if not dims.mtp_layers:
        asked = {"MUSTER_MTP_GATE_FORCE": levers.flag("MUSTER_MTP_GATE_FORCE")}
        asked["MUSTER_MTP_PREFILL"] = not levers.flag("MUSTER_MTP_PREFILL")
        for name in (name for name, is_asked in asked.items() if is_asked):
            kernels.request_failed(name, f"{dims.name}: it has no MTP head")


def _attention_quant(dims: ModelDims, source: WeightSource) -> str | None:
    """Return the stored quantisation of attention weights, else the manifest's. None without attention."""
    if dims.attention is None:
        return None
    first = dims.layer_kinds.index("attn")
    return source.quant_of(f"layers.{first}.attn.q_proj") or dims.attention.quant
