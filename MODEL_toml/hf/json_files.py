"""JSON files that others wrote: bounded, regular, one object, no key twice."""

import json
import stat
from pathlib import Path
from typing import Any

from kernel_muster.MODEL_toml.wording import plain, shown, type_name
from kernel_muster.registry.plugin_code.regular_files import read_regular


class JsonProblem(ValueError):
    """A file that holds no JSON object: the expected content, what was found, and both as one sentence."""

    def __init__(self, expected: str, got: str, sentence: str) -> None:
        super().__init__(sentence)
        self.expected, self.got = expected, got


def read_json_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """Read the object in a file; JsonProblem if the file is unreadable, too large or no such object."""
    try:
        status = path.stat()
        is_regular, size = stat.S_ISREG(status.st_mode), status.st_size
        raw = read_regular(path, most_bytes) if is_regular and size <= most_bytes else b""
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or half a character
        why = str(getattr(error, "strerror", None) or error)
        raise JsonProblem("a readable file", why, f"{plain(str(path))} cannot be read: {why}") from None
    if not is_regular:
        raise JsonProblem("a regular file", "something else", f"{plain(str(path))} is no regular file")
    if size > most_bytes:
        got = f"{size} bytes"
        raise JsonProblem(f"at most {most_bytes} bytes", got, f"{plain(str(path))} has more than {most_bytes} bytes")
    return _object(path, raw)


def _object(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique)
    except RecursionError:
        got = "a document nested too deeply"
        raise JsonProblem("valid JSON", got, f"{plain(str(path))} is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ones
        raise JsonProblem("valid JSON", str(error), f"{plain(str(path))} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        got = type_name(value)
        raise JsonProblem("a JSON object", got, f"{plain(str(path))} holds {got}, expected an object")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its pairs; ValueError if a key stands twice."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"key {shown(name)} stands twice")
        table[name] = value
    return table
