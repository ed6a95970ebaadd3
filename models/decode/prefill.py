"""A pass over prompts, recorded: up to so many rows of up to so many sequences, the rest of both is padding."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from kernel_muster.models.decode.recording import FixedInputs, let_go, new_tape, replay_of
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.state import ModelState, SequenceState
from kernel_muster.models.model import Model, Pass, check_prompts, parts
from kernel_muster.models.policy.rows import padded_rows
from kernel_muster.registry.errors import UsageError

#: Row counts of recorded passes; a pass has at most the last.
CAPTURED_ROWS = (16, 32, 64, 128, 256, 512, 1024)
_NOWHERE = -1


class PrefillStep:
    """One recorded shape. Rows after the prompts' belong to padding sequences, as many as the pages allow."""

    def __init__(
        self, model: Model, state: ModelState, shape: tuple[int, int], pages: int, reads: Sequence[int]
    ) -> None:  # fmt: skip
        memory = model.memory
        self._rows, self._sequences = shape
        self._pages, self._room = pages, pages * state.sizes.page_size
        every = self._sequences + -(-self._rows // self._room)
        self._inputs = FixedInputs(memory, {
            "ids": (self._rows,), "positions": (self._rows,), "kv_slots": (self._rows,), "cu_rows": (every + 1,),
            "context_lens": (every,), "state_slots": (every,), "block_table": (every, pages),
            "last": (self._sequences,),
        })  # fmt: skip
        self._every = every
        arrays = dict(self._inputs.arrays)
        last = arrays.pop("last")
        with memory.recording():
            self._inputs.send(self._padding([]))
            with new_tape(memory) as tape:
                done = model.run(Batch("prefill", **arrays, most_prompts=self._sequences), state, reads)
                self._logits: Any = model.lm_head.forward(model.embedding.gather(done.hidden, last))
            self._hidden, self._features = done.hidden, done.features
            self._replay = replay_of(memory, tape)
            let_go(memory, tape)
            memory.wait()

    def run(self, batch: Batch) -> Pass:
        """Enqueue the pass, with logits of each sequence's last row. Arrays stay valid until this shape's next pass."""
        rows, sequences = batch.rows, batch.sequences
        values = self._padding(batch.counts)
        for name in ("ids", "positions", "kv_slots"):
            values[name][:rows] = getattr(batch, name)
        for name in ("context_lens", "state_slots"):
            values[name][:sequences] = getattr(batch, name)
        values["block_table"][:sequences, : batch.block_table.shape[1]] = batch.block_table
        values["last"][:sequences] = batch.last_rows
        self._inputs.send(values)
        self._replay.launch()
        features = None if self._features is None else self._features[:rows]
        return Pass(batch, self._hidden[:rows], features, self._logits[:sequences])

    def _padding(self, counts: Sequence[int]) -> dict[str, Any]:
        """Return inputs for sequences with these rows: empty ones up to the shape's, then padding for the rest."""
        rows, rest = [*counts, *[0] * (self._sequences - len(counts))], self._rows - sum(counts)
        while len(rows) < self._every:
            rows.append(min(rest, self._room))
            rest -= rows[-1]
        values = {name: np.zeros(self._rows, np.int32) for name in ("ids", "positions")}
        values["kv_slots"] = np.full(self._rows, _NOWHERE, np.int32)
        values["cu_rows"] = np.cumsum([0, *rows], dtype=np.int32)
        values["context_lens"] = np.array(rows, np.int32)
        values["state_slots"] = np.full(self._every, _NOWHERE, np.int32)
        values["block_table"] = np.zeros((self._every, self._pages), np.int32)
        values["last"] = np.zeros(self._sequences, np.int32)
        return values


class Prefill:
    """Passes over prompts as ``Model.prefill`` makes them, from recordings of one model and state."""

    def __init__(self, model: Model, state: ModelState, pages: int) -> None:
        self._model, self._state, self._pages = model, state, pages
        self._captured_rows = [rows for rows in CAPTURED_ROWS if rows <= model.max_rows] or [model.max_rows]
        self._steps: dict[tuple[tuple[int, int], tuple[int, ...]], PrefillStep] = {}

    def __call__(
        self, state: ModelState, sequences: Sequence[SequenceState], prompts: Sequence[Sequence[int]],
        reads: Sequence[int] = (),
    ) -> Iterator[Pass]:  # fmt: skip
        """Yield the passes. UsageError for an empty prompt, or a context beyond the model's or the recorded one."""
        if state is not self._state:
            raise UsageError("prompts are read into the state that their passes are recorded for")
        check_prompts(state, sequences, prompts)
        for part in parts([len(prompt) for prompt in prompts], self._captured_rows[-1]):
            chosen = [sequences[index] for index, _ in part]
            ids = [prompts[index][rows] for index, rows in part]
            batch = state.batch(chosen, ids, "prefill")
            if batch.block_table.shape[1] > self._pages:
                raise UsageError(f"a prompt needs {batch.block_table.shape[1]} pages, passes have {self._pages}")
            done = self._step(batch, reads).run(batch)
            state.advance(chosen, [len(row) for row in ids])
            yield done

    def _step(self, batch: Batch, reads: Sequence[int]) -> PrefillStep:
        rows = next(size for size in self._captured_rows if size >= batch.rows)
        shape = (rows, padded_rows(batch.sequences))
        key = shape, tuple(reads)
        if key not in self._steps:
            self._steps[key] = PrefillStep(self._model, self._state, shape, self._pages, reads)
        return self._steps[key]
