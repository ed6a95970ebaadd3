"""The quantisation config of a checkpoint, whose problems are those of the checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernel_muster.MODEL_toml.hf.quantisation import PLAIN, READABLE, Expected, QuantProblem, Style, quantisation
from kernel_muster.models.checkpoints.checkpoint import Checkpoint
from kernel_muster.models.checkpoints.errors import CheckpointError

__all__ = ["PLAIN", "READABLE", "QuantConfig", "Style", "quant_config"]


class QuantConfig:
    """How each module is stored, by the config alone."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder
        with _problems_of(self._folder):
            self._stated = quantisation(checkpoint.hf)

    @property
    def style(self) -> Style | None:
        """The library whose names the tensors have."""
        return self._stated.style

    def expected(self, module: str) -> Expected:
        """Return how a module is stored; CheckpointError if two groups contradict each other."""
        with _problems_of(self._folder):
            return self._stated.expected(module)


def quant_config(checkpoint: Checkpoint) -> QuantConfig:
    """Read a checkpoint's quantisation config; CheckpointError if it is malformed or not supported."""
    return QuantConfig(checkpoint)


@contextmanager
def _problems_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except QuantProblem as problem:
        raise CheckpointError(folder / problem.file, problem.module, problem.expected, problem.got) from None
