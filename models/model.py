"""A built model, and its passes: prefill, decode, and the verify pass of speculation.

Logits are BF16 ``(M, V)``. A verify pass with GEMV kernels in all projections (8 rows or fewer) gives the bits of
decode, row by row, in logits and states. More rows may use tile GEMMs, which round the last bit differently.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from kernel_muster.models.dims import ModelDims
from kernel_muster.models.heads.embedding import Embedding
from kernel_muster.models.heads.lm_head import LmHead
from kernel_muster.models.heads.mtp import MtpHead
from kernel_muster.models.heads.sampler import Sampler
from kernel_muster.models.layers.decoder import DecoderLayer, OutputNorm
from kernel_muster.models.layers.gdn import Gdn
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.memory import Memory, copy_rows
from kernel_muster.models.memory.scratch import Scratch
from kernel_muster.models.memory.state import ModelState, SequenceState, StateSizes
from kernel_muster.models.weights.layout import PlannedWeight
from kernel_muster.registry.contract.builders import Maturity
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen


@frozen
class Pass:
    """The result of one pass: the batch on the host, its rows after the last norm ``(M, H)``, and drafters' input.

    ``features (M, F * H)`` are the outputs of the requested layers, side by side.
    """

    batch: Batch
    hidden: Any
    features: Any | None
    logits: Any = None


@frozen
class Model:
    """A model whose layers hold their kernels. Without weights it is a plan that cannot compute."""

    dims: ModelDims
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: OutputNorm
    lm_head: LmHead
    sampler: Sampler
    mtp: MtpHead | None
    scratch: Scratch
    max_rows: int
    maturity: Maturity
    memory: Memory
    weights: tuple[PlannedWeight, ...]

    def new_state(self, sizes: StateSizes) -> ModelState:
        """Allocate state for sequences in the model's memory. The caller owns it."""
        return ModelState(self.dims, sizes, self.memory.zeros)

    def run(self, batch: Batch, state: ModelState, reads: Sequence[int] = ()) -> Pass:
        """Run all layers over a batch, without logits. ``reads`` are the layers whose output a drafter needs."""
        if not set(reads) <= set(range(len(self.layers))):
            raise UsageError(f"{self.dims.name} has {len(self.layers)} layers, a drafter reads {list(reads)}")
        here = batch.on(self.memory)
        residual = self.embedding.forward(here.ids)
        features = _Features(residual, reads)
        pending = None
        for layer in self.layers:
            x = layer.enter(pending, residual)
            features.take(layer.index - 1, residual)  # entering added the result of the previous layer
            memory = state.kv.get(layer.index) or state.recurrent[layer.index]
            pending = layer.finish(layer.mix(x, here, memory), residual, here)
        hidden = self.norm.forward(pending, residual)
        features.take(len(self.layers) - 1, residual)
        return Pass(batch, hidden, features.rows)

    def prefill(
        self,
        state: ModelState,
        sequences: Sequence[SequenceState],
        prompts: Sequence[Sequence[int]],
        reads: Sequence[int] = (),
    ) -> Iterator[Pass]:
        """Yield the passes over prompts, of at most ``max_rows`` rows, with logits of the last rows ``(S, V)``.

        A longer prompt uses several passes. UsageError, before the first one, for an empty prompt or one beyond the
        model's context.
        """
        check_prompts(state, sequences, prompts)
        for part in parts([len(prompt) for prompt in prompts], self.max_rows):
            chosen = [sequences[index] for index, _ in part]
            ids = [prompts[index][rows] for index, rows in part]
            batch = state.batch(chosen, ids, "prefill")
            done = self.run(batch, state, reads)
            state.advance(chosen, [len(row) for row in ids])
            last = self.embedding.pick(done.hidden, batch.last_rows)
            yield Pass(batch, done.hidden, done.features, self.lm_head.forward(last))

    def decode(
        self, state: ModelState, sequences: Sequence[SequenceState], ids: Sequence[int], reads: Sequence[int] = ()
    ) -> Pass:
        """Read one token of each sequence, with its logits."""
        batch = state.batch(sequences, [[token] for token in ids], "decode")
        done = self.run(batch, state, reads)
        state.advance(sequences, [1] * len(sequences))
        return Pass(batch, done.hidden, done.features, self.lm_head.forward(done.hidden))

    def records_verify(self, rows: int, sequences: int) -> bool:
        """Whether a verify pass of M rows of S sequences can be recorded, to be replayed with other arrays."""
        rules = [layer.mixer.rule for layer in self.layers if isinstance(layer.mixer, Gdn)]
        return all(rule.records_verify(rows, sequences) for rule in rules)

    def verify(
        self,
        state: ModelState,
        sequences: Sequence[SequenceState],
        ids: Sequence[Sequence[int]],
        reads: Sequence[int] = (),
    ) -> Pass:
        """Read each sequence's last token and its drafts, with logits of every row.

        The caller then keeps some rows of each with ``state.roll_back``. No other pass may run before that.
        """
        batch = state.batch(sequences, ids, "verify")
        state.await_choice(batch)
        done = self.run(batch, state, reads)
        return Pass(batch, done.hidden, done.features, self.lm_head.forward(done.hidden))

    def greedy(self, logits: Any) -> list[int]:
        """Return the id of each row's largest logit."""
        return [int(token) for token in self.lm_head.greedy(logits).tolist()]


class _Features:
    """The residual after the layers that a drafter reads, side by side ``(M, F * H)``."""

    def __init__(self, residual: Any, reads: Sequence[int]) -> None:
        self._reads, self._width = tuple(reads), residual.shape[1]
        size = (residual.shape[0], len(self._reads) * self._width)
        self.rows: Any | None = np.empty_like(residual, shape=size) if reads else None

    def take(self, layer: int, residual: Any) -> None:
        """Keep the output of a layer, if it is read."""
        if self.rows is not None and layer in self._reads:
            start = self._reads.index(layer) * self._width
            copy_rows(self.rows[:, start : start + self._width], residual)


def check_prompts(
    state: ModelState, sequences: Sequence[SequenceState], prompts: Sequence[Sequence[int]]
) -> None:  # fmt: skip
    """UsageError unless there is one prompt for each sequence, none of them empty or too long for the model."""
    if len(prompts) != len(sequences):
        raise UsageError(f"{len(prompts)} prompts for {len(sequences)} sequences: expected one each")
    if not all(map(len, prompts)):
        raise UsageError("a prompt is empty, expected at least one token")
    state.check_context([one.length + len(prompt) for one, prompt in zip(sequences, prompts, strict=True)])


def parts(counts: Sequence[int], most: int) -> Iterator[list[tuple[int, slice]]]:
    """Cut rows of several sequences into passes of at most ``most`` rows, each sequence's own in order."""
    part: list[tuple[int, slice]] = []
    room = most
    for index, count in enumerate(counts):
        start = 0
        while start < count:
            size = min(count - start, room)
            part.append((index, slice(start, start + size)))
            start, room = start + size, room - size
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part
