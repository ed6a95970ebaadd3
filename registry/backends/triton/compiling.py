"""One compilation by Triton, and its assembler: from the bytes that were hashed to a cubin for one architecture.

Triton compiles for a target that is named, so it asks for no device. Its own cache is not used. Its assembler, which is
in its wheel, runs once more with ``-v``: the log holds the spills that Triton does not report.
"""

import linecache
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from kernel_muster.registry.backends.numba.fresh_modules import fresh_modules
from kernel_muster.registry.backends.numba.python_sources import Sources, module_file, read_sources
from kernel_muster.registry.backends.nvrtc import compiler_log
from kernel_muster.registry.backends.request import BuildFailure, BuildRequest, Compiled
from kernel_muster.registry.backends.triton.variant import Variant
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.values import frozen

INSTALL = "install kernel-muster[triton]"
_OLDEST = (3, 6)
_ASSEMBLE_S = 600
# Triton has one compiler for a process, and settings of a process.
_LOCK = threading.Lock()


@frozen
class TritonRequest(BuildRequest):
    """A Triton kernel to compile for one architecture."""

    variant: Variant = Variant("", (), (), 4, 3, 0)

    def work(self) -> "TritonWork":
        """Return the compilation; BuildFailure where Triton is missing or too old."""
        try:
            found = version("triton")
        except PackageNotFoundError:
            raise BuildFailure("TOOLCHAIN_MISSING", "triton is not installed", remedies=(INSTALL,)) from None
        if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < _OLDEST:
            why = f"triton is {found}, expected {'.'.join(map(str, _OLDEST))} or newer"
            raise BuildFailure("TOOLCHAIN_TOO_OLD", why, remedies=(INSTALL,))
        return TritonWork(self, read_sources(self.source), found)


