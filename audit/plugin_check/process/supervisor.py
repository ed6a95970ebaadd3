"""The process that ``muster plugin check`` starts: it lets a process of its own do the work, and ends what that leaves.

No plugin's code runs here. Orphans of the work become children of this process (Linux), also those that have left its
session, so that they are found and ended. Elsewhere there is no supervisor, and the work is done in this process.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator

from kernel_muster.audit.plugin_check.protocol.channel import Sender
from kernel_muster.audit.plugin_check.protocol.ended import Ended
from kernel_muster.registry.plugin_code.descriptors import out_of_sight

#: The names of the two senders.
WORKER, SUPERVISOR = "worker", "supervisor"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_S = 1.0
# Our own compilers end when nobody gives them work any more.
_GRACE_S = 0.3
_PATIENCE_S = 5.0
_MOST_NAMED = 8
_LONGEST = 200


def can_supervise() -> bool:
    """Whether this system gives orphans to a process that asks for them."""
    return sys.platform == "linux" and hasattr(signal, "sigtimedwait")


def main() -> None:
    """Read what is to be done from standard input, and do it in a process of its own."""
    arguments = json.loads(sys.stdin.buffer.read())
    _forget_stdin()
    given = arguments.pop("pipe")
    pipe = out_of_sight(given)
    os.close(given)
    keys = {name: bytes.fromhex(key) for name, key in arguments.pop("keys").items()}
    _end_with(arguments.pop("parent"), signal.SIGTERM)
    if can_supervise():
        _supervise(Sender(pipe, SUPERVISOR, keys[SUPERVISOR]))
    sender = Sender(pipe, WORKER, keys[WORKER])
    keys.clear()
    from kernel_muster.audit.plugin_check.process.worker import work

    work(sender, **arguments)


def _forget_stdin() -> None:
    """Let nothing read what was given once more."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)


def _end_with(parent: int, number: signal.Signals) -> None:
    """Let the kernel send a signal when the parent ends, whatever ended it (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)


def _supervise(sender: Sender) -> None:
    """Fork, and return in the child, which does the work; this process ends all and itself afterwards."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    own = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    worker = os.fork()
    if worker == 0:
        os.setsid()
        _end_with(own, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    code, is_own_end = _wait_for(worker)
    left, unended = _end_all(_GRACE_S if is_own_end else 0.0)
    sender.send(Ended(code=code, left=tuple(left), unended=tuple(unended)))
    os._exit(0)


def _wait_for(worker: int) -> tuple[int, bool]:
    """Return the exit code of the work, negative for a signal, and whether nobody asked this process to end it."""
    is_own_end = True
    while True:
        number, status = os.waitpid(worker, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status), is_own_end
        asked = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, _LOOK_S)
        if asked is not None and asked.si_signo == signal.SIGTERM:
            is_own_end = False
            os.kill(worker, signal.SIGKILL)


def _end_all(grace: float) -> tuple[list[str], list[str]]:
    """End all processes that the work has left; return their commands, and those of processes that do not end."""
    left: dict[int, str] = {}
    start = time.monotonic()
    while (children := list(_children())) and (waited := time.monotonic() - start) < _PATIENCE_S:
        for child in children:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.waitpid(child, os.WNOHANG)[0] or waited < grace:
                    continue
                left.setdefault(child, _command_of(child))
                os.kill(child, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.02)
    return _named(left.values()), _named(_command_of(child) for child in children)


def _children() -> Iterator[int]:
    """Yield the children of this process, adopted ones too."""
    own = str(os.getpid())
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # The name of the program stands in brackets and may hold anything.
                if stat.read().rpartition(b")")[2].split()[1] == own.encode():
                    yield int(name)


def _command_of(process: int) -> str:
    """Return the command of a process, bounded; nothing for one of our compilers."""
    text = b""
    with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as line:
        text = line.read(4 * _LONGEST).strip(b"\0").replace(b"\0", b" ")
    if b"kernel_muster.registry.backends." in text:
        return ""
    if __spec__ is not None and __spec__.name.encode() in text:
        return "a copy of the check's own process"
    return text[:_LONGEST].decode("utf-8", "backslashreplace") or "a process without a command"


def _named(commands: Iterable[str]) -> list[str]:
    """Return the first of many commands, and how many more there are."""
    known = [command for command in commands if command]
    more = len(known) - _MOST_NAMED
    return known[:_MOST_NAMED] + ([f"{more} more"] if more > 0 else [])


if __name__ == "__main__":
    main()
