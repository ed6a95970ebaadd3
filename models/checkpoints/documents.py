"""JSON files of a checkpoint: bounded, regular, without duplicate keys."""

import json
import stat
from pathlib import Path
from typing import Any

from kernel_muster.MODEL_toml.wording import shown, type_name
from kernel_muster.models.checkpoints.errors import CheckpointError
from kernel_muster.registry.plugin_code.regular_files import read_regular

# An index of 35B parameters in 256 experts a layer names 120,000 tensors in about 13 MB.
MOST_BYTES = 64 * 1024 * 1024


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; CheckpointError if that cannot be done."""
    size = regular_size(path)
    if size > MOST_BYTES:
        raise CheckpointError(path, None, f"at most {MOST_BYTES} bytes", f"{size} bytes")
    try:
        value = json.loads(read_regular(path, MOST_BYTES).decode("utf-8-sig"), object_pairs_hook=unique)
    except RecursionError:
        raise CheckpointError(path, None, "valid JSON", "a document nested too deeply") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(path, None, "valid JSON", str(error)) from None
    if not isinstance(value, dict):
        raise CheckpointError(path, None, "a JSON object", type_name(value))
    return value


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
    """Say why a path leads nowhere; a NUL in it, or half a character, is a ValueError."""
    return CheckpointError(path, None, "a readable file", getattr(error, "strerror", None) or str(error))


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its pairs; ValueError if a key stands twice."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"key {shown(name)} stands twice")
        table[name] = value
    return table
