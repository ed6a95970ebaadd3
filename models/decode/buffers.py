"""The inputs that change in each step, in fixed arrays: a recorded step reads them, one small copy updates them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_muster.models.decode.sampling import Sampling
from kernel_muster.models.decode.transfer import download_from, upload_to
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.memory import Memory
from kernel_muster.models.memory.state import ModelState, SequenceState
from kernel_muster.registry.errors import UsageError

_INTEGERS = ("positions", "kv_slots", "context_lens", "state_slots", "top_k")
_FLOATS = ("temperature", "top_p", "uniform")
# Kernels need arrays that begin at multiples of 16 bytes.
_WORDS = 4
_NOWHERE = -1


class StepBuffers:
    """Arrays for up to ``rows`` rows; a smaller step takes the first ones. Padding rows touch no state.

    ``ids i32 (rows,)`` is fed back: the last step's choice is the next step's input, and no host is asked.
    """

    def __init__(self, memory: Memory, rows: int, pages: int) -> None:
        self.rows, self.pages = rows, pages
        each = -(-rows // _WORDS) * _WORDS
        names = (*_INTEGERS, *_FLOATS)
        self._places = {name: slice(at * each, at * each + rows) for at, name in enumerate(names)}
        self._words = each * len(names)
        pack = memory.zeros((self._words,), "i32")
        self._arrays = {name: pack[place] for name, place in self._places.items()}
        for name in _FLOATS:
            self._arrays[name] = self._arrays[name].view(np.float32)
        self.ids = memory.zeros((rows,), "i32")
        self.table = memory.put(np.full((rows, pages), _NOWHERE, np.int32))
        self._cu_rows = memory.put(np.arange(rows + 1, dtype=np.int32))
        self._pack_up, self._ids_up = upload_to(memory, pack), upload_to(memory, self.ids)
        self._table_up = upload_to(memory, self.table.reshape(-1))
        self._ids_down = download_from(memory, self.ids)
        self._sent = np.full((rows, pages), _NOWHERE, np.int32)
        self.clear()

    def batch(self, rows: int) -> Batch:
        """Return the views for a step of ``rows`` rows."""
        names = ("positions", "kv_slots", "context_lens", "state_slots")
        arrays = {name: self._arrays[name][:rows] for name in names}
        return Batch(
            "decode", ids=self.ids[:rows], cu_rows=self._cu_rows[: rows + 1], block_table=self.table[:rows], **arrays
        )

    def sampling(self, rows: int) -> dict[str, Any]:
        """Return the views for the sampling kernel."""
        return {name: self._arrays[name][:rows] for name in ("temperature", "top_k", "top_p", "uniform")}

    def send_ids(self, ids: Sequence[int]) -> None:
        """Set the tokens that the next step reads."""
        words = self._ids_up.stage()
        words[: len(ids)] = ids
        self._ids_up.send(len(ids))

    def clear(self) -> None:
        """Make every row padding: the next pass touches no sequence."""
        self._pad(self._pack_up.stage())
        self._pack_up.send(self._words)

    def _pad(self, words: Any) -> None:
        words[:] = 0
        words[self._places["kv_slots"]] = words[self._places["state_slots"]] = _NOWHERE
        words.view(np.float32)[self._places["top_p"]] = 1  # the sampling kernel requires a valid value in every row

    def send(
        self, state: ModelState, sequences: Sequence[SequenceState], sampling: Sampling, uniform: Sequence[Any]
    ) -> None:
        """Place the next token of each sequence. Its pages are already reserved."""
        self._send_table(state, sequences)
        words = self._pack_up.stage()
        self._pad(words)
        count = len(sequences)
        lengths = [sequence.length for sequence in sequences]

        def put(name: str, values: Any) -> None:
            words[self._places[name]][:count] = values

        put("positions", lengths)
        put("context_lens", [length + 1 for length in lengths])
        put("state_slots", [sequence.slot for sequence in sequences])
        put("kv_slots", [state.slots(one, (one.length,))[0] for one in sequences])
        if not sampling.is_greedy:
            put("top_k", sampling.top_k)
            floats = words.view(np.float32)
            for name, value in (("temperature", sampling.temperature), ("top_p", sampling.top_p), ("uniform", uniform)):
                floats[self._places[name]][:count] = value
        self._pack_up.send(self._words)

    def _send_table(self, state: ModelState, sequences: Sequence[SequenceState]) -> None:
        """Send the pages, if any sequence took a new one or stands in another row."""
        found = state.table(sequences)
        rows, width = found.shape
        if np.array_equal(self._sent[:rows, :width], found):
            return
        self._sent[:rows, :width] = found
        words = self._table_up.stage()
        words[: rows * self.pages] = self._sent[:rows].reshape(-1)
        self._table_up.send(rows * self.pages)

    @property
    def pending(self) -> int:
        """The number of fetches in flight."""
        return len(self._ids_down)

    def begin_ids(self, rows: int) -> None:
        """Enqueue the fetch of a step's chosen tokens."""
        self._ids_down.begin(rows)

    def drop_ids(self) -> None:
        """Drop all fetches in flight."""
        self._ids_down.drop()

    def finish_ids(self) -> list[int]:
        """Wait for the oldest fetch and return it. UsageError if there is none."""
        if not self.pending:
            raise UsageError("no step whose tokens nobody has taken: enqueue one first")
        found: list[int] = self._ids_down.finish().tolist()
        return found
