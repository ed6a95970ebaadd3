"""The multi-token-prediction head: one more attention layer that guesses the token after next.

Its input at position p is ``fc([norm(embedding of token p + 1) | norm(hidden row p)])``, both BF16, with the target's
hidden row after its last norm. Its normalised output goes through the target's LM head, and replaces the hidden row in
the head's next step. Embedding and LM head are the target's. Source: DeepSeek-V3 technical report (2024), section 2.2,
with the norms and the order of the Qwen3-Next checkpoints (``mtp.fc``, ``mtp.pre_fc_norm_*``).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from kernel_muster.models.dims import AttentionDims, ModelDims
from kernel_muster.models.layers.attention import Attention
from kernel_muster.models.layers.context import LayerContext, needed, new_rows
from kernel_muster.models.layers.decoder import DecoderLayer, OutputNorm
from kernel_muster.models.layers.ffn import FfnComponent
from kernel_muster.models.layers.projection import projection
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.memory import copy_rows
from kernel_muster.models.memory.state import KvCache

MakeFfn = Callable[[LayerContext, ModelDims, str], FfnComponent]


class MtpHead:
    """Norms, the projection that joins them, one decoder layer, and the last norm. Lookups of attention and an FFN.

    Its weights have a separate quantisation: as stored, else ``dims.mtp_quant``.
    """

    def __init__(self, ctx: LayerContext, dims: ModelDims, attention: AttentionDims, make_ffn: MakeFfn) -> None:
        own = replace(dims, quant=dims.mtp_quant, attention=replace(attention, quant=dims.mtp_quant))
        kernels = ctx.kernels
        self._norm = kernels.kernel("norm", "rms_norm", reached_by="every pass")
        self._weights = {name: ctx.array(name, dims.hidden) for name in ("embedding_norm", "hidden_norm")}
        self.fc = projection(ctx, "fc", (dims.hidden, 2 * dims.hidden), own.quant)
        mixer = Attention(ctx.for_layer("mtp.0.attn"), own, own.attention or attention, requantises=False)
        self.layer = DecoderLayer(0, mixer, make_ffn(ctx, own, "mtp.0"))
        self._output = OutputNorm(ctx.for_layer("mtp.norm"), own)
        self._constants = {"eps": dims.rms_eps, "weight_offset": dims.norm_weight_offset}
        self.hidden = dims.hidden
        #: The dimensions of its own cache.
        self.dims = replace(own, layer_kinds=("attn",), gdn=None, mtp_layers=0)

    def forward(self, embedded: Any, hidden: Any, batch: Batch, cache: KvCache) -> Any:
        """Return normalised rows ``(M, H)`` of embeddings and hidden rows ``(M, H)``, and store them in the cache."""
        both = new_rows(embedded, 2 * self.hidden)
        for half, (name, x) in enumerate((("embedding_norm", embedded), ("hidden_norm", hidden))):
            normed = np.empty_like(x)
            self._norm(x=x, weight=needed(self._weights[name], f"mtp.{name}"), **self._constants, out=normed)
            copy_rows(both[:, half * self.hidden : (half + 1) * self.hidden], normed)
        residual = np.empty_like(embedded)
        self.fc.forward(both, residual, batch.phase)
        pending = self.layer.forward(None, residual, batch, cache)
        return self._output.forward(pending, residual)
