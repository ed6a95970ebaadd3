"""One rung of the padded batch ladder: a step for so many rows, recorded once and replayed."""

from typing import Any, Protocol

from kernel_muster.models.decode.buffers import StepBuffers
from kernel_muster.models.memory import DeviceMemory, Memory
from kernel_muster.models.model import Model
from kernel_muster.models.state import ModelState
from kernel_muster.registry.tape import Tape


class Replay(Protocol):
    """A recorded step, ready to be enqueued."""

    def launch(self) -> None:
        """Enqueue all of it: no lookup, no check, no allocation."""


class _TapeReplay:
    """The launches themselves, one by one: what the host does."""

    def __init__(self, *tapes: Tape) -> None:
        self._tapes = tapes

    def launch(self) -> None:
        for tape in self._tapes:
            tape()


class GraphReplay:
    """The launches as one CUDA graph; tapes keep the memory that the graph's nodes point to."""

    def __init__(self, memory: DeviceMemory, *tapes: Tape) -> None:
        self._stream, self._tapes = memory.stream, tapes
        with memory.active():
            memory.stream.begin_capture()
            try:
                for tape in tapes:
                    tape(memory.stream)
            finally:
                self._graph = memory.stream.end_capture()
            self._graph.upload(memory.stream)

    def launch(self) -> None:
        """Enqueue the graph."""
        self._graph.launch(self._stream)


def replay_of(memory: Memory, *tapes: Tape) -> Replay:
    """Return tapes as one graph on a device, and as they are on the host."""
    return GraphReplay(memory, *tapes) if isinstance(memory, DeviceMemory) else _TapeReplay(*tapes)


class Rung:
    """A step of ``rows`` rows: layers, logits, and the choice, which goes where the next step reads it.

    Recording runs the step once on padding rows, which touch no state. ``hidden (rows, H)`` and ``logits (rows, V)``
    hold the last step's until the next one.
    """

    def __init__(self, model: Model, state: ModelState, buffers: StepBuffers, rows: int) -> None:
        memory = model.memory
        self.rows = rows
        # Nothing in a step writes a weight, so that every kernel may begin early behind another.
        overlap = not memory.is_host

        def make_scratch(size: int) -> Any:
            return memory.empty((size,), "u8")

        with memory.active():
            buffers.clear()
            with Tape(overlap=overlap, make_scratch=make_scratch) as body:
                done = model.run(buffers.batch(rows), state)
                self.hidden: Any = done.hidden
                self.logits: Any = model.lm_head.forward(done.hidden)
            with Tape(overlap=overlap, make_scratch=make_scratch, follows=body) as greedy:
                model.lm_head.choose(self.logits, buffers.ids[:rows])
            self.launches = len(body) + len(greedy)
            self.greedy = replay_of(memory, body, greedy)
            self.sampled = self._sampled(model, buffers, body) if model.sampler.can_sample else None
            memory.wait()

    def _sampled(self, model: Model, buffers: StepBuffers, body: Tape) -> Replay:
        with Tape() as tape:
            model.sampler.choose(self.logits, buffers.sampling(self.rows), buffers.ids[: self.rows])
        return replay_of(model.memory, body, tape)
