"""A child process of ``muster plugin check``: its steps as it tells them, what it prints, and how it ends."""

import codecs
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from typing import IO, Any, Protocol

from kernel_muster.audit.plugin_check.steps import MARK
from kernel_muster.registry.launch.runners import Progress
from kernel_muster.registry.values import frozen

_LAST_LINES = 60
_LOOK_S = 0.1  # how often a child is asked whether it has ended


class Collected(Protocol):
    """Who takes what children tell, and knows what is done."""

    done: list[str]
    failed: list[str]
    total: int
    has_ended: bool
    open: dict[str, Any] | None
    loading: dict[str, Any]

    def take(self, event: dict[str, Any]) -> bool:
        """Take one event; whether it begins or ends a step, so that time counts anew."""


@frozen
class Ended:
    """How a child ended: its exit code, negative for a signal; what it wrote; and whether its time was up."""

    code: int
    log: str
    is_hanging: bool
    seconds: float = field(default=0.0)


@frozen
class Asked:
    """What is checked, how long a step may take, and who hears of it."""

    distribution: str
    plugin: str | None
    path: Sequence[str]
    seconds: float
    cache_dir: str | None
    progress: Progress | None
    printed: Callable[[str], None] | None


def run_child(collected: Collected, asked: Asked) -> Ended:
    """Run a child for what is not done yet, until it ends or a step takes too long."""
    collected.loading = {"plugin": ""}
    reader, writer = os.pipe()
    arguments: dict[str, Any] = {
        "distribution": asked.distribution,
        "plugin": asked.plugin,
        "path": list(asked.path),
        "pipe": writer,
    }
    arguments |= {"skip": collected.done, "failed": collected.failed, "seconds": asked.seconds}
    arguments |= {"cache_dir": asked.cache_dir, "parent": os.getpid()}
    # Unbuffered: what it printed before a crash is not lost with it.
    command = [sys.executable, "-u", "-P", "-m", "kernel_muster.audit.plugin_check.steps", json.dumps(arguments)]
    with tempfile.TemporaryFile() as log, os.fdopen(reader, "rb", buffering=0) as events:
        child = subprocess.Popen(  # noqa: S603  (our own module, in the interpreter that runs us)
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(writer,), start_new_session=True
        )
        os.close(writer)
        prints = _Prints(log.fileno(), asked.printed)
        try:
            start = time.monotonic()
            is_hanging = not _listen(child, events, collected, asked, prints)
            taken = time.monotonic() - start
        finally:
            _end(child)
            prints.pass_on()
        return Ended(child.returncode, _tail(log), is_hanging, taken)


class _Prints:
    """What a child prints into a file, passed on as it comes."""

    def __init__(self, number: int, say: Callable[[str], None] | None) -> None:
        self._number, self._say, self._at = number, say, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def pass_on(self) -> None:
        """Pass on what is new; the child's own place in the file stays where it is."""
        while self._say is not None and (part := os.pread(self._number, 1 << 16, self._at)):
            self._at += len(part)
            self._say(self._decoder.decode(part))


def _listen(
    child: "subprocess.Popen[bytes]", events: IO[bytes], collected: Collected, asked: Asked, prints: _Prints
) -> bool:
    """Take events until the child says or is seen to have ended; False when a step takes too long.

    What the child started may hold the pipe open for longer, and may write to it.
    """
    rest = b""
    deadline = time.monotonic() + asked.seconds + 30  # it has to start first
    while not collected.has_ended:
        prints.pass_on()
        has_ended = child.poll() is not None  # all that it wrote is in the pipe then
        wait = 0.0 if has_ended else min(_LOOK_S, max(0.0, deadline - time.monotonic()))
        if select.select([events], [], [], wait)[0]:
            part = os.read(events.fileno(), 1 << 16)
            if not part:
                return True
            *lines, rest = (rest + part).split(b"\n")
            for event in events_in(lines):
                if not collected.take(event):
                    continue
                if asked.progress is not None and collected.open is not None:
                    asked.progress(len(collected.done), collected.total, collected.open["name"])
                deadline = time.monotonic() + asked.seconds
        elif has_ended:
            return True
        if time.monotonic() >= deadline:
            return False
    return True


def events_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield what the child told; what a plugin wrote to the pipe, which it did not open, is passed over."""
    for line in lines:
        if line.startswith(MARK):
            with suppress(ValueError):  # written over
                yield json.loads(line.removeprefix(MARK))


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Wait a moment for a child that is ending by itself; then end it and all that it started."""
    try:
        child.wait(1)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _tail(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - (1 << 16)))
    lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_LAST_LINES:])
