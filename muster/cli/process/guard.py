"""A child process for a command's work, and its parent, which checks for a result.

Plugin code may end its process, by ``os._exit(0)`` or a crash, before any check has run. So a child does the work and
records its exit code once the result is written. Without that record the command has failed, whatever the child's
exit code. The record lies in shared memory: unlike a pipe, it cannot be closed, held open by the child's own children,
or full.
"""

import contextlib
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable

from kernel_muster.cli.process.exits import INTERNAL, INTERRUPTED, complain
from kernel_muster.cli.process.results import keep_results_apart
from kernel_muster.registry.plugin_code import running

Body = Callable[[], int]
_PR_SET_PDEATHSIG = 1
# Callers know the parent alone. The parent passes their signals on to the child.
_PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGTSTP", "SIGCONT", "SIGUSR1", "SIGUSR2")
_HAS_ENDED, _CODE, _LENGTH, _TEXT = 0, 1, 2, 3  # offsets in the shared memory
_LONGEST = 250
_GUESTS = _TEXT + _LONGEST  # names of plugins, each with a line feed, then a zero
_MOST_OF_GUESTS = 4096 - _GUESTS - 1
# Two simultaneous key presses are one interrupt.
_PATIENCE_S = 1.0
# Time for a child after the result is written: a thread or an exit handler may never end.
_GRACE_S = 5.0
_LOOK_S = 1.0


class _Entries:
    """The code that the child runs. Plugins may obtain this object: it cannot record a written result."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._said: list[bytes] = []

    def of_entry(self, who: str) -> None:
        """Record the running code."""
        text = who.encode("utf-8", "backslashreplace")[:_LONGEST]
        self._memory[_TEXT : _TEXT + len(text)] = text
        self._memory[_LENGTH] = len(text)

    def of_guest(self, plugin: str) -> None:
        """Record that a plugin of another distribution begins to load, if there is room."""
        line = plugin.encode("utf-8", "backslashreplace") + b"\n"
        start = _GUESTS + sum(map(len, self._said))
        if line not in self._said and start + len(line) <= _GUESTS + _MOST_OF_GUESTS:
            self._memory[start : start + len(line)] = line
            self._said.append(line)

    @property
    def running(self) -> str:
        """The last recorded code of the child."""
        return self._memory[_TEXT : _TEXT + self._memory[_LENGTH]].decode("utf-8", "replace")

    @property
    def guests(self) -> tuple[str, ...]:
        """The plugins of other distributions that had begun to load, latest first."""
        lines = self._memory[_GUESTS:].partition(b"\0")[0].decode("utf-8", "replace").split("\n")
        return tuple(reversed(lines[:-1]))


class _Word:
    """The child's record: its end, its exit code, and the code that it runs."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _GUESTS + _MOST_OF_GUESTS + 1)
        self.entries = _Entries(self._memory)

    def of_end(self, code: int) -> None:
        """Record that the result is written, with the exit code."""
        self._memory[_CODE] = code
        self._memory[_HAS_ENDED] = 1

    @property
    def code(self) -> int | None:
        """The exit code. None if the child did not reach its end."""
        return self._memory[_CODE] if self._memory[_HAS_ENDED] else None


def in_child(body: Body) -> int:
    """Run a command's body in a child and end this process like the child. The child returns the body's exit code.

    Without ``sigtimedwait`` (macOS, Windows), and under a debugger, the body runs in this process.
    """
    if sys.gettrace() is not None:
        return body()
    if not hasattr(signal, "sigtimedwait"):
        keep_results_apart()
        return body()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    word, parent = _Word(), os.getpid()
    waited = {signal.SIGCHLD, *(getattr(signal, name) for name in _PASSED_ON)}
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # otherwise ended children could not be waited for
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        child = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        complain(f"error: the command needs a process of its own: {error.strerror or error}")
        return INTERNAL
    if child:
        os._exit(_watch(child, word, waited))
    return _work(body, word, parent, before)


def _work(body: Body, word: _Word, parent: int, mask: set[int]) -> int:
    """Do the work, as the child. Interrupts count once they can become an exit code."""
    own = os.getpid()
    _end_with(parent)
    keep_results_apart()
    running.listen(word.entries.of_entry, word.entries.of_guest)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = body()
    except KeyboardInterrupt:
        complain("interrupted")
        code = INTERRUPTED
    if os.getpid() == own:  # a process forked by a plugin must not record anything
        word.of_end(code)
    return code


def _end_with(parent: int) -> None:
    """Let the kernel end this process with its parent (Linux): SIGKILL of the parent cannot be passed on."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent, 0):  # 0: the parent is outside this process's namespace (unshare --pid)
        os._exit(INTERNAL)


def _watch(child: int, word: _Word, waited: set[signal.Signals]) -> int:
    """Wait for the child as its parent, and return the exit code of the command.

    A wait for a device ignores an interrupt. A second one, a moment later, ends the child in any case, and so does the
    time limit after the result is written.
    """
    received: dict[int, float] = {}  # time of the first one
    is_given_up = False
    written: float | None = None  # time of its detection
    while not (ended := _ended(child)):
        info, now = signal.sigtimedwait(waited, _LOOK_S), time.monotonic()
        if word.code is not None:
            written = now if written is None else written
            if now - written > _GRACE_S:
                os.kill(child, signal.SIGKILL)
        if info is None or (number := info.si_signo) == signal.SIGCHLD:
            continue
        first = received.setdefault(number, now)
        if number == signal.SIGINT and now - first > _PATIENCE_S and signal.getsignal(number) is not signal.SIG_IGN:
            is_given_up = True
            os.kill(child, signal.SIGKILL)
        elif info.si_code <= 0:  # from a process; a terminal sends its signals to both
            os.kill(child, number)
        if number == signal.SIGTSTP:
            _stop()
    if word.code is not None:
        return word.code
    if is_given_up:
        complain("interrupted")
        return INTERRUPTED
    code = os.waitstatus_to_exitcode(ended[1])
    if -code in received:
        _die_of(-code)
        return 128 - code
    how = f"exit code {code}" if code >= 0 else f"signal {_name_of(-code)}"
    who = word.entries.running
    verb = "was loading" if who.startswith("plugin ") else "ran"
    when = f" while {who} {verb}" if who else ""
    complain(f"error: there is no result: the process that does the work ended with {how}{when}")
    complain(_remedy(word.entries.guests))
    return INTERNAL if code >= 0 else 128 - code


def _remedy(guests: tuple[str, ...]) -> str:
    """Return the remedy: a thread of any plugin may have ended the process."""
    if not guests:
        return (
            "no plugin of another distribution had begun to load: a library has crashed, or somebody has ended the "
            "process, for want of memory for instance; if neither, please report it as CONTRIBUTING.md says"
        )
    first, *others = guests
    more = f", then {', '.join(others)}" if others else ""
    which = f"plugins {', '.join(guests)}" if others else f"plugin {first}"
    return (
        f"{which} may have ended it, in a thread too: repair that, or try --no-plugin {first}{more}; "
        f"muster plugin check {first} finds more"
    )


def _ended(child: int) -> tuple[int, int] | None:
    """Return the child's number and status, once it has ended."""
    number, status = os.waitpid(child, os.WNOHANG)
    return (number, status) if number else None


def _stop() -> None:
    """Stop this process like its child until it is continued. If stops are ignored, neither stops."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.raise_signal(signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def _die_of(number: int) -> None:
    """End this process by the signal that ended its child, so the sender sees it."""
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)


def _name_of(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)
