"""The verify pass of speculation, recorded: so many sequences with so many rows each, logits of every row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_muster.models.batch import Batch
from kernel_muster.models.decode.rung import replay_of
from kernel_muster.models.decode.transfer import upload_to
from kernel_muster.models.memory import Memory
from kernel_muster.models.model import Model, Pass
from kernel_muster.models.state import ModelState
from kernel_muster.registry.tape import Tape

_NAMES = ("ids", "positions", "kv_slots", "context_lens", "state_slots", "block_table")
_NOWHERE = -1
_WORDS = 4


class VerifyBuffers:
    """Fixed arrays for one shape of verify pass, renewed by one copy."""

    def __init__(self, memory: Memory, sequences: int, rows: int, pages: int) -> None:
        count = sequences * rows
        self._shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_NAMES[:3], (count,))
        self._shapes.update(context_lens=(sequences,), state_slots=(sequences,), block_table=(sequences, pages))
        self._places: dict[str, slice] = {}
        words = 0
        for name, shape in self._shapes.items():
            size = int(np.prod(shape))
            self._places[name] = slice(words, words + size)
            words += -(-size // _WORDS) * _WORDS
        pack = memory.zeros((words,), "i32")
        self._words, self._upload = words, upload_to(memory, pack)
        arrays = {name: pack[place].reshape(self._shapes[name]) for name, place in self._places.items()}
        cu_rows = memory.put(np.arange(0, count + 1, rows, dtype=np.int32))
        self.batch = Batch("verify", cu_rows=cu_rows, **arrays)

    def clear(self, rows: int) -> None:
        """Make every sequence padding: rows of one page that keep nothing."""
        words = self._upload.stage()
        words[:] = 0
        words[self._places["kv_slots"]] = words[self._places["state_slots"]] = _NOWHERE
        words[self._places["context_lens"]] = rows
        self._upload.send(self._words)

    def send(self, batch: Batch) -> None:
        """Bring a batch of the host here."""
        words = self._upload.stage()
        words[:] = 0
        for name, place in self._places.items():
            if name != "block_table":
                words[place] = getattr(batch, name)
        table = words[self._places["block_table"]].reshape(self._shapes["block_table"])
        table[:, : batch.block_table.shape[1]] = batch.block_table
        self._upload.send(self._words)


class VerifyStep:
    """One recorded shape. Recurrent states after each row stay until the caller has rolled back."""

    def __init__(
        self, model: Model, state: ModelState, shape: tuple[int, int], pages: int, reads: Sequence[int]
    ) -> None:  # fmt: skip
        memory = model.memory
        sequences, rows = shape
        self._buffers = VerifyBuffers(memory, sequences, rows, pages)

        def make_scratch(size: int) -> Any:
            return memory.empty((size,), "u8")

        with memory.active():
            self._buffers.clear(rows)
            with Tape(overlap=not memory.is_host, make_scratch=make_scratch) as tape:
                done = model.run(self._buffers.batch, state, reads)
                self._logits: Any = model.lm_head.forward(done.hidden)
            self._hidden, self._features = done.hidden, done.features
            self._replay = replay_of(memory, tape)
            memory.wait()
        self._snapshots = [(pool, pool.rows) for pool in state.recurrent.values()]
        self.launches = len(tape)

    def run(self, batch: Batch) -> Pass:
        """Enqueue the pass; its arrays hold until the next one of this shape."""
        self._buffers.send(batch)
        for pool, rows in self._snapshots:
            pool.rows = rows
        self._replay.launch()
        return Pass(batch, self._hidden, self._features, self._logits)
