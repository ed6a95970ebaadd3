"""JSON files of a checkpoint, whose problems are those of the checkpoint."""

import stat
from pathlib import Path
from typing import Any

from kernel_muster.MODEL_toml.hf.config import CONFIG_NAME, HF_QUANT_NAME, MOST_BYTES, HfConfig
from kernel_muster.MODEL_toml.hf.json_files import JsonProblem, read_json_object, unique
from kernel_muster.models.checkpoints.errors import CheckpointError

__all__ = ["is_there", "read_hf_config", "read_object", "regular_size", "unique"]


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; CheckpointError if that cannot be done.

    The limit also holds for indices: one of 35B parameters in 256 experts a layer names 120,000 tensors in 13 MB.
    """
    try:
        return read_json_object(path, MOST_BYTES)
    except JsonProblem as problem:
        raise CheckpointError(path, None, problem.expected, problem.got) from None


def read_hf_config(folder: Path) -> HfConfig:
    """Read ``config.json`` with its ``hf_quant_config.json``; CheckpointError if one of them cannot be read."""
    beside = folder / HF_QUANT_NAME
    file = folder / CONFIG_NAME
    return HfConfig(read_object(file), file, read_object(beside) if is_there(beside) else None)


def is_there(path: Path) -> bool:
    """Whether there is something of that name; CheckpointError where that cannot be told: too long, no permission."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    return True


def regular_size(path: Path) -> int:
    """Return a regular file's size; CheckpointError for anything else, without opening it (a FIFO would hang)."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(path, None, "a regular file", "something else")
    return status.st_size


def _unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    """Give the reason why a path cannot be read; a NUL in it, or half a character, is a ValueError."""
    return CheckpointError(path, None, "a readable file", getattr(error, "strerror", None) or str(error))
