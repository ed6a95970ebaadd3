"""Drafts from the multi-token-prediction head: it reads its own last row again for each further draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from kernel_muster.models.decode.drafts import CommitStep, DraftSteps
from kernel_muster.models.decode.proposer import Committed
from kernel_muster.models.memory.state import ModelState, SequenceState, StateSizes, i32
from kernel_muster.models.model import Model
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.rows import verify_rows
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.levers import Levers


@dataclass
class _Draft:
    """One sequence: its place in the head's cache, the head's last row ``(1, H)``, and that row's position."""

    cache: SequenceState
    last: Any | None = None
    position: int = -1


class MtpProposer:
    """A proposer with a separate paged cache.

    A committed row enters the cache with the target's hidden row. Draft rows stay there only until the next commit
    overwrites them. MUSTER_MTP_PREFILL decides whether the whole prompt enters, or its last row alone.
    """

    reads: tuple[int, ...] = ()

    def __init__(self, model: Model, levers: Levers, drafts: int, sizes: StateSizes) -> None:
        if model.mtp is None:
            raise UsageError(f"{model.dims.name} has no MTP head")
        self.drafts, self._rows = drafts, verify_rows(drafts)
        self._model, self._head = model, model.mtp
        self._reads_prompts = levers.flag("MUSTER_MTP_PREFILL")
        self._state = ModelState(model.mtp.dims, sizes, model.memory.zeros)
        self._drafts: dict[int, _Draft] = {}
        self._steps: dict[int, DraftSteps] = {}
        self._commits: dict[int, CommitStep] = {}

    def open(self, sequence: SequenceState) -> None:
        """Begin a state for a sequence of the target."""
        self._drafts[sequence.slot] = _Draft(self._state.open())

    def close(self, sequence: SequenceState) -> None:
        """End it."""
        self._state.close(self._drafts.pop(sequence.slot).cache)

    def commit(self, rows: Committed) -> None:
        """Read committed rows with the tokens after them. The head's result for the last one is the first draft."""
        chosen: list[int] = []
        counts: list[int] = []
        positions: list[int] = []
        drafts = [self._drafts[sequence.slot] for sequence in rows.sequences]
        row = 0
        for draft, count, start in zip(drafts, rows.counts, rows.starts, strict=True):
            skipped = 0
            if rows.is_prompt and not self._reads_prompts:
                skipped, draft.cache.length = count - 1, 0  # a prompt of several passes leaves one row too
            chosen += range(row + skipped, row + count)
            positions += range(start + skipped, start + count)
            counts.append(count - skipped)
            row += count
        ids = [rows.next_ids[at] for at in chosen]
        hidden = rows.hidden if chosen == list(range(row)) else self._model.embedding.pick(rows.hidden, chosen)
        lasts = self._commit(drafts, counts, ids, hidden, positions, rows.is_prompt)
        for draft, last, end in zip(drafts, lasts, accumulate(counts), strict=True):
            draft.last, draft.position = last, positions[end - 1]
        self._state.advance([draft.cache for draft in drafts], counts)

    def _commit(
        self, drafts: Sequence[_Draft], counts: Sequence[int], ids: Sequence[int], hidden: Any,
        positions: Sequence[int], is_prompt: bool,
    ) -> list[Any]:  # fmt: skip
        """Run committed rows through the head. The kept rows of a verify pass use its recording."""
        caches = [draft.cache for draft in drafts]
        if not is_prompt and max(counts) <= self._rows:
            step = self._commits.get(len(drafts))
            if step is None:
                shape, pages = (len(drafts), self._rows), self._state.sizes.pages
                step = self._commits[len(drafts)] = CommitStep(self._model, self._state, shape, pages)
            if step.takes(caches, counts):
                return step.run(caches, counts, ids, positions, hidden)
        out, ends = self._run(drafts, counts, ids, hidden, positions)
        return [out[end : end + 1] for end in ends]

    def propose(self, sequences: Sequence[SequenceState], last_ids: Sequence[int]) -> Any:
        """Draft token by token, recorded once for each number of sequences. The commit already has the last ids."""
        drafts = [self._drafts[sequence.slot] for sequence in sequences]
        rows = [draft.last for draft in drafts if draft.last is not None]
        if len(rows) != len(drafts):
            raise UsageError("an MTP proposer drafts behind a committed row, and there is none")
        steps = self._steps.get(len(drafts))
        if steps is None:
            pages = self._state.sizes.pages
            steps = self._steps[len(drafts)] = DraftSteps(self._model, self._state, len(drafts), self.drafts, pages)
        return steps.run([draft.cache for draft in drafts], [draft.position for draft in drafts], rows)

    def _run(
        self, drafts: Sequence[_Draft], counts: Sequence[int], ids: Sequence[int], hidden: Any, positions: Sequence[int]
    ) -> tuple[Any, list[int]]:
        """Run rows through the head. Return its rows, and the last one of each sequence."""
        cuts = np.cumsum([0, *counts]).tolist()
        each = [list(ids[start:stop]) for start, stop in pairwise(cuts)]
        phase: Phase = "decode" if max(counts) == 1 else "verify" if max(counts) <= self._rows else "prefill"
        caches = [draft.cache for draft in drafts]
        batch = self._state.batch(caches, each, phase, i32(positions)).on(self._model.memory)
        embedded = self._model.embedding.forward(batch.ids)
        return self._head.forward(embedded, hidden, batch, self._state.kv[0]), [stop - 1 for stop in cuts[1:]]
