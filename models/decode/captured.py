"""A decode step for one captured batch size: recorded once and replayed."""

from typing import Any

from kernel_muster.models.decode.buffers import StepBuffers
from kernel_muster.models.decode.recording import Replay, let_go, new_tape, replay_of
from kernel_muster.models.memory.state import ModelState
from kernel_muster.models.model import Model
from kernel_muster.registry.launch.tape import Tape


class CapturedStep:
    """A step of ``rows`` rows: layers, logits, and the choice, written to the input of the next step.

    Recording runs the step once on padding rows, which touch no state. ``hidden (rows, H)`` and ``logits (rows, V)``
    hold the last step's values until the next one.
    """

    def __init__(self, model: Model, state: ModelState, buffers: StepBuffers, rows: int) -> None:
        memory = model.memory
        self.rows = rows
        with memory.recording():
            buffers.clear()
            with new_tape(memory) as body:
                done = model.run(buffers.batch(rows), state)
                self.hidden: Any = done.hidden
                self.logits: Any = model.lm_head.forward(done.hidden)
            with new_tape(memory, follows=body) as greedy:
                model.lm_head.choose(self.logits, buffers.ids[:rows])
            self.launches = len(body) + len(greedy)
            self.greedy = replay_of(memory, body, greedy)
            self.sampled = self._sampled(model, buffers, body) if model.sampler.can_sample else None
            let_go(memory, body, greedy)
            memory.wait()

    def _sampled(self, model: Model, buffers: StepBuffers, body: Tape) -> Replay:
        with Tape(keeping=model.memory.active) as tape:
            model.sampler.choose(self.logits, buffers.sampling(self.rows), buffers.ids[: self.rows])
        return replay_of(model.memory, body, tape)
