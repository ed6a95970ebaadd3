"""One pass through a model: which rows, of which sequences, at which positions, and where their state lies."""

from typing import Any

from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.values import frozen


@frozen
class Batch:
    """M rows of S sequences, all arrays i32.

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

    @property
    def rows(self) -> int:
        """The number of rows, M."""
        return int(self.ids.shape[0])

    @property
    def sequences(self) -> int:
        """The number of sequences, S."""
        return int(self.state_slots.shape[0])

    @property
    def last_rows(self) -> Any:
        """The last row of each sequence."""
        return self.cu_rows[1:] - 1
