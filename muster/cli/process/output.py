"""Where a command's result goes: stdout or a file, whole or not at all."""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from kernel_muster.audit.render.plain import ascii_only
from kernel_muster.cli.process import results
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.paths import current_folder

#: A list of shapes may be long; a tuning table refuses text above ten times this.
_LONGEST_COMMAND = 10_000
_STDOUT, _STDERR = 1, 2
_start: ContextVar[Path | None] = ContextVar("start", default=None)


@contextlib.contextmanager
def beginning_here() -> Iterator[None]:
    """Let relative paths of results start at the working directory of now, whatever a plugin makes of it."""
    token = _start.set(current_folder())
    try:
        yield
    finally:
        _start.reset(token)


def _anchored(path: Path) -> Path:
    return (_start.get() or Path()) / path


def is_terminal() -> bool:
    """Whether stdout is a terminal that takes colour and tables."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Send to stderr what plugins and builders print, in whatever way: stdout may be read as JSON.

    Neither stream can be closed meanwhile.
    """
    held: Any = _Held(sys.stderr)
    try:
        with contextlib.redirect_stderr(held), contextlib.redirect_stdout(held), _descriptor_to_stderr():
            yield
    finally:
        _reopen_closed_streams()


class _Held:
    """Stderr as somebody else prints on it, and cannot close it for good."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        if self._stream.closed:
            self._stream = _opened(results.STDERR)
        return getattr(self._stream, name)

    def close(self) -> None:
        """Do nothing but write what was printed."""
        self.flush()


@contextlib.contextmanager
def _descriptor_to_stderr() -> Iterator[None]:
    """Send what is written to file descriptor 1, by C libraries and subprocesses too, where stderr goes.

    UsageError if what ran meanwhile has closed what stdout was kept in.
    """
    # Apart from the results it is already; where it was closed, the number is another file's.
    if results.are_apart() or results.descriptor_of(sys.__stdout__) != results.STDOUT:
        yield
        return
    _flush_stdout()
    kept = os.dup(results.STDOUT)
    known = os.fstat(kept)
    try:
        results.point_stdout_elsewhere()
        yield
    finally:
        _flush_stdout()
        try:
            is_kept = os.path.samestat(os.fstat(kept), known)
        except OSError:
            is_kept = False
        if not is_kept:  # the number may be another file's by now
            raise UsageError(f"stdout cannot be written: what ran has closed its copy, file descriptor {kept}")
        os.dup2(kept, results.STDOUT)
        os.close(kept)


def _flush_stdout() -> None:
    """Write what Python and the C library hold back for file descriptor 1."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.__stdout__.flush()  # type: ignore[union-attr]
    import ctypes  # 5 ms, which --version does not need

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _reopen_closed_streams() -> None:
    """Open again what others' code closed in spite of all: Python's own streams leave their descriptors open."""
    for name, number in (("stdout", results.STDOUT), ("stderr", results.STDERR)):
        if getattr(getattr(sys, name), "closed", False):
            with contextlib.suppress(OSError):
                setattr(sys, name, _opened(number))


def _opened(number: int) -> TextIO:
    """Open a descriptor of this process for text, as Python's own streams do."""
    return open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def say(text: str) -> None:
    """Write text and a line end to stdout. A reader that has gone away is no error: the verdict still counts."""
    encoding = results.encoding()
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        results.write(text if text.endswith("\n") else f"{text}\n")
    except BrokenPipeError:
        results.discard()
    except OSError as error:
        results.discard()
        raise UsageError(f"stdout cannot be written: {error.strerror}") from None


def say_printed(whose: str, line: str) -> None:
    """Write a line to stderr that a plugin printed in a process of its own, behind its name; a closed one is no error.

    What a terminal would obey is escaped.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(ascii_only(f"{whose}| {line}\n"))
        sys.stderr.flush()


def command_text() -> str:
    """Return the command as text that any file holds: bounded, and what is not UTF-8 in it escaped."""
    text = " ".join(("muster", *sys.argv[1:])).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _LONGEST_COMMAND else f"{text[:_LONGEST_COMMAND]}..."


def check_writable(path: Path | None) -> None:
    """Refuse a path that cannot be written, before any work is done; UsageError."""
    if path is None or _is_special(_anchored(path)):
        return
    try:
        part = _part(_anchored(path).resolve())
        part.touch()
        part.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def write_file(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees half of it; UsageError if it cannot be written.

    A link stays one, and a file that is there keeps who may read it.
    """
    if not text.endswith("\n"):
        text += "\n"
    path = results.own_name(path)
    try:
        file = _anchored(path)
        if _is_special(file):
            file.write_text(text, encoding="utf-8")
            return
        file = file.resolve()
        part = _part(file)
        try:
            with part.open("w", encoding="utf-8") as stream:
                if file.exists():
                    part.chmod(stat.S_IMODE(file.stat().st_mode))
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(file)
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
