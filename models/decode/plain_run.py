"""A plain run of prompts through the decode engine."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Protocol

from kernel_muster.models.decode.buffers import StepBuffers
from kernel_muster.models.decode.captured import CapturedStep
from kernel_muster.models.decode.generate import Generated
from kernel_muster.models.decode.sampling import Sampling, UniformStream
from kernel_muster.models.memory.state import ModelState, SequenceState, i32
from kernel_muster.models.model import Model, Pass


class Engine(Protocol):
    """The parts of the decode engine for a run."""

    model: Model

    @property
    def state(self) -> ModelState:
        """Caches and recurrent states of all sequences."""

    @property
    def buffers(self) -> StepBuffers:
        """The fixed arrays of a step."""

    @property
    def prefill(self) -> Callable[..., Iterator[Pass]]:
        """Run prompts in chunks. Yields each pass."""

    def captured_step(self, sequences: int) -> CapturedStep:
        """Return the recorded step for a number of sequences."""

    def enqueue(
        self,
        sequences: Sequence[SequenceState],
        ids: Sequence[int] | None,
        sampling: Sampling,
        uniform: Sequence[float],
    ) -> CapturedStep:
        """Enqueue one step."""

    def tokens(self) -> list[int]:
        """Return the tokens of the oldest step in flight."""


class PlainRun:
    """One run of prompts without drafts: prefill, then replays, one step ahead of the tokens on the host."""

    def __init__(self, engine: Engine, sampling: Sampling, keep_logits: bool) -> None:
        self._engine, self._sampling, self._keeps = engine, sampling, keep_logits
        self._memory = engine.model.memory

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        """Return the tokens. Sequences are closed in any case."""
        found = Generated([[] for _ in prompts], [[] for _ in prompts])
        random = [self._sampling.stream(index) for index in range(len(prompts))]
        state = self._engine.state
        live: list[SequenceState] = []
        try:
            live.extend(state.open() for _ in prompts)
            start = perf_counter()
            self._prefill(live, prompts, random, found)
            found.prefill_s = perf_counter() - start
            if new_tokens > 1:
                self._steps(live, random, found, new_tokens - 1)
        except BaseException:
            self._engine.buffers.drop_ids()  # the last step's tokens are not needed
            raise
        finally:
            for one in live:
                state.close(one)
        return found

    def _prefill(
        self, live: list[SequenceState], prompts: Sequence[Sequence[int]], random: list[UniformStream],
        found: Generated,
    ) -> None:  # fmt: skip
        by_slot = {one.slot: index for index, one in enumerate(live)}
        for done in self._engine.prefill(self._engine.state, live, prompts):
            which = [by_slot[slot] for slot in done.batch.state_slots.tolist()]
            ends = done.batch.context_lens.tolist()
            complete = [at for at, index in enumerate(which) if ends[at] == len(prompts[index])]
            if not complete:
                continue
            tokens = self._chosen(done.logits, [which[at] for at in complete], complete, random)
            logits = self._memory.get(done.logits) if self._keeps else None
            for at, token in zip(complete, tokens, strict=True):
                found.tokens[which[at]].append(token)
                if logits is not None:
                    found.logits[which[at]].append(logits[at])

    def _chosen(
        self, logits: Any, prompts: Sequence[int], rows: Sequence[int], random: list[UniformStream]
    ) -> list[int]:
        """Choose a token after each complete prompt. Incomplete rows consume no random number."""
        if self._sampling.is_greedy:
            ids = self._engine.model.greedy(logits)
            return [ids[row] for row in rows]
        count, how = logits.shape[0], self._sampling
        uniform = i32([0] * count).view("f4")
        for row, prompt in zip(rows, prompts, strict=True):
            uniform[row] = random[prompt].next()
        full = {"temperature": how.temperature, "top_p": how.top_p}
        arrays = {name: self._memory.put(uniform * 0 + uniform.dtype.type(value)) for name, value in full.items()}
        top_k = self._memory.put(i32([how.top_k] * count))
        chosen = self._engine.model.sampler.sample(logits, **arrays, top_k=top_k, uniform=self._memory.put(uniform))
        ids = chosen.tolist()
        return [ids[row] for row in rows]

    def _steps(
        self, live: list[SequenceState], random: list[UniformStream], found: Generated, steps: int
    ) -> None:  # fmt: skip
        engine = self._engine
        engine.captured_step(len(live))  # recording belongs to no step
        last = perf_counter()
        ids: list[int] | None = [row[-1] for row in found.tokens]
        for step in range(steps):
            uniform = () if self._sampling.is_greedy else [one.next() for one in random]
            captured = engine.enqueue(live, ids, self._sampling, uniform)
            ids = None
            if self._keeps:
                for row, logits in zip(found.logits, self._memory.get(captured.logits[: len(live)]), strict=True):
                    row.append(logits)
            if step:
                last = self._take(found, last)
        self._take(found, last)
        found.plain_steps += steps * len(live)

    def _take(self, found: Generated, last: float) -> float:
        """Receive the tokens of the oldest step. Return the time."""
        for row, token in zip(found.tokens, self._engine.tokens(), strict=True):
            row.append(token)
        now = perf_counter()
        found.step_s.append(now - last)
        return now
