"""Token embedding: rows of a BF16 table ``(V, H)``."""

from typing import Any

import numpy as np
from kernel_muster.models.layers.context import LayerContext, needed


class Embedding:
    """Gathers rows; an id out of range is refused by the kernel."""

    def __init__(self, ctx: LayerContext, vocab: int, hidden: int) -> None:
        self._gather = ctx.kernels.kernel("embedding", "gather")
        self.table = ctx.array("table", vocab, hidden)
        self.hidden = hidden

    def forward(self, ids: Any) -> Any:
        """Return BF16 ``(M, H)`` for token ids i32 ``(M,)``."""
        table = needed(self.table, "embedding.table")
        out = np.empty_like(table, shape=(ids.shape[0], self.hidden))
        self._gather(table=table, ids=ids, out=out)
        return out
