"""Many builds at once: started when asked for, joined when needed, every result and failure kept."""

import heapq
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import TracebackType

from kernel_muster.registry.backends.builder import Begun, Builder
from kernel_muster.registry.backends.request import BuildFailure, BuildRequest, Built
from kernel_muster.registry.values import frozen

# A compilation takes some 100 MB; more at once than this gains little and could take a small machine down.
_MOST_WORKERS = 16
# How soon it is seen that builds wait for another process.
_LOOK_SECONDS = 1.0


@frozen
class Outcome:
    """How one build ended: exactly one of ``built`` and ``failure`` is there."""

    request: BuildRequest
    seconds: float
    built: Built | None = None
    failure: BuildFailure | None = None


@frozen
class Progress:
    """One more build has ended."""

    done: int
    total: int
    outcome: Outcome


class BuildPool:
    """Threads that build; use it as a context manager. Equal requests are built once.

    First comes what takes no compiler, so that all that the cache has is soon done; of the rest the costliest begins
    first: begun last, it would keep one thread at work when the others have nothing left.
    """

    def __init__(self, builder: Builder, workers: int | None = None) -> None:
        self._builder = builder
        self._executor = ThreadPoolExecutor(workers or _workers(), thread_name_prefix="muster-build")
        self._futures: dict[BuildRequest, Future[Outcome]] = {}
        self._tasks: list[tuple[float, int, Callable[[], None]]] = []  # a heap of (-cost, number, what to do)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> "BuildPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        # After an interruption nobody wants what has not begun.
        self._executor.shutdown(wait=True, cancel_futures=True)
        for future in self._futures.values():
            future.cancel()

    def submit(self, request: BuildRequest) -> Future[Outcome]:
        """Start a build, or return the one that was started for an equal request; a closed pool builds at once."""
        if request not in self._futures:
            future = self._futures[request] = Future()
            if self._closed:
                with _failures_told(request, future):
                    self._finish(self._builder.begin(request), future)
            else:
                self._add(math.inf, lambda: self._begin(request, future))
        return self._futures[request]

    @property
    def requested(self) -> int:
        """How many builds there are."""
        return len(self._futures)

    def close(self) -> None:
        """Wait for all builds, and end the threads."""
        self._closed = True
        wait(list(self._futures.values()))
        self._executor.shutdown(wait=True)

    def join(
        self,
        progress: Callable[[Progress], None] | None = None,
        waiting: Callable[[int, int, str], None] | None = None,
    ) -> tuple[Outcome, ...]:
        """Wait for all builds and return their outcomes in the order of submission.

        ``progress`` is called in this thread after each, and ``waiting(done, total, lock)`` where another process keeps
        one from going on. A failed build is an outcome; any other exception is raised.
        """
        futures = dict(self._futures)
        left, told = set(futures.values()), ""
        while left:
            look = None if waiting is None else _LOOK_SECONDS
            ended, left = wait(left, timeout=look, return_when=FIRST_COMPLETED)
            done = len(futures) - len(left)
            for number, future in enumerate(ended, start=done - len(ended) + 1):
                outcome = future.result()
                if progress is not None:
                    progress(Progress(number, len(futures), outcome))
            lock = "" if ended or waiting is None else next(iter(self._builder.waits()), "")
            if waiting is not None and lock and lock != told:
                waiting(done, len(futures), lock)
            told = lock
        return tuple(future.result() for future in futures.values())

    def _add(self, cost: float, task: Callable[[], None]) -> None:
        with self._lock:
            heapq.heappush(self._tasks, (-cost, next(self._numbers), task))
        self._executor.submit(self._costliest)

    def _costliest(self) -> None:
        with self._lock:
            _, _, task = heapq.heappop(self._tasks)
        task()

    def _begin(self, request: BuildRequest, future: Future[Outcome]) -> None:
        with _failures_told(request, future):
            begun = self._builder.begin(request)
            if begun.compiled is None:
                self._add(begun.cost, lambda: self._finish(begun, future))
            else:
                self._finish(begun, future)

    def _finish(self, begun: Begun, future: Future[Outcome]) -> None:
        start = time.perf_counter()
        with _failures_told(begun.request, future):
            built = self._builder.finish(begun)
            future.set_result(Outcome(begun.request, time.perf_counter() - start, built=built))


@contextmanager
def _failures_told(request: BuildRequest, future: Future[Outcome]) -> Iterator[None]:
    """Make a failed build an outcome, and let whoever waits for it have any other exception."""
    start = time.perf_counter()
    try:
        yield
    except BuildFailure as failure:
        future.set_result(Outcome(request, time.perf_counter() - start, failure=failure))
    except BaseException as error:  # noqa: BLE001  (raised again where the result is asked for)
        future.set_exception(error)


def build_all(
    builder: Builder,
    requests: Iterable[BuildRequest],
    progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> tuple[Outcome, ...]:
    """Build all requests in parallel and return one outcome for each different one, in their order."""
    with BuildPool(builder, workers) as pool:
        for request in requests:
            pool.submit(request)
        return pool.join(progress)


def _workers() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, _MOST_WORKERS))
