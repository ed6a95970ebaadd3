"""The decode engine: several sequences, one replay for each step.

The hot path makes no lookups, no compilation and no device allocation, and waits only for tokens. A step is enqueued
before the host has the tokens of the previous one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from kernel_muster.models.decode.buffers import StepBuffers
from kernel_muster.models.decode.captured import CapturedStep
from kernel_muster.models.decode.generate import Gate, Generated, GreedyDecoder, check_run
from kernel_muster.models.decode.plain_run import PlainRun
from kernel_muster.models.decode.prefill import Prefill
from kernel_muster.models.decode.proposer import Proposer
from kernel_muster.models.decode.recording import Replay
from kernel_muster.models.decode.sampling import Sampling, check_uniform
from kernel_muster.models.decode.transfer import DEPTH
from kernel_muster.models.decode.verify import VerifyStep
from kernel_muster.models.memory.memory import enough_memory
from kernel_muster.models.memory.state import ModelState, SequenceState, StateSizes, is_int
from kernel_muster.models.model import Model, Pass
from kernel_muster.models.policy.rows import padded_rows
from kernel_muster.registry.errors import UsageError

_GREEDY = Sampling()


class DecodeEngine:
    """Runs a model's sequences. It owns state, buffers and recorded steps, and frees them in :meth:`close`.

    ``max_context`` bounds a sequence's tokens: recorded steps have a fixed number of pages for each row. Close it only
    after its last use by proposers.
    """

    def __init__(self, model: Model, sizes: StateSizes, max_context: int | None = None) -> None:
        if max_context is not None and not (is_int(max_context) and max_context >= 1):
            raise UsageError(f"max_context is {max_context}, expected at least 1")
        longest = sizes.pages * sizes.page_size if max_context is None else max_context
        self.model, self.sizes = model, sizes
        self._rows = padded_rows(sizes.sequences)
        self._pages = min(-(-longest // sizes.page_size), sizes.pages)
        with enough_memory(model.memory, f"a state of {sizes}"), model.memory.active():
            self._state: ModelState | None = model.new_state(sizes)
            self._buffers: StepBuffers | None = StepBuffers(model.memory, self._rows, self._pages)
        self._captured: dict[int, CapturedStep] = {}
        self._verifies: dict[tuple[tuple[int, int], tuple[int, ...]], VerifyStep] = {}
        # The host gains nothing from a recording, and padding costs it. A model with another way to read prompts
        # keeps it.
        is_eager = model.memory.is_host or type(model).prefill is not Model.prefill
        self._prefill: Callable[..., Iterator[Pass]] | None = (
            model.prefill if is_eager else Prefill(model, self.state, self._pages)
        )
        self._fed: list[SequenceState] = []  # the sequences whose tokens the next step finds in the buffers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def state(self) -> ModelState:
        """The sequences' state. UsageError once closed."""
        if self._state is None:
            raise UsageError("this decode engine is closed")
        return self._state

    @property
    def buffers(self) -> StepBuffers:
        """The arrays of steps. UsageError once closed."""
        if self._buffers is None:
            raise UsageError("this decode engine is closed")
        return self._buffers

    @property
    def prefill(self) -> Callable[..., Iterator[Pass]]:
        """Return a replacement of ``Model.prefill``, on a device from recordings. UsageError once closed."""
        if self._prefill is None:
            raise UsageError("this decode engine is closed")
        return self._prefill

    def close(self) -> None:
        """Let go of everything and give its memory back."""
        self.model.memory.wait()
        self._captured.clear()
        self._verifies.clear()
        self._fed, self._state, self._buffers, self._prefill = [], None, None, None
        self.model.memory.release()

    def prepare(self, sequences: Iterable[int]) -> None:
        """Record the steps for so many sequences now, and not when they first run."""
        for count in sequences:
            self.captured_step(count)

    def captured_step(self, sequences: int) -> CapturedStep:
        """Return the step for this number of sequences, recorded now if necessary."""
        rows = padded_rows(sequences)
        if rows > self._rows:
            raise UsageError(f"{sequences} sequences: this engine has room for {self.sizes.sequences}")
        if rows not in self._captured:
            with enough_memory(self.model.memory, f"a step of {rows} rows"):
                self._captured[rows] = CapturedStep(self.model, self.state, self.buffers, rows)
            self._fed = []  # recording has written its own choice where tokens stand
        return self._captured[rows]

    def enqueue(
        self, sequences: Sequence[SequenceState], ids: Sequence[int] | None = None, sampling: Sampling = _GREEDY,
        uniform: Sequence[Any] = (),
    ) -> CapturedStep:  # fmt: skip
        """Enqueue one step and the fetch of its tokens for :meth:`tokens`, with at most ``DEPTH`` steps in flight.

        Without ``ids`` each sequence continues from its last choice, already on the device: then these must be the
        sequences of the last step, in its order. UsageError otherwise, without any effect.
        """
        self.state.check_open(sequences)
        if ids is not None and len(ids) != len(sequences):
            raise UsageError(f"{len(ids)} ids for {len(sequences)} sequences: expected one each")
        self.state.check_ids(() if ids is None else ids)
        if not sampling.is_greedy and len(uniform) != len(sequences):
            raise UsageError(f"{len(uniform)} random numbers for {len(sequences)} sequences: expected one each")
        if not sampling.is_greedy:
            check_uniform(uniform)
        step = self.captured_step(len(sequences))
        replay = self._replay(step, sampling)
        if self.buffers.pending >= DEPTH:
            raise UsageError(f"{self.buffers.pending} steps were enqueued whose tokens nobody has taken: take them")
        if ids is None and not _are_same(sequences, self._fed):
            raise UsageError("other sequences than in the last step: say which tokens they read")
        self._check_pages(sequences, [1] * len(sequences))
        self.state.reserve(sequences, [one.length + 1 for one in sequences])
        if ids is not None:
            self.buffers.send_ids(ids)
        self.buffers.send(self.state, sequences, sampling, uniform)
        replay.launch()
        self.buffers.begin_ids(len(sequences))
        self.state.advance(sequences, [1] * len(sequences))
        self._fed = list(sequences)
        return step

    def tokens(self) -> list[int]:
        """Wait for the oldest step in flight, and return its tokens."""
        return self.buffers.finish_ids()

    def decode(
        self, state: ModelState, sequences: Sequence[SequenceState], ids: Sequence[int], reads: Sequence[int] = ()
    ) -> Pass:
        """Run one plain step like ``Model.decode``, from its graph. Without one if a drafter reads layers."""
        if state is not self.state:
            raise UsageError("steps run on the state that they are recorded for, this engine's own")
        if len(ids) != len(sequences):
            raise UsageError(f"{len(ids)} ids for {len(sequences)} sequences: expected one each")
        if reads:
            self._fed = []
            return self.model.decode(state, sequences, ids, reads)
        if self.buffers.pending:
            raise UsageError("steps were enqueued whose tokens nobody has taken: take them before another pass")
        self._check_pages(sequences, [1] * len(sequences))
        batch = state.batch(sequences, [[token] for token in ids], "decode")
        step = self.enqueue(sequences, ids)
        self.tokens()
        count = len(sequences)
        return Pass(batch, step.hidden[:count], None, step.logits[:count])

    def verify(
        self, state: ModelState, sequences: Sequence[SequenceState], ids: Sequence[Sequence[int]],
        reads: Sequence[int] = (),
    ) -> Pass:  # fmt: skip
        """Run a verify pass as ``Model.verify`` does, from its recording: one for each number of sequences and rows.

        Where sequences differ in rows, or kernels are absent without which a pass cannot be recorded, it is eager.
        """
        if state is not self.state:
            raise UsageError("steps run on the state that they are recorded for, this engine's own")
        if len(ids) != len(sequences):
            raise UsageError(f"rows of {len(ids)} sequences for {len(sequences)} of them: expected as many")
        self._fed = []  # the caller chooses the kept rows, and so the next token
        counts = {len(row) for row in ids}
        if len(counts) != 1 or not self.model.records_verify(len(ids) * max(counts), len(ids)):
            return self.model.verify(state, sequences, ids, reads)
        self._check_pages(sequences, [len(row) for row in ids])
        batch = state.batch(sequences, ids, "verify")
        shape = (len(sequences), counts.pop())
        step = self._verifies.get((shape, tuple(reads)))
        if step is None:
            step = VerifyStep(self.model, state, shape, self._pages, reads)
            self._verifies[shape, tuple(reads)] = step
        state.await_choice(batch)
        return step.run(batch)

    @property
    def longest(self) -> int:
        """The tokens of one sequence with pages in recorded steps: ``max_context``, rounded up to pages."""
        return self._pages * self.sizes.page_size

    def _check_pages(self, sequences: Sequence[SequenceState], rows: Sequence[int]) -> None:
        size = self.sizes.page_size
        wanted = [-(-(one.length + count) // size) for one, count in zip(sequences, rows, strict=True)]
        most = max([*wanted, *(len(one.pages) for one in sequences)], default=0)
        if most > self._pages:
            raise UsageError(f"a sequence needs {most} pages, a step is recorded for {self._pages}")

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, sampling: Sampling = _GREEDY, *,
        keep_logits: bool = False, proposer: Proposer | None = None, gate: Gate | None = None,
    ) -> Generated:  # fmt: skip
        """Return ``new_tokens`` tokens for each prompt. With a proposer, drafted and verified, greedy only.

        A run that does not fit is refused before it begins. Tokens still in flight are dropped.
        """
        check_run(self.state, prompts, new_tokens, self.longest)
        self.buffers.drop_ids()
        if proposer is not None:
            if not sampling.is_greedy:
                raise UsageError(f"{sampling}: drafts are accepted by the greedy choice only")
            self._fed = []
            decoder = GreedyDecoder(
                self.model,
                self.state,
                proposer,
                gate or Gate(),
                keep_logits,
                self.decode,
                self.verify,
                self.prefill,
                self.longest,
            )
            with enough_memory(self.model.memory, "a pass"):
                return decoder.run(prompts, new_tokens)
        with enough_memory(self.model.memory, "a pass"), self.model.memory.active():
            return PlainRun(self, sampling, keep_logits).run(prompts, new_tokens)

    def _replay(self, step: CapturedStep, sampling: Sampling) -> Replay:
        if sampling.is_greedy:
            return step.greedy
        if step.sampled is None:
            raise UsageError("no kernel samples tokens here: decode greedily")
        return step.sampled


def _are_same(mine: Sequence[SequenceState], other: Sequence[SequenceState]) -> bool:
    return len(mine) == len(other) and all(one is another for one, another in zip(mine, other, strict=True))
