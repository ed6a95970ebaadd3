"""Output of a command's result: to stdout or a file, complete or not at all."""

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
    """Resolve relative paths of results against the current working directory, despite changes by plugins."""
    token = _start.set(current_folder())
    try:
        yield
    finally:
        _start.reset(token)


def _anchored(path: Path) -> Path:
    return (_start.get() or Path()) / path


def is_terminal() -> bool:
    """Whether stdout is a terminal with colour and tables."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Redirect all output of plugins and builders to stderr, because stdout may be read as JSON.

    Neither stream can be closed during the block.
    """
    held: Any = _Held(sys.stderr)
    try:
        with contextlib.redirect_stderr(held), contextlib.redirect_stdout(held), _descriptor_to_stderr():
            yield
    finally:
        _reopen_closed_streams()


class _Held:
    """Stderr for other code, which cannot close it permanently."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        if self._stream.closed:
            self._stream = _opened(results.STDERR)
        return getattr(self._stream, name)

    def close(self) -> None:
        """Only flush."""
        self.flush()


@contextlib.contextmanager
def _descriptor_to_stderr() -> Iterator[None]:
    """Redirect file descriptor 1 to stderr, also for C libraries and subprocesses.

    UsageError if other code closed the saved copy of stdout.
    """
    # With separate results it already is. After a close, the number belongs to another file.
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
        if not is_kept:  # the number may belong to another file by now
            raise UsageError(f"stdout cannot be written: what ran has closed its copy, file descriptor {kept}")
        os.dup2(kept, results.STDOUT)
        os.close(kept)


def _flush_stdout() -> None:
    """Flush the buffers of Python and the C library for file descriptor 1."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.__stdout__.flush()  # type: ignore[union-attr]
    import ctypes  # 5 ms, which --version does not need

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _reopen_closed_streams() -> None:
    """Reopen streams that other code closed: Python's own streams keep their descriptors open."""
    for name, number in (("stdout", results.STDOUT), ("stderr", results.STDERR)):
        if getattr(getattr(sys, name), "closed", False):
            with contextlib.suppress(OSError):
                setattr(sys, name, _opened(number))


def _opened(number: int) -> TextIO:
    """Open a descriptor of this process for text, like Python's own streams."""
    return open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def say(text: str) -> None:
    """Write text and a line end to stdout. A reader that has gone is no error: the verdict still counts."""
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
    """Write a plugin's output line from a child process to stderr, after its name; a closed stderr is no error.

    Control sequences of terminals are escaped.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(ascii_only(f"{whose}| {line}\n"))
        sys.stderr.flush()


def command_text() -> str:
    """Return the command line as text for any file: bounded, with escapes for bytes outside UTF-8."""
    text = " ".join(("muster", *sys.argv[1:])).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _LONGEST_COMMAND else f"{text[:_LONGEST_COMMAND]}..."


def check_writable(path: Path | None) -> None:
    """Refuse an unwritable path before any work. UsageError."""
    if path is None or _is_special(_anchored(path)):
        return
    try:
        part = _part(_anchored(path).resolve())
        part.touch()
        part.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def write_file(path: Path, text: str) -> None:
    """Write a file atomically. UsageError if it cannot be written.

    A link stays a link, and an existing file keeps its permissions.
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