@frozen
class TritonWork:
    """A compilation by Triton."""

    request: TritonRequest
    sources: Sources
    version: str

    @property
    def source_sha256(self) -> str:
        """The digest of the bytes that are compiled."""
        return self.request.variant.sha256(self.sources)

    @property
    def compiler(self) -> str:
        """The compiler as reports name it."""
        return f"Triton {self.version}"

    def key_parts(self) -> list[bytes]:
        """Return everything that determines the machine code."""
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        settings = repr(sorted(_loaded_triton()._C.libtriton.get_cache_invalidating_env_vars().items()))  # noqa: SLF001
        head = [python, self.compiler, settings, str(self.request.arch), repr(self.request.variant)]
        texts = [part for name, text in self.sources for part in (name.encode(), text)]
        return [*(text.encode() for text in head), *texts]

    def readable(self, log: str) -> str:
        """Return the log as it is: it names no file of ours."""
        return log

    def compile(self) -> Compiled:
        """Compile for exactly the architecture asked for; BuildFailure says why there is no cubin."""
        triton = _loaded_triton()
        with _LOCK, _settings(triton), self._failing():
            ptx = self._ptx(triton)
        return _assembled(self.request, ptx)

    def _ptx(self, triton: Any) -> str:
        kernel, arch = self.request.variant, self.request.arch
        constants = dict(kernel.constants)
        with _lines_of(self.request.source, self.sources), fresh_modules(dict(self.sources[1:])):
            function = self._function(triton)
            names = [name for name in function.arg_names if name not in constants]
            self._check_names(function, names)
            types = dict(zip(names, (one.removesuffix(":16") for one in kernel.parameters), strict=True))
            places = {name: at for at, name in enumerate(function.arg_names)}
            aligned = [name for name, one in zip(names, kernel.parameters, strict=True) if one[0] == "*" or ":" in one]
            source = triton.compiler.ASTSource(
                function,
                {name: types.get(name, "constexpr") for name in function.arg_names},
                constexprs=constants,
                attrs={(places[name],): [["tt.divisibility", 16]] for name in aligned},
            )
            target = triton.backends.compiler.GPUTarget("cuda", 10 * arch.capability[0] + arch.capability[1], 32)
            options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
            made = triton.compile(source, target=target, options=options)
        self._check_needs(made.metadata)
        return str(made.asm["ptx"])

    def _function(self, triton: Any) -> Any:
        module = ModuleType(f"triton_kernels_{self.request.source.stem}")
        module.__file__ = str(self.request.source)
        own = dict(self.sources)[""]
        exec(compile(own, str(self.request.source), "exec"), vars(module))  # noqa: S102  (the bytes that were hashed)
        function = getattr(module, self.request.variant.function, None)
        if type(function).__name__ == "InterpretedFunction":
            why = "TRITON_INTERPRET is set, and the interpreter compiles nothing"
            raise BuildFailure("TOOLCHAIN_MISSING", why, remedies=("unset TRITON_INTERPRET for this process",))
        if not isinstance(function, triton.JITFunction):
            why = f"{self.request.source}: {self.request.variant.function} is no function under @triton.jit"
            remedy = "correct the name in the TritonKernel, or mark the function @triton.jit, without @triton.autotune"
            raise BuildFailure("NO_DEVICE_CODE", why, remedies=(remedy,))
        return function

    def _check_names(self, function: Any, names: list[str]) -> None:
        kernel, marked = self.request.variant, [function.arg_names[at] for at in function.constexprs]
        given = dict(kernel.constants)
        wrong = [f"{one} is tl.constexpr: give its value in constants" for one in marked if one not in given]
        wrong += [f"constants has {one}, which is no parameter" for one in given if one not in function.arg_names]
        if not wrong and len(names) != len(kernel.parameters):
            wrong = [f"{len(kernel.parameters)} parameters are declared, the kernel takes {', '.join(names) or 'none'}"]
        if wrong:
            where = f"{self.request.source}:{function.starting_line_number}"
            why = f"{kernel.function}: {'; '.join(wrong)} (at {where})"
            raise BuildFailure("NO_DEVICE_CODE", why, remedies=("declare them in the TritonKernel",), where=(where,))

    def _check_needs(self, metadata: Any) -> None:
        """Refuse code that needs what a launch does not give, or does not give in this amount."""
        kernel = self.request.variant
        if metadata.shared > kernel.shared_bytes:
            why = (
                f"{kernel.function}: needs {metadata.shared} bytes of shared memory, {kernel.shared_bytes} are declared"
            )
            remedy = f"declare TritonKernel(shared_bytes={metadata.shared})"
            raise BuildFailure("NO_DEVICE_CODE", f"{why} for {self.request.arch}", remedies=(remedy,))
        if (
            metadata.global_scratch_size
            or metadata.profile_scratch_size
            or metadata.num_ctas != 1
            or metadata.tensordesc_meta
        ):
            why = f"{kernel.function}: needs scratch memory, a cluster or tensor descriptors of the host"
            remedy = "write it without them, or ship it as a CudaKernel"
            raise BuildFailure("COMPILE_FAILED", why, remedies=(remedy,))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Make a BuildFailure of whatever a file, or Triton with it, raises."""
        try:
            yield
        except (KeyboardInterrupt, BuildFailure):
            raise
        except BaseException as error:  # noqa: BLE001  (a plugin's code runs here: SystemExit too)
            raise self._failure(error) from None

    def _failure(self, error: BaseException) -> BuildFailure:
        line = getattr(getattr(error, "node", None), "lineno", None)
        source = dict(self.sources)[""].decode(errors="replace").splitlines()
        begins = next((at for at, text in enumerate(source) if f"def {self.request.variant.function}(" in text), None)
        where = f"{self.request.source}:{begins + line}" if line and begins is not None else str(self.request.source)
        said = str(getattr(error, "error_message", None) or error).strip().splitlines()
        what = f"{self.request.source.name}: {self.request.variant.function}: for {self.request.arch}"
        why = f"{what}: {type(error).__name__}: {said[0] if said else 'no reason given'} (at {where})"
        return BuildFailure(
            "COMPILE_FAILED", why, str(error), (f"correct the source at {where}: the log says more",), (where,)
        )


def _loaded_triton() -> Any:
    """Import Triton; BuildFailure TOOLCHAIN_MISSING where it does not load."""
    try:
        triton = import_module("triton")
        for name in ("triton.compiler", "triton.backends.compiler", "triton.backends.nvidia.compiler"):
            import_module(name)
    except Exception as error:
        why = f"Triton cannot be used: {type(error).__name__}: {error}"
        raise BuildFailure("TOOLCHAIN_MISSING", why, remedies=(INSTALL,)) from error
    return triton


@contextmanager
def _settings(triton: Any) -> Iterator[None]:
    """Compile anew, into a temporary folder, and without lines: paths would make other code on other machines."""
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.compilation.disable_line_info = True
        yield


@contextmanager
def _lines_of(source: Path, sources: Sources) -> Iterator[None]:
    """Let Triton, which reads the text of functions, find the bytes that were hashed."""
    files = {str(module_file(name) if name else source): text.decode() for name, text in sources}
    before = {file: linecache.cache.get(file) for file in files}
    for file, text in files.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        yield
    finally:
        for file, known in before.items():
            linecache.cache.pop(file, None)
            if known is not None:
                linecache.cache[file] = known


def _assembled(request: TritonRequest, ptx: str) -> Compiled:
    """Assemble with Triton's own assembler; BuildFailure says why there is no cubin."""
    compiler = import_module("triton.backends.nvidia.compiler")
    arch: Arch = request.arch
    number = 10 * arch.capability[0] + arch.capability[1]
    made_for = compiler.sm_arch_from_capability(number)
    if made_for != str(arch):
        why = f"Triton makes code for {made_for}, the target is {arch}"
        raise BuildFailure("NO_DEVICE_CODE", why, remedies=(message("remedy.audit_for", target=made_for),))
    with tempfile.TemporaryDirectory() as folder:
        text, code = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        text.write_text(ptx, encoding="utf-8")
        command = [compiler.get_ptxas(number).path, "-v", f"--gpu-name={made_for}", str(text), "-o", str(code)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ASSEMBLE_S, check=False)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildFailure("TOOLCHAIN_MISSING", f"ptxas of Triton: {error}", remedies=(INSTALL,)) from None
        said = (done.stdout + done.stderr).replace(folder, ".").replace("ptxas-blackwell", "ptxas")
        log = compiler_log.clean(said)
        if done.returncode or not code.is_file():
            first = next(iter(log.splitlines()), f"exit code {done.returncode}")
            failed = BuildFailure("COMPILE_FAILED", f"{request.source.name}: for {arch}: {first}", log)
            raise compiler_log.over_limit(log, arch) or failed
        return Compiled(code.read_bytes(), log)
