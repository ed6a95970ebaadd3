"""The CUDA toolkit as pip installs it: which wheels are there, and where their headers are.

Only wheels are looked at, never ``/usr/local/cuda`` or a variable: what compiles on one machine must compile on all.
"""

import re
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from kernel_muster.registry.backends.request import BuildFailure
from kernel_muster.registry.distributions import normal_name
from kernel_muster.registry.values import frozen

# CUDA 13 names first: where both are installed, the newer toolkit compiles. The 12 wheels keep crt/ in -nvcc-cu12.
_COMPILER = {13: "nvidia-cuda-nvrtc", 12: "nvidia-cuda-nvrtc-cu12"}
_HEADERS = {
    13: (
        ("nvidia-cuda-runtime", "cuda_runtime.h"),
        ("nvidia-cuda-crt", "crt/host_defines.h"),
        ("nvidia-cuda-cccl", "cuda/std/version"),
    ),
    12: (
        ("nvidia-cuda-runtime-cu12", "cuda_runtime.h"),
        ("nvidia-cuda-nvcc-cu12", "crt/host_defines.h"),
        ("nvidia-cuda-cccl-cu12", "cuda/std/version"),
    ),
}
# Compilers alone: they need no device, and CuPy, which [cuda13] adds, is of no use without one.
EXTRAS = {13: "kernel-muster[nvrtc13,numba13]", 12: "kernel-muster[nvrtc12,numba12]"}
_OWNERS = (  # what a missing header begins with, and which of the three wheels has it
    (("cuda/", "cub/", "thrust/", "nv/"), 2),
    (("crt/",), 1),
    (("cuda", "cooperative_groups", "mma.h", "vector_", "device_", "driver_types", "host_", "sm_", "math_"), 0),
)
_NO_HOST_HEADERS = frozenset({"stdint.h", "stdio.h", "stdlib.h", "math.h", "string.h", "assert.h", "float.h"})


@frozen
class Toolkit:
    """The wheels of one CUDA major version. ``identity`` is the compiler's part of a cache key."""

    major: int
    nvrtc: str
    include_dirs: tuple[Path, ...]
    versions: tuple[tuple[str, str], ...]

    @property
    def compiler(self) -> str:
        """The compiler as reports name it."""
        return f"NVRTC {self.nvrtc}"

    @property
    def identity(self) -> str:
        """Name every version that can change the machine code."""
        return "; ".join((self.compiler, *(f"{name} {version}" for name, version in self.versions)))

    def missing_header(self, header: str) -> tuple[str, str]:
        """Say why a header was not found, and what to do: ``(why, remedy)``."""
        installed = dict(self.versions)
        for prefixes, position in _OWNERS:
            wheel = _HEADERS[self.major][position][0]
            if header.startswith(prefixes) and wheel not in installed:
                return f"it comes with the wheel {wheel}, which is not installed", f"install {EXTRAS[self.major]}"
        if header in _NO_HOST_HEADERS or ("/" not in header and "." not in header):
            name = f"c{header.removesuffix('.h')}" if header.endswith(".h") else header
            return "NVRTC has no host headers", f"include <cuda/std/{name}>, or use built-in types"
        return (
            "it is in none of the kernel's own folders and of the CUDA header wheels",
            "ship the header beside the kernel, or name its folder in include_dirs",
        )


def find_toolkit(path: Sequence[str] | None = None) -> Toolkit:
    """Find the installed compiler and header wheels on ``path`` (None: ``sys.path``); BuildFailure if there is none."""
    installed: dict[str, Distribution] = {}
    wanted = {*_COMPILER.values(), *(name for wheels in _HEADERS.values() for name, _ in wheels)}
    for distribution in distributions() if path is None else distributions(path=list(path)):
        name = normal_name(str(distribution.metadata["Name"]))
        if name in wanted:
            installed.setdefault(name, distribution)
    for major, compiler in _COMPILER.items():
        if compiler in installed:
            return _toolkit(major, installed)
    raise BuildFailure(
        "TOOLCHAIN_MISSING",
        f"no NVRTC wheel is installed: looked for {' and '.join(_COMPILER.values())}",
        remedies=tuple(f"install {extra}" for extra in EXTRAS.values()),
    )


def _toolkit(major: int, installed: dict[str, Distribution]) -> Toolkit:
    folders: list[Path] = []
    versions: list[tuple[str, str]] = []
    for name, marker in _HEADERS[major]:
        folder = _include_dir(installed[name], marker) if name in installed else None
        if folder is not None:
            versions.append((name, installed[name].version))
            folders.extend([folder] if folder not in folders else [])
    return Toolkit(major, installed[_COMPILER[major]].version, tuple(folders), tuple(versions))


def _include_dir(distribution: Distribution, marker: str) -> Path | None:
    """Return the folder that ``#include <marker>`` needs; None if the wheel's files are not there."""
    # RECORD as text: building a path object for each of CCCL's 2400 files takes longer than compiling a kernel.
    record = distribution.read_text("RECORD") or ""
    match = re.search(rf'^"?([^\n,]*include/(?:[^\n,/]+/)?){re.escape(marker)}"?,', record, re.MULTILINE)
    if match is None:
        return None
    folder = Path(str(distribution.locate_file(match[1].rstrip("/"))))
    return folder if (folder / marker).is_file() else None
