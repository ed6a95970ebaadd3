"""The stream of results, reserved for the command during the whole life of its process.

A plugin's threads, exit handlers and destructors may print at any time, even while the result is written and after it.
Therefore file descriptor 1 is a copy of stderr from the start, and results use a separate descriptor.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import TextIO

from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.plugin_code.descriptors import out_of_sight

STDOUT, STDERR = 1, 2
#: File names that stand for a file descriptor of this process.
_NAMES = frozenset({"/dev/stdout", f"/dev/fd/{STDOUT}", f"/proc/self/fd/{STDOUT}"})
_kept: tuple[int, os.stat_result, str] | None = None


def keep_results_apart() -> None:
    """Redirect stdout to stderr from now to the end of the process, except for results."""
    global _kept
    if _kept is not None or descriptor_of(sys.__stdout__) != STDOUT:  # closed: the number belongs to another file
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    kept = out_of_sight(STDOUT)
    _kept = kept, os.fstat(kept), sys.stdout.encoding or "ascii"
    point_stdout_elsewhere()


def point_stdout_elsewhere() -> None:
    """Redirect file descriptor 1 to stderr, or to nowhere if that is closed."""
    if descriptor_of(sys.__stderr__) == STDERR:
        os.dup2(STDERR, STDOUT)
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    os.close(nowhere)


def are_apart() -> bool:
    """Whether results have a separate descriptor."""
    return _kept is not None


def encoding() -> str:
    """Return the encoding of the stream of results."""
    return _kept[2] if _kept is not None else sys.stdout.encoding or "ascii"


def is_terminal() -> bool:
    """Whether results go to a terminal with colour and tables."""
    is_one = os.isatty(_kept[0]) if _kept is not None else sys.stdout.isatty()
    return is_one and os.environ.get("TERM") != "dumb"


def columns() -> int | None:
    """Return the width of the terminal of results. None without a terminal or a width."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(STDOUT if _kept is None else _kept[0]).columns or None
    return None


def write(text: str) -> None:
    """Write text to the stream of results. OSError if that fails, UsageError if its descriptor is gone."""
    if _kept is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    number, known, name = _kept
    try:
        is_kept = os.path.samestat(os.fstat(number), known)
    except OSError:
        is_kept = False
    if not is_kept:  # the number may belong to another file by now
        raise UsageError(f"stdout cannot be written: what ran has closed its copy, file descriptor {number}")
    data = text.encode(name, "backslashreplace")
    while data:
        data = data[os.write(number, data) :]


def discard() -> None:
    """Discard the buffer and all later output."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno() if _kept is None else _kept[0])


def own_name(path: Path) -> Path:
    """Return the place of a named output file: ``/dev/stdout`` is the stream of results."""
    return Path(f"/dev/fd/{_kept[0]}") if _kept is not None and str(path) in _NAMES else path


def descriptor_of(stream: TextIO | None) -> int | None:
    """Return the open file descriptor of a stream of this process. None if it has none."""
    try:
        number = stream.fileno() if stream is not None else None
        if number is not None:
            os.fstat(number)
    except (OSError, ValueError):
        return None
    return number
