"""Recorded passes of an MTP head between verify passes: all steps of a proposal, and the commit of accepted rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_muster.models.decode.recording import FixedInputs, let_go, new_tape, replay_of
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.memory import copy_rows
from kernel_muster.models.memory.state import ModelState, SequenceState
from kernel_muster.models.model import Model
from kernel_muster.registry.errors import UsageError

_WORDS = 4
_NOWHERE = -1


class DraftSteps:
    """Chooses a first draft behind hidden rows ``(S, H)``, and each further one behind the head's own last rows."""

    def __init__(self, model: Model, state: ModelState, sequences: int, drafts: int, pages: int) -> None:
        if model.mtp is None:
            raise UsageError(f"{model.dims.name} has no MTP head")
        memory = model.memory
        self._memory, self._state, self._sequences, self._pages = memory, state, sequences, pages
        self._steps = range(1, drafts)
        shapes: dict[str, tuple[int, ...]] = {"table": (sequences, pages)}
        for step in self._steps:
            shapes.update({f"{name}{step}": (sequences,) for name in ("positions", "kv_slots", "context_lens")})
        self._inputs = FixedInputs(memory, shapes)
        # A row of ids for each draft, padded to the alignment of kernels.
        width = -(-sequences // _WORDS) * _WORDS
        self._ids = memory.zeros((drafts, width), "i32")
        self._hidden = memory.zeros((sequences, model.dims.hidden), "bf16")
        self.logits: list[Any] = []  # of each draft (S, V), until the next proposal
        nowhere = {f"kv_slots{step}": _NOWHERE for step in self._steps}
        with memory.recording():
            self._inputs.send({**nowhere, **{f"context_lens{step}": 1 for step in self._steps}})
            with new_tape(memory) as tape:
                self._record(model, state)
            self._replay = replay_of(memory, tape)
            let_go(memory, tape)
            memory.wait()

    def _record(self, model: Model, state: ModelState) -> None:
        hidden, count = self._hidden, self._sequences

        def choose(step: int) -> None:
            self.logits.append(model.lm_head.forward(hidden))
            model.lm_head.choose(self.logits[step], self._ids[step, :count])

        choose(0)
        for step in self._steps:
            ids = self._ids[step - 1, :count]
            arrays = self._inputs.arrays
            batch = Batch(
                "decode", ids=ids, positions=arrays[f"positions{step}"], cu_rows=None,
                kv_slots=arrays[f"kv_slots{step}"], block_table=arrays["table"],
                context_lens=arrays[f"context_lens{step}"], state_slots=None,
            )  # fmt: skip
            assert model.mtp is not None  # noqa: S101  (the constructor has looked)
            hidden = model.mtp.forward(model.embedding.forward(ids), hidden, batch, state.kv[0])
            choose(step)

    def run(self, caches: Sequence[SequenceState], positions: Sequence[int], rows: Sequence[Any]) -> Any:
        """Return drafts i32 ``(S, drafts)`` after rows ``(1, H)`` at these positions. Caches do not grow."""
        if not len(caches) == len(positions) == len(rows) == self._sequences:
            counts = f"{len(caches)} caches, {len(positions)} positions and {len(rows)} rows"
            raise UsageError(f"{counts} for a proposal that is recorded for {self._sequences} sequences")
        for at, row in enumerate(rows):
            copy_rows(self._hidden[at : at + 1], row)
        lengths = [cache.length for cache in caches]
        self._state.reserve(caches, [length + len(self._steps) for length in lengths])
        values: dict[str, Any] = {"table": _wide_table(self._state, caches, self._pages)}
        for step in self._steps:
            places = [length + step - 1 for length in lengths]
            values[f"positions{step}"] = [at + step for at in positions]
            values[f"context_lens{step}"] = [place + 1 for place in places]
            values[f"kv_slots{step}"] = [
                self._state.slots(cache, (place,))[0] for cache, place in zip(caches, places, strict=True)
            ]
        self._inputs.send(values)
        self._replay.launch()
        return self._memory.get(self._ids)[:, : len(caches)].T.copy()


class CommitStep:
    """Reads up to ``rows`` committed rows of each sequence into the head's cache, recorded once for each shape.

    A sequence with fewer rows begins with padding, which leaves no state. Its own rows come last.
    """

    def __init__(self, model: Model, state: ModelState, shape: tuple[int, int], pages: int) -> None:
        if model.mtp is None:
            raise UsageError(f"{model.dims.name} has no MTP head")
        memory = model.memory
        self._state, self._pages = state, pages
        self._sequences, self._rows = shape
        count = self._sequences * self._rows
        self._inputs = FixedInputs(memory, {
            "ids": (count,), "positions": (count,), "kv_slots": (count,), "picks": (count,),
            "context_lens": (self._sequences,), "block_table": (self._sequences, pages),
        })  # fmt: skip
        arrays = dict(self._inputs.arrays)
        picks = arrays.pop("picks")
        self._hidden = memory.zeros((count, model.dims.hidden), "bf16")
        self._last = memory.zeros((self._sequences, model.dims.hidden), "bf16")
        # A graph reads it: it must stay.
        self._cu_rows = memory.put(np.arange(0, count + 1, self._rows, dtype=np.int32))
        with memory.recording():
            self._inputs.send({"kv_slots": _NOWHERE, "context_lens": self._rows})
            with new_tape(memory) as tape:
                hidden = model.embedding.gather(self._hidden, picks)
                embedded = model.embedding.forward(arrays["ids"])
                batch = Batch("verify", cu_rows=self._cu_rows, state_slots=None, **arrays)
                out = model.mtp.forward(embedded, hidden, batch, state.kv[0])
                # The rows are read after other passes have run, which share their temporary memory.
                copy_rows(self._last, out[self._rows - 1 :: self._rows])
            self._replay = replay_of(memory, tape)
            let_go(memory, tape)
            memory.wait()

    def takes(self, caches: Sequence[SequenceState], counts: Sequence[int]) -> bool:
        """Whether these rows fit: padding must lie inside a sequence's existing tokens."""
        fits = (0 < count <= self._rows <= cache.length + count for cache, count in zip(caches, counts, strict=True))
        return len(caches) == self._sequences and all(fits)

    def run(
        self, caches: Sequence[SequenceState], counts: Sequence[int], ids: Sequence[int], positions: Sequence[int],
        hidden: Any,
    ) -> list[Any]:  # fmt: skip
        """Return the head's last row ``(1, H)`` of each sequence, valid until the next commit of this shape."""
        copy_rows(self._hidden[: len(ids)], hidden)
        self._state.reserve(caches, [cache.length + count for cache, count in zip(caches, counts, strict=True)])
        count = self._sequences * self._rows
        values: dict[str, Any] = {name: np.zeros(count, np.int32) for name in ("ids", "positions", "picks")}
        values["kv_slots"] = np.full(count, _NOWHERE, np.int32)
        row = 0
        for at, (cache, own) in enumerate(zip(caches, counts, strict=True)):
            into, of = slice((at + 1) * self._rows - own, (at + 1) * self._rows), slice(row, row + own)
            values["ids"][into], values["positions"][into] = ids[of], positions[of]
            values["picks"][into] = range(row, row + own)
            values["kv_slots"][into] = self._state.slots(cache, range(cache.length, cache.length + own))
            row += own
        values["context_lens"] = [cache.length + own for cache, own in zip(caches, counts, strict=True)]
        values["block_table"] = _wide_table(self._state, caches, self._pages)
        self._inputs.send(values)
        self._replay.launch()
        return [self._last[at : at + 1] for at in range(self._sequences)]


def _wide_table(state: ModelState, caches: Sequence[SequenceState], pages: int) -> Any:
    """Return the caches' block table with as many columns as a recorded pass has."""
    table = state.table(caches)
    if table.shape[1] > pages:
        raise UsageError(f"a sequence has {table.shape[1]} pages, a pass is recorded for {pages}")
    wide = np.zeros((len(caches), pages), np.int32)
    wide[:, : table.shape[1]] = table
    return wide
