"""One layer of the block-diffusion drafter: its rows see the target's context and one another, in both directions.

Keys and values of the context come from the target's hidden rows, those of the block from the block itself. Both lie in
one paged cache, in any order, because rotary positions are in the keys. Source: z-lab's DFlash (2025), with the layers
of Qwen3.
"""

from typing import Any

import numpy as np
from kernel_muster.models.dims import ModelDims
from kernel_muster.models.ffn.dense_ffn import DenseFfn
from kernel_muster.models.layers.attention import BlockAttention
from kernel_muster.models.layers.context import LayerContext, new_rows
from kernel_muster.models.layers.decoder import OutputNorm, normalised
from kernel_muster.models.layers.projection import projection
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.state import KvCache
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.rows import verify_rows
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen

#: The phases of a block's rows, and of context rows.
_BLOCK: tuple[Phase, ...] = ("verify",)
_COMMIT: tuple[Phase, ...] = ("prefill",)


@frozen
class DrafterLayer:
    """Attention over context and block, and a dense FFN. BF16 rows ``(M, H)``."""

    mixer: BlockAttention
    ffn: DenseFfn

    def commit(self, context: Any, positions: Any, slots: Any, cache: KvCache) -> None:
        """Put keys and values of context rows ``(M, H)`` into the cache."""
        k, v = self.mixer.key_value(context, "prefill")
        keys = self.mixer.keys(k)
        self.mixer.rotary.turn(np.empty_like(keys, shape=(len(keys), 0, keys.shape[2])), keys, positions)
        self.mixer.append(cache, keys, v, slots)

    def forward(self, pending: Any | None, residual: Any, batch: Batch, own_rows: Batch, cache: KvCache) -> Any:
        """Run block rows. ``own_rows`` gives each row the context and the whole block of its sequence."""
        mixer = self.mixer
        x = normalised(mixer.input_norm, pending, residual)
        rows = mixer.qkv(x, "verify")
        q, k = mixer.queries(rows.q), mixer.keys(rows.k)
        mixer.rotary.turn(q, k, batch.positions)
        mixer.append(cache, k, rows.v, batch.kv_slots)
        attended = mixer.attend_each(q, cache, own_rows.block_table, own_rows.context_lens)
        attended = attended.reshape(len(q), mixer.dims.q_dim)
        mixed = mixer.output(attended, rows.gate, "verify")
        return self.ffn.forward(normalised(mixer.post_norm, mixed, residual), "verify")


def drafter_layer(ctx: LayerContext, dims: ModelDims, index: int) -> DrafterLayer:
    """Build one layer, labelled ``layers.<i>.attn`` and ``layers.<i>.ffn``."""
    if dims.attention is None or dims.ffn != "dense" or dims.layer_kinds[index] != "attn":
        raise UsageError(f"{dims.name}: a drafter's layers are full attention and a dense FFN")
    fewest = 1 if dims.drafter is None else verify_rows(dims.drafter.gamma)
    mixer = BlockAttention(ctx.for_layer(f"layers.{index}.attn"), dims, dims.attention, fewest)
    own = ctx.for_layer(f"layers.{index}.ffn")
    ffn = DenseFfn(own, dims.hidden, dims.intermediate, dims.quant, dims.activation, fewest, _BLOCK)
    return DrafterLayer(mixer, ffn)


class DrafterContext:
    """The drafter's input from its target: rows ``(M, H)`` of the target's layers, side by side ``(M, F * H)``."""

    def __init__(self, ctx: LayerContext, dims: ModelDims, layers: int) -> None:
        self.fc = projection(ctx, "fc", (dims.hidden, layers * dims.hidden), dims.quant, _COMMIT)
        self.norm = OutputNorm(ctx.for_layer("context.norm"), dims)

    def rows(self, features: Any) -> Any:
        """Return context rows of the target's features: projected, rounded to BF16, normalised."""
        rows = new_rows(features, self.fc.weight.spec.shape[0])
        self.fc.forward(features, rows, "prefill")
        return self.norm.forward(None, rows)
