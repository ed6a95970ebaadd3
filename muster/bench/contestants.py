"""The contestants of a measurement: our kernels, the read kernel, and installed peers.

A contestant copies the data into its own layout and returns launches over enough cold copies. One that is not
installed, or does not support a shape, returns an :class:`Absent` with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from kernel_muster.bench.timing import copies_of
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookups import Lookups

Role = Literal["floor", "ours", "peer"]
Launch = Callable[[], Any]  # the result is ignored


@dataclass(frozen=True)
class Entry:
    """One prepared contestant: launches over its copies, its output, and the bytes and operations of one launch.

    ``check`` replaces the judge of ``out`` if a launch changes its own input. It makes one launch and returns the
    error.
    """

    launches: tuple[Launch, ...]
    out: Any  # None: not judged
    size_bytes: int
    flops: float = 0.0
    is_torch: bool = False
    check: Callable[[], float] | None = None


@dataclass(frozen=True)
class Absent:
    """The reason why a contestant does not run."""

    why: str


@dataclass(frozen=True)
class Contestant:
    """One contestant: ``make(stream)`` sets it up on the current device. ``handles`` are the kernels it launches.

    ``largest_error`` replaces the problem's limit: a peer of lower precision is timed too, and the record gives its
    error. An ``is_slow`` contestant, with minutes of tuning, runs only if named.
    """

    name: str
    role: Role
    make: Callable[[Any], Entry | Absent]
    handles: tuple[Handle, ...] = ()
    largest_error: float | None = None
    is_slow: bool = False

    @property
    def source_sha256(self) -> str:
        """Digest of the source of its kernels. Empty for other libraries' kernels."""
        return " ".join(sorted({handle.source_sha256 for handle in self.handles}))


def read_kernel(kernels: Lookups, size_bytes: int) -> Contestant:
    """Return the floor: a kernel that reads this many bytes once."""
    handle = kernels.kernel("muster_bench", "read_bytes")

    def make(stream: Any) -> Entry:
        import cupy

        size = max(size_bytes // 16 * 16, 16)
        out = cupy.zeros(1, cupy.uint32)
        data = [cupy.ones(size, cupy.uint8) for _ in range(copies_of(size))]
        return Entry(tuple(launch_of(handle, stream, data=one, out=out) for one in data), None, size)

    return Contestant("read", "floor", make)


def found(kernels: Lookups, module: str, func: str) -> Handle:
    """Return a kernel's handle. KernelMissing if there is none."""
    handle = kernels.kernel(module, func)
    assert isinstance(handle, Handle)  # noqa: S101  (a miss has raised)
    return handle


def launch_of(handle: Any, stream: Any, **arguments: Any) -> Launch:
    """Prepare a launch of a kernel of the registry on the timer's stream."""
    return partial(handle.prepare(**arguments), stream)


def _arrays(weight: Any) -> dict[str, Any]:
    """Return the arrays of a prepared weight, one of bytes or several, by the names of its fields."""
    return {name: value for name, value in vars(weight).items() if getattr(value, "ndim", 0)}


def copied(weight: Any) -> Any:
    """Return a copy of a prepared weight."""
    return replace(weight, **{name: array.copy() for name, array in _arrays(weight).items()})


def size_of(weight: Any) -> int:
    """Return the bytes of a prepared weight."""
    return sum(int(array.nbytes) for array in _arrays(weight).values())


def poisoned(shape: tuple[int, ...], dtype: str = "bf16") -> Any:
    """Return a CuPy array full of NaN: BF16 or FP32."""
    import cupy
    from kernel_muster.registry.contract.dtypes import numpy_dtype

    bits, carrier = (0x7FC0, cupy.uint16) if dtype == "bf16" else (0x7FC00000, cupy.uint32)
    return cupy.full(shape, bits, carrier).view(numpy_dtype(dtype))


def as_torch(array: Any) -> Any:
    """Return a device array as torch tensor, without a copy."""
    import torch

    return torch.from_dlpack(array)


def as_cupy(array: Any) -> Any:
    """Return a device array as CuPy's, without a copy."""
    import cupy

    return array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array)


def installed(package: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
