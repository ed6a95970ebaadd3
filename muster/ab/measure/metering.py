"""A runner that observes every launch of a boot: launches of each kernel, time on the host, and their order."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.launch.runners import BuildState, Launch, LaunchOptions, Progress, Runner


@dataclass
class KernelUse:
    """One kernel in a span of time: its launches, and on the host their seconds."""

    launches: int = 0
    seconds: float = 0.0


Uses = dict[str, KernelUse]
#: Launches of one recorded step, in order, each with its key.
Recorded = tuple[tuple[str, Launch], ...]


class Wrapped:
    """Stands before another runner, and passes everything on except the calls that a subclass observes."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner

    def start(self, spec: KernelSpec) -> None:
        """Begin the work needed before a launch."""
        self._inner.start(spec)

    def join(self, progress: Progress | None = None) -> None:
        """Wait for all started work."""
        self._inner.join(progress)

    def state(self, spec: KernelSpec) -> BuildState:
        """Return the build state of a spec."""
        return self._inner.state(spec)

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings about all builds."""
        return self._inner.findings()

    def scratch_bytes(self, owner: str, spec: KernelSpec, bound: Bound) -> int:
        """Return the scratch memory of a launch."""
        return self._inner.scratch_bytes(owner, spec, bound)

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        """Return the launch of the runner behind."""
        return self._inner.prepare(owner, spec, bound, options)


class Meter(Wrapped):
    """Stands before another runner and counts launches.

    On the host a launch is synchronous: its wall time is the kernel's, and it is counted when it runs. On a device it
    is counted when it is prepared, because replays of a graph are not observable.
    """

    def __init__(self, inner: Runner, *, is_host: bool) -> None:
        super().__init__(inner)
        self._is_host = is_host
        self._recorded: list[tuple[str, Launch]] | None = None
        self.uses: Uses = {}
        self.steps: Uses = {}
        self.seen: Callable[[str, dict[str, Any]], None] | None = None  # called with each launch and its arguments

    def restart(self) -> None:
        """Begin a new span of ``uses``."""
        self.uses = {}

    def restart_steps(self) -> None:
        """Begin a new span of ``steps``: the part of a run after its prefill."""
        self.steps = {}

    @contextmanager
    def recording(self) -> Iterator[list[tuple[str, Launch]]]:
        """Keep the launches prepared inside, in order."""
        kept: list[tuple[str, Launch]] = []
        self._recorded = kept
        try:
            yield kept
        finally:
            self._recorded = None

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        """Return a counted launch, and keep it while a step is recorded."""
        with _named(owner):
            launch = self._inner.prepare(owner, spec, bound, options)
        if self._recorded is not None:
            self._recorded.append((owner, launch))
        if self.seen is not None:
            return self._shown(owner, bound, launch)
        if not self._is_host:
            self._count(owner, 0.0)
            return launch

        def metered(stream: Any = None) -> None:
            start = time.perf_counter()
            with _named(owner):
                launch(stream)
            self._count(owner, time.perf_counter() - start)

        return metered

    def _shown(self, owner: str, bound: Bound, launch: Launch) -> Launch:
        def shown(stream: Any = None) -> None:
            launch(stream)
            if self.seen is not None:
                self.seen(owner, bound.arguments)

        return shown

    def _count(self, owner: str, seconds: float) -> None:
        for span in (self.uses, self.steps):
            use = span.setdefault(owner, KernelUse())
            use.launches += 1
            use.seconds += seconds


@contextmanager
def _named(owner: str) -> Iterator[None]:
    """Add the kernel's name to every exception raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {owner}")
        raise


def uses_of(recorded: Recorded) -> Uses:
    """Return the number of launches of each kernel in a recorded step."""
    found: Uses = {}
    for key, _ in recorded:
        found.setdefault(key, KernelUse()).launches += 1
    return found


def differing_kernels(
    a: Mapping[str, KernelUse], b: Mapping[str, KernelUse], changed: frozenset[str]
) -> frozenset[str]:
    """Return the kernels that differ between two spans: other code, or another number of launches."""
    none = KernelUse()
    return frozenset(
        key for key in {*a, *b} if key in changed or a.get(key, none).launches != b.get(key, none).launches
    )
