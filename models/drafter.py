"""The block-diffusion drafter as a model: built alone as a plan, or beside its target, whose embedding it shares."""

from collections.abc import Mapping
from typing import Any

from kernel_muster.models.build import MAX_ROWS, build_lm_head, check_checkpoint, check_requests, open_context
from kernel_muster.models.decisions import check_levers
from kernel_muster.models.dims import DrafterDims, ModelDims
from kernel_muster.models.heads.dflash import DrafterContext, DrafterLayer, drafter_layer
from kernel_muster.models.heads.embedding import Embedding
from kernel_muster.models.heads.lm_head import LmHead
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.decoder import OutputNorm
from kernel_muster.models.manifest_dims import HasModelTable, model_dims, table_line
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.memory import HostMemory, Memory
from kernel_muster.models.memory.scratch import Scratch
from kernel_muster.models.memory.state import ModelState
from kernel_muster.models.model import Model
from kernel_muster.models.weights.source import QuantsOf, WeightSource
from kernel_muster.registry.contract.builders import Maturity
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.values import frozen

DRAFTER_TYPES = ("dflash",)


@frozen
class Drafter:
    """A built drafter. Without weights it is a plan that cannot compute."""

    dims: ModelDims
    drafter: DrafterDims
    embedding: Embedding
    context: DrafterContext
    layers: tuple[DrafterLayer, ...]
    norm: OutputNorm
    lm_head: LmHead
    scratch: Scratch
    memory: Memory
    maturity: Maturity = "partial"

    def forward(self, batch: Batch, state: ModelState) -> Any:
        """Return the normalised rows ``(M, H)`` of blocks: the last token, and masks for the following ones."""
        own_rows = batch.by_row().on(self.memory)
        here = batch.on(self.memory)
        residual = self.embedding.forward(here.ids)
        pending: Any | None = None
        for index, layer in enumerate(self.layers):
            pending = layer.forward(pending, residual, here, own_rows, state.kv[index])
        return self.norm.forward(pending, residual)


def build_drafter(
    manifest: HasModelTable,
    kernels: Lookups,
    weights: Mapping[str, Any] | WeightSource | None = None,
    target: Model | None = None,
    max_rows: int = MAX_ROWS,
) -> Drafter:
    """Look every kernel up and return the drafter. Beside a target it uses its embedding and its LM head.

    A drafter that cannot be built is UsageError, and a finding of the boot.
    """
    try:
        dims = model_dims(manifest)
        if dims.drafter is None:
            raise UsageError(f"{dims.name} cannot be built: its manifest has no [dflash] table")
        check_checkpoint(manifest, kernels, weights)
    except UsageError as error:
        kernels.request_failed(f"manifest {manifest.model.name}", error, where=table_line(manifest, error))
        raise
    made = drafter_from_dims(dims, kernels, weights, target, max_rows)
    if target is None:  # beside a target, the levers are those of both
        check_levers(dims.name, kernels, lambda plan: _plan(dims, plan, weights, max_rows))
    return made


def _plan(dims: ModelDims, kernels: Lookups, weights: object, max_rows: int) -> Drafter:
    return drafter_from_dims(dims, kernels, QuantsOf(weights), None, max_rows, HostMemory())


def drafter_from_dims(
    dims: ModelDims,
    kernels: Lookups,
    weights: Mapping[str, Any] | WeightSource | None = None,
    target: Model | None = None,
    max_rows: int = MAX_ROWS,
    memory: Memory | None = None,
) -> Drafter:
    """Build a drafter of any size. UsageError if it does not fit its target."""
    drafter = dims.drafter
    if drafter is None:
        raise UsageError(f"{dims.name} is no drafter")
    if target is not None:
        check_target(dims, drafter, target.dims)
    ctx = open_context(dims, kernels, weights, max_rows, memory if target is None else target.memory)
    with ctx.memory.active():
        return _build(ctx, dims, drafter, kernels, target)


def _build(
    ctx: LayerContext, dims: ModelDims, drafter: DrafterDims, kernels: Lookups, target: Model | None
) -> Drafter:  # fmt: skip
    check_requests(dims, kernels, ctx.planner.source)
    if target is None:
        embedding = Embedding(ctx.for_layer("embedding"), dims.vocab, dims.hidden)
        lm_head = build_lm_head(ctx, dims, embedding)
    else:
        embedding, lm_head = target.embedding, target.lm_head
    return Drafter(
        dims,
        drafter,
        embedding,
        DrafterContext(ctx.for_layer("context"), dims, len(drafter.target_layers)),
        tuple(drafter_layer(ctx, dims, index) for index in range(len(dims.layer_kinds))),
        OutputNorm(ctx.for_layer("final_norm"), dims),
        lm_head,
        ctx.scratch,
        ctx.memory,
    )


def check_target(dims: ModelDims, drafter: DrafterDims, target: ModelDims) -> None:
    """Refuse a target that does not match the drafter. UsageError lists all differences."""
    found = [] if target.name == drafter.target else [f"it drafts for {drafter.target}"]
    for name in ("hidden", "vocab"):
        mine, other = getattr(dims, name), getattr(target, name)
        found += [] if mine == other else [f"{name} is {mine}, the target's {other}"]
    last = len(target.layer_kinds) - 1
    if drafter.target_layers[-1] > last:
        found.append(f"it reads layer {drafter.target_layers[-1]}, the target's last is {last}")
    if found:
        raise UsageError(f"{dims.name} does not fit {target.name}: {'; '.join(found)}")
