"""One pass through a model: its rows, their sequences and positions, and the place of their state."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kernel_muster.models.memory.memory import Memory
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.values import frozen


@frozen
class Batch:
    """M rows of S sequences, all arrays i32: made on the host, used in a model's memory.

    ``ids (M,)``; ``positions (M,)``, or ``(3, M)`` of time, height and width; ``cu_rows (S + 1,)`` divides the rows;
    ``kv_slots (M,)`` places them in the paged cache; ``block_table (S, L)`` lists each sequence's pages there;
    ``context_lens (S,)`` counts a sequence's tokens with these rows; ``state_slots (S,)`` are the sequences' places in
    the recurrent pools. Decode has one row for each sequence.
    """

    phase: Phase
    ids: Any
    positions: Any
    cu_rows: Any
    kv_slots: Any
    block_table: Any
    context_lens: Any
    state_slots: Any
    most_prompts: int | None = None  # of a recorded prefill: its number of sequences, without padding

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
        """The number of sequences of a prefill's prompts, as far as known before it runs."""
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
        """Return the rows, each with its sequence's whole context; of a batch on the host."""
        table = np.repeat(self.block_table, self.counts, axis=0)
        return replace(self, block_table=table, context_lens=np.repeat(self.context_lens, self.counts))

    def on(self, memory: Memory) -> "Batch":
        """Return this batch in the layers' memory. On the host it is unchanged."""
        if memory.is_host:
            return self
        names = ("ids", "positions", "cu_rows", "kv_slots", "block_table", "context_lens", "state_slots")
        return replace(self, **{name: memory.put(getattr(self, name)) for name in names})
