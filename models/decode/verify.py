"""The verify pass of speculation, recorded: so many sequences with so many rows each, logits of every row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_muster.models.decode.recording import FixedInputs, let_go, new_tape, replay_of
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.state import ModelState
from kernel_muster.models.model import Model, Pass

_NOWHERE = -1


def _widened(table: Any, pages: int) -> Any:
    """Return a block table with more columns, beyond every context."""
    wide = np.zeros((table.shape[0], pages), np.int32)
    wide[:, : table.shape[1]] = table
    return wide


class VerifyStep:
    """One recorded shape. Recurrent states after each row stay until the caller has rolled back."""

    def __init__(
        self, model: Model, state: ModelState, shape: tuple[int, int], pages: int, reads: Sequence[int]
    ) -> None:  # fmt: skip
        memory = model.memory
        sequences, rows = shape
        count = sequences * rows
        self._pages = pages
        self._inputs = FixedInputs(memory, {
            "ids": (count,), "positions": (count,), "kv_slots": (count,), "context_lens": (sequences,),
            "state_slots": (sequences,), "block_table": (sequences, pages),
        })  # fmt: skip
        self._cu_rows = memory.put(np.arange(0, count + 1, rows, dtype=np.int32))  # a graph reads it: it must stay
        with memory.recording():
            # Padding: rows of one page without kept state.
            self._inputs.send({"kv_slots": _NOWHERE, "state_slots": _NOWHERE, "context_lens": rows})
            with new_tape(memory) as tape:
                batch = Batch("verify", cu_rows=self._cu_rows, **self._inputs.arrays)
                done = model.run(batch, state, reads)
                self._logits: Any = model.lm_head.forward(done.hidden)
            self._hidden, self._features = done.hidden, done.features
            self._replay = replay_of(memory, tape)
            self.launches = len(tape)
            let_go(memory, tape)
            memory.wait()
        self._snapshots = [(pool, pool.rows) for pool in state.recurrent.values()]

    def run(self, batch: Batch) -> Pass:
        """Enqueue the pass. Its arrays are valid until the next one of this shape."""
        names = ("ids", "positions", "kv_slots", "context_lens", "state_slots")
        table = _widened(batch.block_table, self._pages)
        self._inputs.send({"block_table": table, **{name: getattr(batch, name) for name in names}})
        for pool, rows in self._snapshots:
            pool.rows = rows
        self._replay.launch()
        return Pass(batch, self._hidden, self._features, self._logits)
