"""CUDA C++ kernels: what a spec says of its source, and how one launch follows from checked arguments."""

import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from kernel_muster.registry.backends.nvrtc.closure import read_closure
from kernel_muster.registry.backends.nvrtc.options import normalise_options
from kernel_muster.registry.backends.request import BuildRequest, EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import ArrayView
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.contract.specs import Backend, has_member
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.values import frozen

_LONGEST_NAME = 200

Extent = tuple[int, int, int]


@frozen
class LaunchPlan:
    """One launch: entry point, grid, and the values of its parameters in order.

    ``arguments`` are array views (passed as pointers), numbers, and what workspace.py offers: ``Scratch``, ``Counters``
    and ``TensorMap``. ``block`` None is the entry's launch bound. A ``cluster`` is for kernels that have none compiled
    in. ``may_overlap`` is False for a kernel that does not wait for
    the launch before it (``griddepcontrol.wait``): it never begins early, whatever ``handle.prepare`` asks for.
    """

    entry: str
    grid: Extent
    arguments: tuple[Any, ...]
    block: Extent | None = None
    dynamic_shared_bytes: int = 0
    cluster: Extent | None = None
    may_overlap: bool = True


class DeviceBackend(Protocol):
    """A backend whose code is compiled for an architecture and launched through the driver."""

    @property
    def name(self) -> str:
        """The backend's name: ``cuda_cpp``."""

    @property
    def source_sha256(self) -> str:
        """The digest of the bytes whose change makes this another kernel."""

    @property
    def strided(self) -> frozenset[str]:
        """Parameters that may have gaps between rows; all others are contiguous."""

    def request(self, arch: Arch) -> BuildRequest:
        """Return what must be built for an architecture."""

    def plan(self, bound: Bound, entries: Mapping[str, EntryResources]) -> tuple[LaunchPlan, ...]:
        """Return the launches for checked arguments, in order; ContractError where they do not suit this kernel."""


def is_device_backend(backend: Backend) -> TypeGuard[DeviceBackend]:
    """Whether a backend is compiled for a device."""
    return has_member(backend, "request") and has_member(backend, "plan")


@frozen
class CudaKernel:
    """A kernel whose CUDA C++ source we compile.

    ``source`` may include headers of its own folder and of ``include_dirs``; all paths are absolute, so that a kernel
    is the same from any working directory. One source may serve several keys: equal requests are built once.
    ``planner(bound, entries)`` chooses entry point and grid, of one launch or of several that follow each other;
    ``entries`` holds what each entry point needs, its launch bound and cluster among it.
    ``strided`` names parameters whose rows may have gaps.
    """

    source: Path
    entries: tuple[EntryPoint, ...]
    planner: Callable[[Bound, Mapping[str, EntryResources]], LaunchPlan | tuple[LaunchPlan, ...]]
    include_dirs: tuple[Path, ...] = ()
    options: tuple[str, ...] = ()
    strided: frozenset[str] = frozenset()
    name: str = "cuda_cpp"

    def problems(self) -> list[str]:
        """Say what is malformed, all at once."""
        found = path_problems(self.source, self.include_dirs)
        return [*found, *entry_problems(self.entries, EntryPoint), *option_problems(self.options)]

    @property
    def source_sha256(self) -> str:
        """The digest of the source, of all headers of its own, and of the options, as the files are now."""
        return read_closure(self.source, self.include_dirs).sha256(self.options)

    def request(self, arch: Arch) -> BuildRequest:
        """Return what must be built for an architecture."""
        return BuildRequest(self.source.name, self.source, arch, self.entries, self.options, self.include_dirs)

    def plan(self, bound: Bound, entries: Mapping[str, EntryResources]) -> tuple[LaunchPlan, ...]:
        """Return the launches for checked arguments, in order."""
        plan = self.planner(bound, entries)
        return plan if isinstance(plan, tuple) else (plan,)


def idle_problem(bound: Bound) -> str:
    """Say what a planner that launches nothing leaves undone; nothing where no row comes in and states stay.

    An ``out`` with elements is then unwritten, and where no argument is empty there is work.
    """
    sizes = {name: view.size for name, view in bound.views.items()}
    left = [param.name for param in bound.outputs if param.role == "out" and sizes.get(param.name)]
    if left or all(sizes.values()):
        return f"the planner launches nothing, although {', '.join(left) or 'every argument'} has elements"
    return ""


def path_problems(source: object, include_dirs: Iterable[object] = ()) -> list[str]:
    """Say which paths of a kernel are not absolute: they would mean another file from another working directory."""
    found = []
    for label, path in (("source", source), *(("include_dirs", one) for one in include_dirs)):
        if not isinstance(path, Path):
            found.append(f"{label} is {_no_path(path)}")
        elif not path.is_absolute():
            meant = f"Path(__file__).parent / {str(path)!r}"
            found.append(f"{label} is {str(path)!r}, expected an absolute path, such as {meant}")
    return found


def entry_problems(entries: object, kind: type) -> list[str]:
    """Say why the entry points of a kernel are none that can be built."""
    if not isinstance(entries, tuple) or not all(isinstance(entry, kind) for entry in entries):
        return [f"entries is {reprlib.repr(entries)}, expected a tuple of {kind.__name__}"]
    if not entries:
        return ["entries is empty: no entry point is named, so nothing could be checked"]
    names = [entry.name for entry in entries]
    doubled = sorted({name for name in names if names.count(name) > 1})
    return [f"entries: entry points named twice: {', '.join(doubled)}"] if doubled else []


def option_problems(options: object) -> list[str]:
    """Say which compiler option a kernel may not give."""
    if not isinstance(options, tuple):
        return [f"options is {reprlib.repr(options)}, expected a tuple of text"]
    try:
        normalise_options(options)
    except ValueError as error:
        return [f"options: {error}"]
    return []


def _no_path(value: object) -> str:
    """Say what stands where a Path should: a file's name, or the source itself, of which a few words will do."""
    if not isinstance(value, str):
        return f"{reprlib.repr(value)}, expected a Path"
    if len(value.splitlines()) > 1 or len(value) > _LONGEST_NAME:
        begin = " ".join(value[:_LONGEST_NAME].split())[:40]
        where = "write it to a file, and give that: Path(__file__).parent / 'kernel.cu'"
        return f"{len(value)} characters of text, {begin!r}..., expected a Path: {where}"
    meant = f"Path({value!r})" if value.startswith("/") else f"Path(__file__).parent / {value!r}"
    return f"{value!r}, expected a Path, such as {meant}"


def row_stride(view: ArrayView) -> int:
    """Return the distance of two rows of a matrix in elements; ContractError where they come in falling order."""
    stride = view.strides[0] // view.dtype.itemsize if view.shape[0] > 1 else view.shape[1]
    if stride < 0:
        raise ContractError(f"rows are {stride} elements apart, expected each behind the one before: copy the slice")
    return stride
