"""What a build is asked for, what it gives, and how it fails."""

import hashlib
import re
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.findings import CODES, Finding
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.values import frozen


@frozen
class ParameterType:
    """A C type of a kernel parameter: its size, and the number that stands for it in the compile-time check."""

    size: int
    number: int


# The numbers are those that declared.py computes from the real C++ type: 10 signed, 20 unsigned, 30 floating point,
# 40 bool, 1000 class, each plus the size in bytes; a pointer is 1.
PARAMETER_TYPES = {
    "ptr": ParameterType(8, 1),
    **{f"i{8 * size}": ParameterType(size, 10 + size) for size in (1, 2, 4, 8)},
    **{f"u{8 * size}": ParameterType(size, 20 + size) for size in (1, 2, 4, 8)},
    "f32": ParameterType(4, 34),
    "f64": ParameterType(8, 38),
    "bool": ParameterType(1, 41),
    "bf16": ParameterType(2, 1002),
    "f16": ParameterType(2, 1002),
    "tensormap": ParameterType(128, 1128),  # CUtensorMap, taken as const __grid_constant__
}

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

#: What fits into each integer parameter.
INTEGERS = {
    f"{sign}{bits}": range(-(1 << bits - 1), 1 << bits - 1) if sign == "i" else range(1 << bits)
    for sign in "iu" for bits in (8, 16, 32, 64)
}  # fmt: skip


@frozen
class EntryPoint:
    """One ``extern "C" __global__`` function: its name, and its parameters as names of ``PARAMETER_TYPES``.

    ``dynamic_shared_bytes`` and ``threads`` are the largest that it will be launched with (0 threads: not stated).
    """

    name: str
    parameters: tuple[str, ...]
    dynamic_shared_bytes: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _IDENTIFIER.match(self.name):
            raise ValueError(f"entry point {self.name!r} is not a C identifier")
        unknown = [name for name in self.parameters if name not in PARAMETER_TYPES]
        if isinstance(self.parameters, str) or unknown:
            raise ValueError(
                f"{self.name}: parameters are {self.parameters!r}, expected a tuple of {', '.join(PARAMETER_TYPES)}"
            )
        if self.dynamic_shared_bytes < 0 or self.threads < 0:
            raise ValueError(f"{self.name}: dynamic_shared_bytes and threads must not be negative")


@frozen
class Compiled:
    """A cubin with the compiler's log."""

    cubin: bytes = field(repr=False)
    log: str = field(repr=False)


class Work(Protocol):
    """One compilation by one compiler."""

    @property
    def compiler(self) -> str:
        """The compiler as reports name it."""

    @property
    def source_sha256(self) -> str:
        """The digest of the bytes that are compiled, as the backend of the kernel computes it."""

    def key_parts(self) -> list[bytes]:
        """Return everything that determines the machine code."""

    def compile(self) -> Compiled:
        """Compile for exactly the architecture asked for; BuildFailure says why there is no cubin."""

    def readable(self, log: str) -> str:
        """Return a log with the paths of the files in it."""


@frozen
class BuildRequest:
    """One source file to compile for one architecture.

    ``name`` is what reports call it. ``include_dirs`` are searched for the source's own headers, after the folder
    of the including file; headers of CUDA are found in the installed wheels and need no entry.
    """

    name: str
    source: Path
    arch: Arch
    entries: tuple[EntryPoint, ...]
    options: tuple[str, ...] = ()
    include_dirs: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if not names:
            raise ValueError(f"{self.name}: no entry point is named, so nothing could be checked")
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{self.name}: entry points named twice: {', '.join(doubled)}")

    def work(self) -> Work | None:
        """Return how another compiler makes this; None: NVRTC does."""
        return None


@frozen
class EntryResources:
    """What one entry point needs, read from the cubin.

    Spills come from the compiler's log and are None where there is none (a cubin that somebody else compiled).
    ``max_threads`` is the bound of ``__launch_bounds__``, ``cluster`` the compiled-in cluster size, None without.
    ``parameters`` are ``(offset, size)`` in bytes; ``instructions`` counts those before the first unconditional end.
    """

    registers: int
    stack_bytes: int
    static_shared_bytes: int
    max_threads: int | None
    cluster: tuple[int, int, int] | None
    parameters: tuple[tuple[int, int], ...]
    instructions: int
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None


@frozen
class Built:
    """Machine code that was checked against its request.

    ``entries`` holds the requested entry points, ``source_sha256`` the digest of the bytes that were compiled.
    """

    cubin: bytes = field(repr=False)
    arch: Arch
    entries: dict[str, EntryResources]
    log: str = field(repr=False)
    compiler: str
    source_sha256: str = ""
    from_cache: bool = field(default=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the cubin."""
        return hashlib.sha256(self.cubin).hexdigest()


class BuildFailure(MusterError):
    """A build that gave no usable code. ``code`` is a finding code of group build; ``log`` is the compiler's.

    ``where`` is the line of the source, as far as it is known.
    """

    def __init__(
        self, code: str, why: str, log: str = "", remedies: tuple[str, ...] = (), where: tuple[str, ...] = ()
    ) -> None:
        if code not in CODES or CODES[code].group != "build":
            raise ValueError(f"{code!r} is not a finding code of group build")
        super().__init__(f"{code}: {why}")
        self.code, self.why, self.log, self.remedies, self.where = code, why, log, remedies, where

    def finding(self, subject: str, where: tuple[str, ...] = ()) -> Finding:
        """Return this failure as a finding about a key."""
        return Finding(self.code, subject, self.why, where or self.where, self.remedies, log=self.log)
