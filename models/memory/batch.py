"""One pass through a model: which rows, of which sequences, at which positions, and where their state lies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kernel_muster.models.memory.memory import Memory
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.values import frozen


@frozen
class Batch:
    """M rows of S sequences, all arrays i32: on the host where a batch is made, in a model's memory where it runs.

    ``ids (M,)``; ``positions (M,)``, or ``(3, M)`` of time, height and width; ``cu_rows (S + 1,)`` divides the rows;
    ``kv_slots (M,)`` places them in the paged cache, whose pages of each sequence ``block_table (S, L)`` lists;
    ``context_lens (S,)`` counts a sequence's tokens with these rows; ``state_slots (S,)`` are the sequences' places in
    the recurrent pools. Decode has one row a sequence.
    """

    phase: Phase
    ids: Any
    positions: Any
    cu_rows: Any
    kv_slots: Any
    block_table: Any
    context_lens: Any
    state_slots: Any
    most_prompts: int | None = None  # of a recorded prefill: the sequences it has room for, without those that pad

    @property
    def rows(self) -> int:
        """The number of rows, M."""
        return int(self.ids.shape[0])

    @property
    def sequences(self) -> int:
        """The number of sequences, S."""
        return int(self.state_slots.shape[0])

    @property
    def prompts(self) -> int:
        """The sequences that a prefill's prompts are, as far as is known before it runs."""
        return self.sequences if self.most_prompts is None else self.most_prompts

    @property
    def last_rows(self) -> Any:
        """The last row of each sequence; of a batch on the host."""
        return self.cu_rows[1:] - 1

    @property
    def counts(self) -> Sequence[int]:
        """The rows of each sequence; of a batch on the host."""
        found: list[int] = (self.cu_rows[1:] - self.cu_rows[:-1]).tolist()
        return found

    def by_row(self) -> "Batch":
        """Return the rows, each with a context of its own: all that its sequence has; of a batch on the host."""
        table = np.repeat(self.block_table, self.counts, axis=0)
        return replace(self, block_table=table, context_lens=np.repeat(self.context_lens, self.counts))

    def on(self, memory: Memory) -> "Batch":
        """Return this batch where layers run; it stays what it is on the host."""
        if memory.is_host:
            return self
        names = ("ids", "positions", "cu_rows", "kv_slots", "block_table", "context_lens", "state_slots")
        return replace(self, **{name: memory.put(getattr(self, name)) for name in names})
