"""Many builds at once: started when asked for, joined when needed, every result and failure kept."""

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from types import TracebackType

from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.request import BuildFailure, BuildRequest, Built
from kernel_muster.registry.values import frozen

# A compilation takes some 100 MB; more at once than this gains little and could take a small machine down.
_MOST_WORKERS = 16


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
    """Threads that build; use it as a context manager. Equal requests are built once."""

    def __init__(self, builder: Builder, workers: int | None = None) -> None:
        self._builder = builder
        self._executor = ThreadPoolExecutor(workers or _workers(), thread_name_prefix="muster-build")
        self._futures: dict[BuildRequest, Future[Outcome]] = {}
        self._closed = False

    def __enter__(self) -> "BuildPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an interruption nobody wants what has not begun.
        self._executor.shutdown(wait=True, cancel_futures=kind is not None)

    def submit(self, request: BuildRequest) -> Future[Outcome]:
        """Start a build, or return the one that was started for an equal request; a closed pool builds at once."""
        if request not in self._futures:
            self._futures[request] = self._now(request) if self._closed else self._executor.submit(self._run, request)
        return self._futures[request]

    def close(self) -> None:
        """Wait for what runs, and end the threads."""
        self._closed = True
        self._executor.shutdown(wait=True)

    def _now(self, request: BuildRequest) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        future.set_result(self._run(request))
        return future

    def join(self, progress: Callable[[Progress], None] | None = None) -> tuple[Outcome, ...]:
        """Wait for all builds and return their outcomes in the order of submission.

        ``progress`` is called in this thread after each. A failed build is an outcome; any other exception is raised.
        """
        futures = dict(self._futures)
        for done, future in enumerate(as_completed(futures.values()), start=1):
            outcome = future.result()
            if progress is not None:
                progress(Progress(done, len(futures), outcome))
        return tuple(future.result() for future in futures.values())

    def _run(self, request: BuildRequest) -> Outcome:
        start = time.perf_counter()
        try:
            built = self._builder.build(request)
        except BuildFailure as failure:
            return Outcome(request, time.perf_counter() - start, failure=failure)
        return Outcome(request, time.perf_counter() - start, built=built)


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
