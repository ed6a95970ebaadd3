"""Token embedding: rows of a BF16 table ``(V, H)``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_muster.models.layers.context import LayerContext, needed


class Embedding:
    """Gathers rows. The kernel refuses an id out of range."""

    def __init__(self, ctx: LayerContext, vocab: int, hidden: int) -> None:
        self._gather = ctx.kernels.kernel("embedding", "gather", reached_by="every pass")
        self.table = ctx.array("table", vocab, hidden)
        self.hidden, self._memory = hidden, ctx.memory

    def forward(self, ids: Any) -> Any:
        """Return BF16 ``(M, H)`` for token ids i32 ``(M,)``."""
        table = needed(self.table, "embedding.table")
        out = np.empty_like(table, shape=(ids.shape[0], self.hidden))
        self._gather(table=table, ids=ids, out=out)
        return out

    def pick(self, rows: Any, places: Sequence[int]) -> Any:
        """Return some rows of BF16 ``(M, F)``, in the order of their places, through the same kernel."""
        return self.gather(rows, self._memory.put(np.array(places, np.int32)))

    def gather(self, rows: Any, places: Any) -> Any:
        """Return some rows of BF16 ``(M, F)`` for places i32 in the memory of the rows."""
        out = np.empty_like(rows, shape=(len(places), rows.shape[1]))
        self._gather(table=rows, ids=places, out=out)
        return out
