"""NVRTC through ``cuda.bindings``: the one place that touches the compiler.

Builds come here in processes of their own: see compiler_process.py.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kernel_muster.registry.backends.nvrtc.closure import Closure
from kernel_muster.registry.backends.nvrtc.compiler_log import clean, failure, too_old
from kernel_muster.registry.backends.nvrtc.headers import EXTRAS, Toolkit
from kernel_muster.registry.backends.request import BuildFailure, Compiled
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.values import frozen


@frozen
class CompileInput:
    """Everything that determines the machine code, besides the toolkit. ``checks`` stand behind the source."""

    closure: Closure
    arch: Arch
    options: tuple[str, ...]
    checks: bytes = b""

    @property
    def program(self) -> bytes:
        """The text that is compiled."""
        return self.closure.source.text + b"\n" + self.checks


def compile_cubin(work: CompileInput, toolkit: Toolkit) -> Compiled:
    """Compile for exactly the architecture named, suffix kept; BuildFailure says why there is no cubin.

    The same input gives the same bytes. A target of ``compute_90a`` would give no bytes and no error, so that the
    architecture always goes in as ``sm_...`` and an empty result is a failure.
    """
    nvrtc = _load(toolkit)
    known = tuple(f"sm_{number}" for number in _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs()))
    if f"sm_{work.arch.capability[0]}{work.arch.capability[1]}" not in known:
        raise too_old(work.arch, toolkit, known)
    options = [f"-arch={work.arch}", "-Xptxas=-v", *work.options]
    options.extend(f"-I{folder}" for folder in toolkit.include_dirs)
    succeeded, cubin, log = _compile(nvrtc, work, [option.encode() for option in options])
    log = clean(log)
    if not succeeded:
        raise failure(work.closure.readable(log), work.arch, toolkit, str(work.closure.source.path))
    if not cubin:
        raise BuildFailure("NO_DEVICE_CODE", f"{toolkit.compiler} returned an empty cubin for {work.arch}", log)
    return Compiled(cubin, log)


def _load(toolkit: Toolkit) -> Any:
    """Import the bindings and see that they reached the compiler of the wheel."""
    extra = f"install {EXTRAS[toolkit.major]}"
    try:
        nvrtc: Any = import_module("cuda.bindings.nvrtc")
        version = ".".join(str(part) for part in _checked(nvrtc, nvrtc.nvrtcVersion()))
    except Exception as error:
        raise BuildFailure(
            "TOOLCHAIN_MISSING",
            f"cuda.bindings cannot use {toolkit.compiler}: {type(error).__name__}: {error}",
            remedies=(extra,),
        ) from error
    if not f"{toolkit.nvrtc}.".startswith(f"{version}."):
        raise BuildFailure(
            "TOOLCHAIN_MISSING",
            f"cuda.bindings loaded NVRTC {version}, expected {toolkit.nvrtc} from the installed wheel",
            remedies=(extra, "take other CUDA installations out of LD_LIBRARY_PATH"),
        )
    return nvrtc


def _compile(nvrtc: Any, work: CompileInput, options: Sequence[bytes]) -> tuple[bool, bytes, str]:
    texts = [header.text for header in work.closure.headers]
    names = [header.name.encode() for header in work.closure.headers]
    source = work.closure.source
    (program,) = _checked(
        nvrtc, nvrtc.nvrtcCreateProgram(work.program, source.name.encode(), len(texts), texts, names), keep=True
    )
    try:
        succeeded = (
            nvrtc.nvrtcCompileProgram(program, len(options), list(options))[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS
        )
        log = _text(nvrtc, program, "ProgramLog").decode(errors="replace")
        return succeeded, _text(nvrtc, program, "CUBIN") if succeeded else b"", log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(nvrtc: Any, program: Any, what: str) -> bytes:
    size = _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    # The bindings write into this object. Python shares those of 0 and 1 bytes, so it is always longer.
    buffer = bytes(size + 2)
    _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer[:size]


def _checked(nvrtc: Any, answer: tuple[Any, ...], keep: bool = False) -> Any:
    """Return what a call gave: one value as it is, several (or with ``keep``) as a tuple."""
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildFailure("COMPILE_FAILED", f"NVRTC itself failed: {getattr(status, 'name', status)}")
    return values[0] if len(values) == 1 and not keep else tuple(values)
