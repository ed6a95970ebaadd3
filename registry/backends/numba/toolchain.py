"""The toolchain of Numba kernels: its packages, the settings that change its code, and its own faults.

A fault of the toolchain says nothing of a kernel: a package that does not load, the simulator in the compiler's place,
an architecture that the installed version does not know.
"""

import os
import re
import traceback
from collections.abc import Collection, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kernel_muster.registry.backends.nvrtc.headers import EXTRAS
from kernel_muster.registry.backends.request import BuildFailure

REQUIRED = ("numba", "numba-cuda", "llvmlite", "numpy")
# What a kernel may import besides, without its source being hashed.
_IMPORTED = ("kernel-muster", "ml-dtypes", "cuda-core", "cuda-bindings")
# What turns Numba's IR into PTX, and PTX into a cubin, as the wheels of CUDA 13 and 12 are called.
_COMPILERS = (("nvidia-nvvm", "nvidia-nvjitlink"), ("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"))
INSTALL = f"install {' or '.join(EXTRAS.values())}"
_INTO_SITE_PACKAGES = (
    "install numba-cuda into a site-packages folder of this Python: from PYTHONPATH its .pth file is not run"
)
# Names of the exceptions of Numba, cuda.bindings and cuda.pathfinder for a library that is missing or does not load.
_NOT_LOADED = frozenset({
    "CudaDriverError", "CudaRuntimeError", "DynamicLibNotFoundError", "DynamicLibUnknownError", "FunctionNotFoundError",
    "NotSupportedError",
})  # fmt: skip
# NVVM and nvJitLink of two versions, of which the second does not know what the first wrote.
_UNKNOWN_TO_LINKER = re.compile(r"Unsupported \.(?:version|target)|does not support \.target|\.target is higher")


def versions() -> dict[str, str]:
    """Return the version of every package that can change the machine code. Nothing is imported for it."""
    found = {}
    for name in (*REQUIRED, *_IMPORTED, *(name for pair in _COMPILERS for name in pair)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    lacking = [name for name in REQUIRED if name not in found]
    if not any(set(pair) <= found.keys() for pair in _COMPILERS):
        lacking += _COMPILERS[0]
    if lacking:
        raise missing(f"Numba kernels need {', '.join(lacking)}")
    return found


def settings() -> list[tuple[str, str]]:
    """Return what sets Numba's options from outside, which may change the machine code: NUMBA_OPT does."""
    found = [(name, value) for name, value in sorted(os.environ.items()) if name.startswith("NUMBA_")]
    try:
        return [*found, ("", Path(".numba_config.yaml").read_text(errors="replace"))]
    except OSError:
        return found


def load_numba() -> Any:
    """Import numba.cuda; BuildFailure TOOLCHAIN_MISSING where it is not the compiler of numba-cuda."""
    try:
        numba = import_module("numba")
        cuda = import_module("numba.cuda")
    except Exception as error:
        raise missing(f"numba.cuda cannot be used: {type(error).__name__}: {error}") from error
    if numba.config.ENABLE_CUDASIM:
        why = "numba.cuda cannot be used: NUMBA_ENABLE_CUDASIM is set, and the simulator compiles nothing"
        raise missing(why, "unset NUMBA_ENABLE_CUDASIM for this process: Numba reads it once")
    if "numba_cuda" not in Path(str(cuda.__file__)).parts:
        why = f"numba.cuda is Numba's own ({cuda.__file__}): the redirector of numba-cuda did not run"
        raise missing(why, _INTO_SITE_PACKAGES)
    try:
        if not hasattr(import_module("numba.cuda.dispatcher"), "get_current_device"):
            raise ImportError("this version of numba-cuda asks for a device in another way")
    except Exception as error:
        raise missing(f"numba.cuda cannot be used: {type(error).__name__}: {error}") from error
    return numba


def load_linker() -> Any:
    """Import nvJitLink's bindings."""
    try:
        return import_module("cuda.bindings.nvjitlink")
    except Exception as error:
        raise missing(f"nvJitLink cannot be used: {type(error).__name__}: {error}") from error


def fault_of(error: BaseException, files: Collection[str], what: str = "") -> BuildFailure | None:
    """Return the toolchain's own fault in what ended a compilation; None where the author's files are to blame."""
    log = "".join(traceback.format_exception(error))
    for cause in _causes(error):
        said = f"{type(cause).__name__}: {cause}"
        if type(cause).__name__ == "CCSupportError":
            return too_old(f"{what}: {said}" if what else said, log)
        places = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(cause.__traceback__)}
        if not places.isdisjoint(files):  # the file itself imports something, or asks for a device
            return None
        if isinstance(cause, ImportError | OSError) or type(cause).__name__ in _NOT_LOADED or "libdevice" in said:
            return missing(f"numba.cuda cannot be used: {said}", log=log)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def link_fault(what: str, log: str) -> BuildFailure | None:
    """Return the fault of a linker that does not know what Numba wrote; None where its log says nothing of that."""
    line = next((line for line in log.splitlines() if _UNKNOWN_TO_LINKER.search(line)), "")
    return too_old(f"{what}: nvJitLink does not read what NVVM wrote: {line}", log) if line else None


def too_old(why: str, log: str = "") -> BuildFailure:
    """Return the failure of a toolchain that does not know the architecture, or its own parts each other."""
    return BuildFailure("TOOLCHAIN_TOO_OLD", why, log, (INSTALL,))


def missing(why: str, *remedies: str, log: str = "") -> BuildFailure:
    """Return the failure of a toolchain that is not there."""
    return BuildFailure("TOOLCHAIN_MISSING", why, log, remedies or (INSTALL,))
