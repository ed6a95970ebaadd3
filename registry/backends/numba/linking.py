"""nvJitLink: from the PTX that Numba wrote to a cubin for one architecture."""

from collections.abc import Sequence
from typing import Any

from kernel_muster.registry.backends.numba import toolchain
from kernel_muster.registry.backends.nvrtc import compiler_log
from kernel_muster.registry.backends.request import BuildFailure, BuildRequest, Compiled


def link(request: BuildRequest, names: Sequence[str], ptx: Sequence[str]) -> Compiled:
    """Link the PTX of a request's kernels; BuildFailure says why there is no cubin."""
    linker = toolchain.load_linker()
    handle = _created(linker, request)
    try:
        for name, text in zip(names, ptx, strict=True):
            data = text.encode()
            linker.add_data(handle, linker.InputType.PTX, data, len(data), name)
        linker.complete(handle)
        return Compiled(_bytes(linker, handle, "linked_cubin"), _text(linker, handle, "info_log"))
    except linker.nvJitLinkError as error:
        log = _text(linker, handle, "error_log")
        first = log.splitlines()[0] if log else str(error)
        what = f"{request.source.name}: for {request.arch}"
        failed = BuildFailure(
            "COMPILE_FAILED", f"{what}: {first}", log, ("correct the source: the log is the assembler's own",)
        )
        raise compiler_log.over_limit(log, request.arch) or toolchain.link_fault(what, log) or failed from None
    finally:
        linker.destroy(handle)


def _created(linker: Any, request: BuildRequest) -> Any:
    options = [f"-arch={request.arch}", "-verbose", "-Xptxas=-v"]
    try:
        return linker.create(len(options), options)
    except linker.nvJitLinkError as error:
        raise toolchain.too_old(f"nvJitLink does not make code for {request.arch}: {error}") from None
    except Exception as error:
        raise toolchain.missing(f"nvJitLink cannot be used: {type(error).__name__}: {error}") from error


def _bytes(linker: Any, handle: int, what: str) -> bytes:
    buffer = bytearray(getattr(linker, f"get_{what}_size")(handle))
    if buffer:
        getattr(linker, f"get_{what}")(handle, buffer)
    return bytes(buffer)


def _text(linker: Any, handle: int, what: str) -> str:
    return compiler_log.clean(_bytes(linker, handle, what).decode(errors="replace"))
