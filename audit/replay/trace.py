"""Read a trace.

Strict within a major version: an unknown key is refused, unless the trace comes from a newer minor version.
"""

import reprlib
import sys
from pathlib import Path
from typing import Any

from kernel_muster.audit import strict_json
from kernel_muster.audit.replay.trace_model import PARTS, VERSION, Strict, Trace
from kernel_muster.audit.replay.trace_problems import problem_text
from kernel_muster.audit.versions import minor_of
from kernel_muster.registry.errors import UsageError
from pydantic import (
    TypeAdapter,
    ValidationError,
)

#: 100,000 lookups take about 20 MB.
MOST_BYTES = 512 * 1024 * 1024
_MOST_PROBLEMS = 20
_ADAPTER = TypeAdapter(Trace)


def read_trace(path: str | Path) -> Trace:
    """Read a trace, ``-`` from standard input; UsageError says everything that is wrong with it."""
    return parse_trace(read_document(path), "stdin" if str(path) == "-" else str(path))


def read_document(path: str | Path) -> Any:
    """Read the JSON of a trace; UsageError for what is no such file."""
    file = Path("stdin" if str(path) == "-" else path)
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read(MOST_BYTES + 1) if sys.stdin is not None else b""
        elif not file.is_file():
            raise UsageError(f"{file}: is no regular file" if file.exists() else f"{file}: there is no such file")
        else:
            with file.open("rb") as stream:
                raw = stream.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise UsageError(f"{file}: larger than {MOST_BYTES} bytes, which no trace is")
        text = raw.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {_plain(str(error))}") from None
    try:
        return strict_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: is not JSON: {_plain(str(error))}") from None


def parse_trace(data: Any, name: str = "trace") -> Trace:
    """Check a trace that was read as plain data; UsageError says everything that is wrong with it."""
    try:
        trace = _ADAPTER.validate_python(_for_this_version(data, name))
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [_plain(problem_text(one, _keys_at(one["loc"]))) for one in found[:_MOST_PROBLEMS]]
        counted = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise UsageError(f"{name}: {counted}:\n  " + "\n  ".join(problems)) from None
    _check_chains(trace, name)
    return trace


def _for_this_version(data: Any, name: str) -> dict[str, Any]:
    """Return the trace, without the keys that a newer minor version added."""
    if not isinstance(data, dict) or not isinstance(data.get("version"), str):
        raise UsageError(f'{name}: expected an object with "version": "{VERSION[0]}.{VERSION[1]}"')
    minor = minor_of(data["version"], VERSION[0])
    if minor is None:
        version = _plain(repr(data["version"][:40]))
        raise UsageError(f"{name}: version is {version}; this program reads {VERSION[0]}.x")
    return _without_unknown(data) if minor > VERSION[1] else data


def _without_unknown(data: dict[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = _known(data, Trace)
    for name, part in PARTS.items():
        value = known.get(name)
        if isinstance(value, list):
            known[name] = [_known(row, part) for row in value]
        elif value is not None:
            known[name] = _known(value, part)
    return known


def _known(row: Any, part: type[Strict]) -> Any:
    return {k: v for k, v in row.items() if k in part.model_fields} if isinstance(row, dict) else row


def _keys_at(path: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the keys that the table holds in which a problem lies."""
    table = Trace if len(path) == 1 else PARTS.get(str(path[0]), Trace)
    return tuple(table.model_fields)


def _plain(text: str) -> str:
    """Return text that any terminal can show: what a trace holds may be anything."""
    return text.encode("ascii", "backslashreplace").decode()


def _check_chains(trace: Trace, name: str) -> None:
    for position, row in enumerate(trace.lookups):
        if row.chain and row.chain[0] != (row.module, row.func):
            begins = _plain(reprlib.repr(row.chain[0]))
            raise UsageError(f"{name}: lookups[{position}]: its chain begins with {begins}, not with its own key")
