"""A child process of ``muster plugin check``: the events that it reports, what it prints, and how it ends."""

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, Protocol

from kernel_muster.audit.plugin_check.process.printed import Printed
from kernel_muster.audit.plugin_check.process.supervisor import SUPERVISOR, WORKER
from kernel_muster.audit.plugin_check.protocol.channel import KEY_BYTES, Receiver
from kernel_muster.audit.plugin_check.protocol.ended import Ended
from kernel_muster.audit.plugin_check.protocol.events import Event
from kernel_muster.registry.launch.runners import Progress
from kernel_muster.registry.values import frozen

_LOOK_S = 0.1  # how often a child is request whether it has ended
_START_S = 30.0
#: How long a process may take to end by itself, and its supervisor to end all that it left.
_END_S, _PATIENCE_S = 1.0, 8.0
_SUPERVISOR = "kernel_muster.audit.plugin_check.process.supervisor"


class Collected(Protocol):
    """Takes the events of all children, and knows what is done."""

    done: list[str]
    failed: list[str]
    has_finished: bool

    def begin(self) -> None:
        """Begin with a new child."""

    def take(self, event: Event) -> bool:
        """Take one event; whether it begins or ends a step, so that time counts anew."""

    @property
    def running(self) -> str:
        """The name of the step that runs."""

    @property
    def total(self) -> int:
        """How many steps there are; 0 as long as that is not known."""


@frozen
class Ending:
    """How a child ended.

    ``code`` is its exit code, negative for a signal; ``log`` the end of what it printed; ``left`` and ``unended`` are
    commands of processes that it had left running, ended and not; ``dropped`` counts lines that were not its own.
    """

    code: int
    log: str
    is_hanging: bool
    seconds: float = 0.0
    left: tuple[str, ...] = ()
    unended: tuple[str, ...] = ()
    dropped: int = 0


@frozen
class CheckRequest:
    """What is checked, how long a step may take, and where progress and prints go."""

    distribution: str
    plugin: str | None
    path: Sequence[str]
    seconds: float
    cache_dir: str | None
    progress: Progress | None
    printed: Callable[[str], object] | None


def run_child(collected: Collected, request: CheckRequest) -> Ending:
    """Run a child for what is not done yet, until it ends or a step takes too long."""
    collected.begin()
    keys = {name: secrets.token_bytes(KEY_BYTES) for name in (WORKER, SUPERVISOR)}
    with ExitStack() as stack:
        reader, writer = os.pipe()
        events = stack.enter_context(os.fdopen(reader, "rb", buffering=0))
        to_write = stack.enter_context(os.fdopen(writer, "wb", buffering=0))
        reader, writer = os.pipe()
        prints = stack.enter_context(os.fdopen(reader, "rb", buffering=0))
        to_print = stack.enter_context(os.fdopen(writer, "wb", buffering=0))
        arguments = _arguments(collected, request, keys, to_write.fileno())
        # Unbuffered: what it printed before a crash is not lost with it.
        command = [sys.executable, "-u", "-P", "-m", _SUPERVISOR]
        with _file_of(arguments) as given:
            child = subprocess.Popen(  # noqa: S603  (our own module, in the interpreter that runs us)
                command,
                stdin=given,
                stdout=to_print,
                stderr=to_print,
                pass_fds=(to_write.fileno(),),
                start_new_session=True,
            )
        to_write.close()
        to_print.close()
        watch = _Watch(child, events, prints, Receiver(keys), collected, request)
        try:
            watch.until_it_ends()
        finally:
            _end(child)
            watch.read_the_rest()
        return watch.ending()


def _arguments(collected: Collected, request: CheckRequest, keys: dict[str, bytes], pipe: int) -> dict[str, Any]:
    return {
        "distribution": request.distribution,
        "plugin": request.plugin,
        "path": list(request.path),
        "skip": collected.done,
        "failed": collected.failed,
        "seconds": request.seconds,
        "cache_dir": request.cache_dir,
        "parent": os.getpid(),
        "pipe": pipe,
        "keys": {name: key.hex() for name, key in keys.items()},
    }


@contextmanager
def _file_of(arguments: dict[str, Any]) -> Iterator[IO[bytes]]:
    """Give arguments through a file without a name: no list of processes shows them, and they may be long."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(arguments).encode())
        file.seek(0)
        yield file


class _Watch:
    """One child from its start to its end."""

    def __init__(
        self,
        child: "subprocess.Popen[bytes]",
        events: IO[bytes],
        prints: IO[bytes],
        receiver: Receiver,
        collected: Collected,
        request: CheckRequest,
    ) -> None:
        self._child, self._receiver, self._collected, self._asked = child, receiver, collected, request
        self._printed = Printed(request.printed)
        self._selector = selectors.DefaultSelector()
        self._selector.register(events, selectors.EVENT_READ, self._take_events)
        self._selector.register(prints, selectors.EVENT_READ, self._printed.take)
        self._ended: Ended | None = None
        self._is_hanging = False
        self._start = time.monotonic()
        self._deadline = self._start + request.seconds + _START_S
        self._seconds = 0.0

    def until_it_ends(self) -> None:
        """Read until the child has ended; one that takes too long, or that does not end, is request to."""
        has_asked = False
        while self._child.poll() is None:
            self._read(min(_LOOK_S, max(0.0, self._deadline - time.monotonic())))
            if time.monotonic() < self._deadline:
                continue
            if has_asked:
                return
            has_asked = True
            self._is_hanging = not self._collected.has_finished
            self._seconds = time.monotonic() - self._start
            self._child.terminate()
            self._deadline = time.monotonic() + _PATIENCE_S
        self._seconds = self._seconds or time.monotonic() - self._start

    def read_the_rest(self) -> None:
        """Read what is there already; something that was left running may write on."""
        until = time.monotonic() + _END_S
        while self._read(0.0) and time.monotonic() < until:
            pass
        self._receiver.end()
        self._printed.end()
        self._selector.close()

    def ending(self) -> Ending:
        """Return how it ended."""
        ended = self._ended or Ended(code=self._child.returncode)
        return Ending(
            ended.code,
            self._printed.log,
            self._is_hanging,
            self._seconds,
            ended.left,
            ended.unended,
            self._receiver.dropped,
        )

    def _read(self, wait: float) -> bool:
        """Read once from each pipe that has something; whether one had."""
        ready = self._selector.select(wait) if self._selector.get_map() else []
        if not ready:
            time.sleep(0 if self._selector.get_map() else wait)
        for key, _ in ready:
            if data := os.read(key.fd, 1 << 16):
                key.data(data)
            else:
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def _take_events(self, data: bytes) -> None:
        collected, request = self._collected, self._asked
        for event in self._receiver.events(data):
            if isinstance(event, Ended):
                self._ended = event
            elif collected.take(event):
                if request.progress is not None and collected.running:
                    request.progress(len(collected.done), collected.total, collected.running)
                self._deadline = time.monotonic() + (_END_S if collected.has_finished else request.seconds)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a child and, by its supervisor, all that it started; where it has none, all of its group."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_PATIENCE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
