"""Drafts from the block-diffusion drafter: one pass fills a block of masks behind the last token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_muster.models.decode.proposer import Committed
from kernel_muster.models.drafter import Drafter
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.state import ModelState, SequenceState, StateSizes, i32
from kernel_muster.models.policy.rows import verify_rows
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.levers import Levers


class DflashProposer:
    """A proposer whose cache holds the last ``window`` tokens of the target's context, and then the block.

    The window is a ring: rotary positions are in the keys, so the order of tokens in the cache does not matter.
    """

    def __init__(self, drafter: Drafter, levers: Levers, sizes: StateSizes) -> None:
        self.drafts, self.reads = drafter.drafter.gamma, drafter.drafter.target_layers
        self._drafter, self._window = drafter, drafter.drafter.window
        self._commits = levers.flag("MUSTER_DFLASH_COMMIT_CTX")
        self._state = ModelState(drafter.dims, sizes, drafter.memory.zeros)
        self._caches: dict[int, SequenceState] = {}  # by the target's slot; length counts all committed tokens

    def open(self, sequence: SequenceState) -> None:
        """Begin a state for a sequence of the target."""
        self._caches[sequence.slot] = self._state.open()

    def close(self, sequence: SequenceState) -> None:
        """End it."""
        self._state.close(self._caches.pop(sequence.slot))

    def committed(self, sequence: SequenceState) -> int:
        """Return how many tokens of a sequence have reached the drafter's context."""
        return self._caches[sequence.slot].length

    def commit(self, rows: Committed) -> None:
        """Project the target's rows to keys and values of every layer; of many rows, the last ``window`` stay.

        It is the only input of the drafter's context; MUSTER_DFLASH_COMMIT_CTX disables it.
        """
        if not self._commits:
            return
        if rows.features is None:
            raise UsageError("a block-diffusion drafter reads layers of its target, and the pass kept none")
        chosen: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        row = 0
        for sequence, count, start in zip(rows.sequences, rows.counts, rows.starts, strict=True):
            cache, kept = self._caches[sequence.slot], min(count, self._window)
            first = cache.length + count - kept
            self._state.reserve([cache], [min(cache.length + count, self._window)])
            slots += self._state.slots(cache, [at % self._window for at in range(first, first + kept)])
            chosen += range(row + count - kept, row + count)
            positions += range(start + count - kept, start + count)
            self._state.advance([cache], [count])
            row += count
        memory, embedding = self._drafter.memory, self._drafter.embedding
        is_all = chosen == list(range(row))
        context = self._drafter.context.rows(rows.features if is_all else embedding.pick(rows.features, chosen))
        at, into = memory.put(i32(positions)), memory.put(i32(slots))
        for index, layer in enumerate(self._drafter.layers):
            layer.commit(context, at, into, self._state.kv[index])

    def propose(self, sequences: Sequence[SequenceState], last_ids: Sequence[int]) -> Any:
        """Fill a block for each sequence and return the greedy choice at every mask."""
        batch = self._block([self._caches[sequence.slot] for sequence in sequences], sequences, last_ids)
        hidden = self._drafter.forward(batch, self._state)
        masks = np.delete(np.arange(batch.rows), batch.cu_rows[:-1]).tolist()
        head, memory = self._drafter.lm_head, self._drafter.memory
        chosen = head.greedy(head.forward(self._drafter.embedding.pick(hidden, masks)))
        return memory.get(chosen).reshape(len(sequences), self.drafts)

    def _block(
        self, caches: Sequence[SequenceState], sequences: Sequence[SequenceState], last_ids: Sequence[int]
    ) -> Batch:
        size, mask = verify_rows(self.drafts), self._drafter.drafter.mask_id
        known = [min(cache.length, self._window) for cache in caches]
        self._state.reserve(caches, [count + size for count in known])
        slots = [
            slot
            for cache, count in zip(caches, known, strict=True)
            for slot in self._state.slots(cache, range(count, count + size))
        ]
        return Batch(
            "verify",
            ids=i32([token for last in last_ids for token in (last, *[mask] * self.drafts)]),
            positions=i32([at for s in sequences for at in range(s.length, s.length + size)]),
            cu_rows=i32(range(0, (len(caches) + 1) * size, size)),
            kv_slots=i32(slots),
            block_table=self._state.table(caches),
            context_lens=i32([count + size for count in known]),
            state_slots=i32([cache.slot for cache in caches]),
        )
