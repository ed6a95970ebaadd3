"""What is wrong with a checkpoint: always which file, which tensor, what was expected and what was found."""

from pathlib import Path

from kernel_muster.MODEL_toml.wording import plain
from kernel_muster.registry.errors import UsageError

__all__ = ["CheckpointError", "MissingTensorError", "UnsupportedQuantError", "plain"]


class CheckpointError(UsageError):
    """A checkpoint is broken, or its weights are not what the model needs."""

    def __init__(self, file: Path, tensor: str | None, expected: str, got: str, advice: str = "") -> None:
        self.file, self.tensor, self.expected, self.got = file, tensor, expected, got
        where = plain(str(file)) if tensor is None else f"{plain(str(file))}: {plain(tensor)}"
        super().__init__(f"{where}: expected {expected}, got {got}" + (f"; {advice}" if advice else ""))


class MissingTensorError(CheckpointError):
    """A checkpoint lacks a tensor."""

    def __init__(self, folder: Path, tensor: str) -> None:
        super().__init__(folder, tensor, "a tensor", "none of that name")


class UnsupportedQuantError(CheckpointError):
    """A weight is stored in a format that no layer reads; ``quant`` names it. Nothing is requantised silently."""

    def __init__(self, file: Path, tensor: str, quant: str, origin: str) -> None:
        self.quant = quant
        super().__init__(
            file,
            tensor,
            "nvfp4 or bf16 weights",
            f"{quant} ({origin})",
            "nothing is requantised silently: take a checkpoint whose projections are NVFP4 or BF16",
        )
