"""Where a command's result goes: stdout or a file, whole or not at all."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from kernel_muster.registry.errors import UsageError

#: A list of shapes may be long; a tuning table refuses text above ten times this.
_LONGEST_COMMAND = 10_000


def is_terminal() -> bool:
    """Whether stdout is a terminal that takes colour and tables."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Send to stderr what plugins and builders print: stdout may be read as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def say(text: str) -> None:
    """Write text and a line end to stdout. A reader that has gone away is no error: the verdict still counts."""
    encoding = sys.stdout.encoding or "ascii"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
    except OSError as error:
        discard_stdout()
        raise UsageError(f"stdout cannot be written: {error.strerror}") from None


def command_text() -> str:
    """Return the command as text that any file holds: bounded, and what is not UTF-8 in it escaped."""
    text = " ".join(("muster", *sys.argv[1:])).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _LONGEST_COMMAND else f"{text[:_LONGEST_COMMAND]}..."


def discard_stdout() -> None:
    """Let what is still in the buffer, and all that follows, go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_writable(path: Path | None) -> None:
    """Refuse a path that cannot be written, before any work is done; UsageError."""
    if path is None or _is_special(path):
        return
    try:
        part = _part(path)
        part.touch()
        part.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def write_file(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees half of it; UsageError if it cannot be written."""
    if not text.endswith("\n"):
        text += "\n"
    try:
        if _is_special(path):
            path.write_text(text, encoding="utf-8")
            return
        part = _part(path)
        try:
            with part.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None


def _part(path: Path) -> Path:
    if path.is_dir():
        raise IsADirectoryError(0, "it is a directory")
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _is_special(path: Path) -> bool:
    """Whether it is a device or a pipe, which must be written to and not replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be written: {error.strerror or error}")
