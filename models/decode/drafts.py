"""Drafts of an MTP head, recorded: all steps of one proposal for so many sequences as one replay."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_muster.models.batch import Batch
from kernel_muster.models.decode.recording import FixedInputs, new_tape, replay_of
from kernel_muster.models.memory import copy_rows
from kernel_muster.models.model import Model
from kernel_muster.models.state import ModelState, SequenceState
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
        # A row of ids for each draft, padded so that every one begins where kernels may read it.
        width = -(-sequences // _WORDS) * _WORDS
        self._ids = memory.zeros((drafts, width), "i32")
        self._hidden = memory.zeros((sequences, model.dims.hidden), "bf16")
        self.logits: list[Any] = []  # of each draft (S, V), until the next proposal
        nowhere = {f"kv_slots{step}": _NOWHERE for step in self._steps}
        with memory.active():
            self._inputs.send({**nowhere, **{f"context_lens{step}": 1 for step in self._steps}})
            with new_tape(memory) as tape:
                self._record(model, state)
            self._replay = replay_of(memory, tape)
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
        """Return drafts i32 ``(S, drafts)`` behind rows ``(1, H)`` that stand at these positions; caches stay."""
        for at, row in enumerate(rows):
            copy_rows(self._hidden[at : at + 1], row)
        lengths = [cache.length for cache in caches]
        self._state.reserve(caches, [length + len(self._steps) for length in lengths])
        table = self._state.table(caches)
        if table.shape[1] > self._pages:
            raise UsageError(f"a sequence has {table.shape[1]} pages, drafts are recorded for {self._pages}")
        wide = np.zeros((len(caches), self._pages), np.int32)
        wide[:, : table.shape[1]] = table
        values: dict[str, Any] = {"table": wide}
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
