"""Runners: how a handle's checked arguments become a launch, on the host or on a device."""

from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from typing import Any, Protocol

from kernel_muster.registry.backends.request import EntryResources
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.contract.specs import KernelSpec, Stage, is_host_backend
from kernel_muster.registry.errors import ContractError, MusterError, NullKernelError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.values import frozen

Progress = Callable[[int, int, str], None]


class Launch(Protocol):
    """A launch whose arguments were checked: calling it only enqueues."""

    def __call__(self, stream: object | None = None) -> None:
        """Enqueue on a stream; None is CuPy's current one."""


class LaunchMemory(Protocol):
    """A caller's allocator of device memory for the stream that a launch runs on."""

    def empty(self, size_bytes: int) -> Any:
        """Return an array of bytes that hold anything."""

    def zeros(self, size_bytes: int) -> Any:
        """Return an array of bytes that are zero before the launch."""


@frozen
class LaunchOptions:
    """How one launch is prepared.

    ``overlap``: it may begin while the launch before it runs. ``scratch``: the caller's device memory, else its own.
    ``stream``: the stream that it will run on, where that is known; memory of its own then belongs to that stream.
    ``memory``: where scratch and counters of its own come from; CuPy's pool without it. ``is_borrowed``: its arguments
    are kept alive by whoever calls it.
    """

    overlap: bool = False
    scratch: Any = None
    stream: object | None = None
    is_stream_known: bool = False
    memory: LaunchMemory | None = None
    is_borrowed: bool = False


@frozen
class BuildState:
    """How far one spec has come in this boot, and what stopped it.

    ``digest`` is that of the machine code, ``source_sha256`` that of the source which the compiler was given.
    """

    stage: Stage
    failure: Finding | None = None
    resources: Mapping[str, EntryResources] = field(default_factory=dict)
    digest: str = ""
    compiler: str = ""
    source_sha256: str = ""


class Runner(Protocol):
    """Prepares launches for one target."""

    def start(self, spec: KernelSpec) -> None:
        """Begin whatever must happen before a spec can be launched."""

    def join(self, progress: Progress | None = None) -> None:
        """Wait for all that was started, and end what only building needs; ``progress(done, total, name)``."""

    def state(self, spec: KernelSpec) -> BuildState:
        """Wait for a spec and say how far it has come."""

    def findings(self) -> tuple[Finding, ...]:
        """Return what is to be said of all builds together, and of no single spec."""

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        """Return a launch of checked arguments that only enqueues."""

    def scratch_bytes(self, owner: str, spec: KernelSpec, bound: Bound) -> int:
        """Return how much device memory a launch of checked arguments needs besides them."""


def refuse_launch(why: str) -> Callable[..., Any]:
    """Return a function that takes the place of a launch, and raises NullKernelError."""

    def refuse(*given: Any) -> Any:
        raise NullKernelError(why)

    return refuse


class HostLaunch:
    """One call of a host kernel's function, with everything in place."""

    __slots__ = ("__weakref__", "_run")

    def __init__(self, run: Callable[[object | None], object]) -> None:
        self._run = run

    def __call__(self, stream: object | None = None) -> None:
        """Run the function; the host has no streams."""
        self._run(stream)

    def revoke(self, why: str) -> None:
        """Raise NullKernelError from now on."""
        self._run = refuse_launch(why)


class HostRunner:
    """Runs Python kernels in this process. There are no streams, and nothing to build."""

    def start(self, spec: KernelSpec) -> None:
        """Do nothing: a host kernel is loaded with its plugin."""

    def join(self, progress: Progress | None = None) -> None:
        """Do nothing."""

    def state(self, spec: KernelSpec) -> BuildState:
        """Return the stage: a host kernel that was selected can be called."""
        return BuildState("loaded")

    def findings(self) -> tuple[Finding, ...]:
        """Return nothing: nothing is built."""
        return ()

    def scratch_bytes(self, owner: str, spec: KernelSpec, bound: Bound) -> int:
        """Return 0: host kernels make what they need."""
        return 0

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        """Return a call of the kernel's function; ContractError for an array that is not host memory."""
        backend = spec.backend
        if not is_host_backend(backend):
            raise MusterError(f"{owner}: backend {spec.backend_name} does not run on the host")
        for name, view in bound.views.items():
            if view.device >= 0:
                raise ContractError(f"{owner}: {name} lies on cuda:{view.device}, expected host memory")

        return HostLaunch(partial(backend.launch, bound.arguments, bound.dims))


class NoRunner:
    """Stands where there is an architecture and no device: kernels are selected, none can be called."""

    def start(self, spec: KernelSpec) -> None:
        """Do nothing."""

    def join(self, progress: Progress | None = None) -> None:
        """Do nothing."""

    def state(self, spec: KernelSpec) -> BuildState:
        """Return the lowest stage."""
        return BuildState("registered")

    def findings(self) -> tuple[Finding, ...]:
        """Return nothing: nothing is built."""
        return ()

    def scratch_bytes(self, owner: str, spec: KernelSpec, bound: Bound) -> int:
        """Return 0: nothing is launched."""
        return 0

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        """Refuse."""
        raise MusterError(f"{owner}: this boot has an architecture as its target, and no device to launch on")
