"""NVRTC in processes of its own, which end after some seconds without work.

A compiler that crashes is then a finding and not the end of whoever asked, and its memory can lie on huge pages, which
glibc gives only to a process that begins with them: NVRTC takes 10 to 20% less time so. Where no such process can be
started (an embedded interpreter names its host as the executable), the caller's own compiles, with the same bytes.
"""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from kernel_muster.registry.backends.nvrtc.compiler import CompileInput, compile_cubin
from kernel_muster.registry.backends.nvrtc.headers import Toolkit
from kernel_muster.registry.backends.request import BuildFailure, Compiled
from kernel_muster.registry.logs import logger

IDLE_SECONDS = 5.0

# Tunables of glibc (2.35 and newer; others ignore them). What is freed stays, as the next source needs it again.
_TUNABLES = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.top_pad": 1 << 26,
    "glibc.malloc.mmap_threshold": 1 << 25,
    "glibc.malloc.trim_threshold": 1 << 30,
}
# The path comes first, so that the package is found where the caller found it.
_CODE = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from kernel_muster.registry.backends.nvrtc.compiler_process import serve; serve()"
)
_READY = b"kernel-muster compiler\n"
_LONGEST_LOG = 4000


class CompilerGone(Exception):
    """The process ended, or never was one: ``status`` is its exit status, ``log`` what it wrote last."""

    def __init__(self, status: int, log: str) -> None:
        super().__init__(f"exit status {status}")
        self.status, self.log = status, log

    @property
    def how(self) -> str:
        """The end in words."""
        try:
            return f"signal {signal.Signals(-self.status).name}"
        except ValueError:
            return f"exit status {self.status}"


class CompilerProcess:
    """A process that compiles one source after the other; OSError or CompilerGone where it does not begin."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-c", _CODE]
        with ExitStack() as files:
            self._log = files.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(  # noqa: S603  (this interpreter)
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=_environment()
            )
            files.callback(self.end)
            self._send(sys.path)
            if self._answers.read(len(_READY)) != _READY:
                raise self._gone()
            files.pop_all()

    def compile(self, work: CompileInput, toolkit: Toolkit) -> Compiled:
        """Return the machine code, or raise what compiling raised; CompilerGone if the process ends over it."""
        self._send((work, toolkit))
        try:
            answer = pickle.load(self._answers)  # noqa: S301  (from a process of our own code)
        except (EOFError, pickle.UnpicklingError):
            raise self._gone() from None
        if isinstance(answer, Compiled):
            return answer
        raise answer

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def end(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            with suppress(OSError):  # what could not be sent to a process that is gone
                if file is not None:
                    file.close()

    @property
    def _answers(self) -> BinaryIO:
        assert self._process.stdout is not None  # noqa: S101  (a pipe)
        return self._process.stdout  # type: ignore[return-value]

    def _send(self, what: Any) -> None:
        assert self._process.stdin is not None  # noqa: S101  (a pipe)
        try:
            pickle.dump(what, self._process.stdin)
            self._process.stdin.flush()
        except OSError:
            raise self._gone() from None

    def _gone(self) -> CompilerGone:
        """Say how the process ended, which has closed its answers or its input."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._process.kill()
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return CompilerGone(self._process.wait(), text[-_LONGEST_LOG:])


class Compilers:
    """The processes that have no work at the moment; safe to share between threads."""

    def __init__(self) -> None:
        self._idle: list[CompilerProcess] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._can_start = Path(sys.executable or "").name.startswith("python")

    def compile(self, work: CompileInput, toolkit: Toolkit) -> Compiled:
        """Compile in a process; BuildFailure says why there is no cubin, also where the compiler itself ended."""
        process = self._take()
        if process is None:
            return compile_cubin(work, toolkit)
        try:
            compiled = process.compile(work, toolkit)
        except BuildFailure:
            self._put_back(process)
            raise
        except CompilerGone as gone:
            process.end()
            raise _crashed(gone, work, toolkit) from None
        except BaseException:  # an interruption: it is still at work
            process.end()
            raise
        self._put_back(process)
        return compiled

    def end(self) -> None:
        """End the processes that have no work."""
        with self._lock:
            ended, self._idle = self._idle, []
        for process in ended:
            process.end()

    def _take(self) -> CompilerProcess | None:
        while process := self._take_idle():
            if process.is_alive:
                return process
            process.end()  # somebody has ended it while it had no work
        if not self._can_start:
            return None
        try:
            return CompilerProcess()
        except (OSError, CompilerGone) as error:
            logger().info("compilers.none", why=f"{error}", effect="this process compiles")
            self._can_start = False
            return None

    def _take_idle(self) -> CompilerProcess | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _put_back(self, process: CompilerProcess) -> None:
        with self._lock:
            self._idle.append(process)
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(IDLE_SECONDS, self.end)
            self._timer.daemon = True
            with suppress(RuntimeError):  # no thread can start: it ends with this process
                self._timer.start()


def _crashed(gone: CompilerGone, work: CompileInput, toolkit: Toolkit) -> BuildFailure:
    remedies = (
        "compile fewer at once if the machine ran out of memory (taskset -c 0 muster ...)",
        "or install another version of NVRTC, or write the source in another way",
    )
    why = (
        f"{toolkit.compiler} itself ended with {gone.how} while it compiled {work.closure.source.path} for {work.arch}"
    )
    return BuildFailure("COMPILE_FAILED", why, gone.log, remedies)


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("PYTHONINSPECT", None)  # it would go on reading when the work is done
    given = environment.get("GLIBC_TUNABLES", "")
    own = [f"{name}={value}" for name, value in _TUNABLES.items() if f"{name}=" not in given]
    environment["GLIBC_TUNABLES"] = ":".join([given, *own] if given else own)
    return environment


def serve() -> None:
    """Compile what comes on stdin until it ends; the answers go to what was stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the one who asked ends this process
    requests: SimpleQueue[tuple[CompileInput, Toolkit]] = SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True).start()
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever else is written is no answer
        answers.write(_READY)
        answers.flush()
        while True:
            try:
                answer: Any = compile_cubin(*requests.get())
            except BuildFailure as failure:
                answer = failure
            except BaseException:  # noqa: BLE001  (stdin is being read: this process cannot end the usual way)
                traceback.print_exc()
                os._exit(1)
            pickle.dump(answer, answers)
            answers.flush()


def _read(stream: BinaryIO, requests: "SimpleQueue[tuple[CompileInput, Toolkit]]") -> None:
    """Pass requests on, and end this process, at work or not, when the one who asks has ended."""
    while True:
        try:
            requests.put(pickle.load(stream))  # noqa: S301  (from the process that started this one)
        except EOFError:
            os._exit(0)
        except BaseException:  # noqa: BLE001  (what cannot be read has no answer, and nobody would see the end of input)
            traceback.print_exc()
            os._exit(1)


compilers = Compilers()
atexit.register(lambda: compilers.end())


def _begin_again() -> None:
    """A forked process shares the pipes of its parent, and must not use them."""
    global compilers
    _INHERITED.append(compilers)
    compilers = Compilers()


_INHERITED: list[Compilers] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)
