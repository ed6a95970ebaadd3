"""One decoder layer around its mixer and FFN, and the norm after the last one.

The residual, BF16 ``(M, H)``, is updated in place and rounded to BF16 each time. A result not yet added to it is
``pending``: the next norm adds it.
"""

from typing import Any

import numpy as np
from kernel_muster.models.dims import ModelDims
from kernel_muster.models.layers.attention import Attention
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.ffn import FfnComponent
from kernel_muster.models.layers.gdn import Gdn
from kernel_muster.models.layers.norm import RmsNorm
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.state import KvCache, Recurrent
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen


@frozen
class DecoderLayer:
    """One layer: a mixer (attention or gated delta net) and an FFN."""

    index: int
    mixer: Attention | Gdn
    ffn: FfnComponent

    def enter(self, pending: Any | None, residual: Any) -> Any:
        """Add the pending result, and return the normalised input of the mixer."""
        return normalised(self.mixer.input_norm, pending, residual)

    def mix(self, x: Any, batch: Batch, memory: KvCache | Recurrent) -> Any:
        """Run the mixer on normalised rows."""
        if isinstance(self.mixer, Attention) and isinstance(memory, KvCache):
            return self.mixer.forward(x, batch, memory)
        if isinstance(self.mixer, Gdn) and isinstance(memory, Recurrent):
            return self.mixer.forward(x, batch, memory)
        raise UsageError(f"layer {self.index}: {type(memory).__name__} is no memory of {type(self.mixer).__name__}")

    def finish(self, mixed: Any, residual: Any, batch: Batch) -> Any | None:
        """Run the FFN after the mixer, and return the pending result."""
        if self.ffn.is_none:
            return self.mixer.leave(mixed, residual)
        x = normalised(self.mixer.post_norm, mixed, residual)
        return self.ffn.forward(x, batch.phase)

    def forward(self, pending: Any | None, residual: Any, batch: Batch, memory: KvCache | Recurrent) -> Any | None:
        """Run the whole layer."""
        mixed = self.mix(self.enter(pending, residual), batch, memory)
        return self.finish(mixed, residual, batch)


class OutputNorm:
    """The norm behind the last layer."""

    def __init__(self, ctx: LayerContext, dims: ModelDims) -> None:
        rms_norm = ctx.kernels.kernel("norm", "rms_norm", reached_by="every pass")
        rms_norm_residual = ctx.kernels.kernel("norm", "rms_norm_residual", reached_by="every pass")
        weight = ctx.array("weight", dims.hidden)
        self._norm = RmsNorm(rms_norm, rms_norm_residual, weight, dims.rms_eps, dims.norm_weight_offset)

    def forward(self, pending: Any | None, residual: Any) -> Any:
        """Add the pending result, and return the normalised rows."""
        return normalised(self._norm, pending, residual)


def normalised(norm: RmsNorm, pending: Any | None, residual: Any) -> Any:
    """Return the norm of the residual, after adding the pending result to it."""
    out = np.empty_like(residual)
    if pending is None:
        norm.forward(residual, out)
    else:
        norm.add(pending, residual, out)
    return out
