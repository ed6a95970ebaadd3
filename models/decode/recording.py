"""Shared by recorded passes: fixed i32 arrays updated by one copy, and a tape that becomes one replay."""

from collections.abc import Mapping
from math import prod
from typing import Any, Protocol

from kernel_muster.models.decode.transfer import upload_to
from kernel_muster.models.memory.memory import DeviceMemory, Memory
from kernel_muster.registry.launch.tape import Tape

# Kernels need arrays that begin at multiples of 16 bytes.
_WORDS = 4


class FixedInputs:
    """Arrays of given shapes in one block. Unfilled parts are sent as zeros."""

    def __init__(self, memory: Memory, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes, self._places = dict(shapes), dict[str, slice]()
        words = 0
        for name, shape in self._shapes.items():
            self._places[name] = slice(words, words + prod(shape))
            words += -(-prod(shape) // _WORDS) * _WORDS
        pack = memory.zeros((max(words, _WORDS),), "i32")
        self._words, self._upload = words, upload_to(memory, pack)
        self.arrays = {name: pack[place].reshape(self._shapes[name]) for name, place in self._places.items()}

    def send(self, values: Mapping[str, Any]) -> None:
        """Fill arrays by name, with an array of their shape or one number, and enqueue the copy."""
        words = self._upload.stage()
        words[:] = 0
        for name, value in values.items():
            words[self._places[name]].reshape(self._shapes[name])[...] = value
        self._upload.send(self._words)


def new_tape(memory: Memory, follows: Tape | None = None) -> Tape:
    """Return a tape for a pass that writes no weight: on a device each kernel may begin early after another (PDL).

    Memory of launches lies apart from the memory shared by passes, which other passes overwrite between two runs.
    """
    return Tape(
        overlap=not memory.is_host,
        make_scratch=lambda size: memory.empty((size,), "u8"),
        follows=follows,
        side_stream=memory.side_stream(),
        keeping=memory.active,
    )


class Replay(Protocol):
    """A recorded step, ready to be enqueued."""

    def launch(self) -> None:
        """Enqueue all of it: no lookup, no check, no allocation."""


class _TapeReplay:
    """The launches themselves, one by one, on the host."""

    def __init__(self, *tapes: Tape) -> None:
        self._tapes = tapes

    def launch(self) -> None:
        for tape in self._tapes:
            tape()


class GraphReplay:
    """The launches as one CUDA graph. Tapes keep the memory of their launches."""

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


def let_go(memory: Memory, *tapes: Tape) -> None:
    """Release the arrays of tapes, now held by a graph: other recorded passes may reuse them."""
    for tape in () if memory.is_host else tapes:
        tape.release()


def replay_of(memory: Memory, *tapes: Tape) -> Replay:
    """Return tapes as one graph on a device, and as they are on the host."""
    return GraphReplay(memory, *tapes) if isinstance(memory, DeviceMemory) else _TapeReplay(*tapes)
