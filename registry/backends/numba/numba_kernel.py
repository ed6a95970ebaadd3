"""Numba-CUDA kernels: Python functions compiled to a cubin for a named architecture, without a GPU or a driver.

Nothing outside this package touches Numba. Numba makes PTX, nvJitLink the cubin: PTX of a new toolkit does not load on
an older driver, a cubin does. Numba numbers what it compiles, so that names differ from run to run. Each is replaced,
the kernel's by that of its function, and the same input gives the same bytes.
"""

import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kernel_muster.registry.backends.cuda_kernel import LaunchPlan, entry_problems, path_problems
from kernel_muster.registry.backends.numba import toolchain
from kernel_muster.registry.backends.numba.fresh_modules import fresh_modules
from kernel_muster.registry.backends.numba.linking import link
from kernel_muster.registry.backends.numba.numba_errors import Place, build_failure
from kernel_muster.registry.backends.numba.python_sources import Sources, read_sources
from kernel_muster.registry.backends.request import BuildFailure, BuildRequest, Compiled, EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import ArrayView
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.values import frozen

_NUMBERS = {
    **{
        f"{sign}{8 * size}": f"{name}{8 * size}"
        for sign, name in (("i", "int"), ("u", "uint"))
        for size in (1, 2, 4, 8)
    },
    "f32": "float32",
    "f64": "float64",
}
_PARAMETER = re.compile(rf"({'|'.join(_NUMBERS)})(\*|\[:(?:,:)*\])?")
# An array is a struct for Numba, passed member by member: two references that a kernel does not use, the number of
# elements and their size, the pointer, and shape and strides.
_ARRAY_HEAD = ("ptr", "ptr", "i64", "i64", "ptr")
_CARRIED = "device, fastmath, lineinfo; the launch bound is NumbaEntry(threads=)"
_NOT_CARRIED = ("debug", "link", "extensions", "max_registers")
_NO_DEBUG = "unset NUMBA_CUDA_DEBUGINFO for this process"
_LOCK = threading.Lock()


@frozen
class NumbaEntry:
    """One kernel of a file: its function's name, and the types of its parameters in order.

    ``u16*`` is a pointer, ``u32[:]`` (``[:,:]`` ...) a contiguous array, ``i64`` or ``f32`` a number. Numba has no BF16
    of its own: carry it as ``u16``, or two as ``u32``. ``threads`` is the most that a block is launched with.
    """

    name: str
    parameters: tuple[str, ...]
    threads: int = 0
    dynamic_shared_bytes: int = 0

    def __post_init__(self) -> None:
        if unknown := [text for text in self.parameters if not _PARAMETER.fullmatch(text)]:
            raise ValueError(
                f"{self.name}: parameters {unknown}, expected such as u16*, u32[:] or {', '.join(_NUMBERS)}"
            )

    @cached_property
    def entry_point(self) -> EntryPoint:
        """The entry point with its parameters as they are in the cubin."""
        flat = [kind for text in self.parameters for kind in _flattened(text)]
        return EntryPoint(self.name, tuple(flat), self.dynamic_shared_bytes, self.threads)


class WrongElements(MusterError):
    """An argument whose declared type would read its elements as others than they are."""


def _flattened(text: str) -> tuple[str, ...]:
    if text.endswith("*"):
        return ("ptr",)
    return (*_ARRAY_HEAD, *["i64"] * (2 * text.count(":"))) if text.endswith("]") else (text,)


@frozen
class NumbaKernel:
    """Kernels written with ``numba.cuda`` in one file, which may import modules of its own package.

    The path is absolute; the file is loaded only where something is compiled. ``planner(bound, entries)`` is that of a
    CudaKernel, with one argument for each parameter of the function. ``strided`` names parameters whose rows may have
    gaps.
    """

    source: Path
    entries: tuple[NumbaEntry, ...]
    planner: Callable[[Bound, Mapping[str, EntryResources]], LaunchPlan | tuple[LaunchPlan, ...]]
    strided: frozenset[str] = frozenset()
    name: str = "numba_cuda"

    def problems(self) -> list[str]:
        """Say what is malformed, all at once."""
        return [*path_problems(self.source), *entry_problems(self.entries, NumbaEntry)]

    @property
    def source_sha256(self) -> str:
        """The digest of the file, of the modules of its own that it imports, and of the declared parameters."""
        return _sha256(self.entries, read_sources(self.source))

    def request(self, arch: Arch) -> "NumbaRequest":
        """Return what must be built for an architecture."""
        points = tuple(entry.entry_point for entry in self.entries)
        return NumbaRequest(self.source.name, self.source, arch, points, kernels=self.entries)

    def plan(self, bound: Bound, entries: Mapping[str, EntryResources]) -> tuple[LaunchPlan, ...]:
        """Return the launches for checked arguments, in order, with arrays taken apart.

        None of them may overlap with what is before it: Numba has no instruction that waits for that. WrongElements for
        an argument that the declared type does not read as it is.
        """
        plan = self.planner(bound, entries)
        declared = {entry.name: entry.parameters for entry in self.entries}
        return tuple(
            replace(one, arguments=_arguments(one, declared[one.entry]), may_overlap=False)
            for one in (plan if isinstance(plan, tuple) else (plan,))
        )


def _sha256(entries: tuple[NumbaEntry, ...], sources: Sources) -> str:
    digest = hashlib.sha256(repr(entries).encode())
    for name, text in sources:
        digest.update(name.encode() + b"\0" + hashlib.sha256(text).digest())
    return digest.hexdigest()


def _arguments(plan: LaunchPlan, parameters: Sequence[str]) -> tuple[Any, ...]:
    if len(plan.arguments) != len(parameters):
        raise MusterError(f"{plan.entry}: the plan has {len(plan.arguments)} arguments, expected {len(parameters)}")
    flat: list[Any] = []
    for position, (text, value) in enumerate(zip(parameters, plan.arguments, strict=True)):
        if isinstance(value, ArrayView) and text.endswith("*"):
            _check_elements(f"{plan.entry}: argument {position}", text, value)
        flat.extend(_members(plan.entry, text, value) if text.endswith("]") else (value,))
    return tuple(flat)


def _check_elements(what: str, text: str, view: ArrayView) -> None:
    """Refuse a pointer to floating point whose elements are not those of the tensor.

    An integer pointer may read any bytes, packed or bit by bit; a float pointer of another size reads beside them.
    """
    size = int(text[1:-1]) // 8
    if text[0] == "f" and view.dtype.itemsize != size:
        meant = f"f{8 * view.dtype.itemsize}*" if view.dtype.kind == "f" and view.dtype.itemsize in (4, 8) else ""
        carried = f"u{8 * view.dtype.itemsize}*, to carry its bits"
        expected = f"{meant} (or {carried})" if meant else carried
        raise WrongElements(f"{what} is an array of {view.dtype}, declared as {text}: expected {expected}")


def _members(entry: str, text: str, view: ArrayView) -> tuple[Any, ...]:
    """Return the members of an array's struct; its elements may have another name for the same bytes (f32 as u32)."""
    size = int(text[1 : text.index("[")]) // 8
    if len(view.shape) != text.count(":") or view.dtype.itemsize != size or not view.is_contiguous:
        raise WrongElements(f"{entry}: an array of {view.dtype} {view.shape}, expected a contiguous {text}")
    strides = [size]
    for length in reversed(view.shape[1:]):
        strides.insert(0, strides[0] * length)
    return (0, 0, view.size, size, view, *view.shape, *strides)


@frozen
class NumbaRequest(BuildRequest):
    """A file of Numba kernels to compile for one architecture."""

    kernels: tuple[NumbaEntry, ...] = ()

    def work(self) -> "NumbaWork":
        """Return the compilation; BuildFailure TOOLCHAIN_MISSING without Numba."""
        return NumbaWork(self, read_sources(self.source), toolchain.versions())


@frozen
class NumbaWork:
    """A compilation by Numba and nvJitLink."""

    request: NumbaRequest
    sources: Sources
    versions: dict[str, str]

    @property
    def source_sha256(self) -> str:
        """The digest of the bytes that are compiled."""
        return _sha256(self.request.kernels, self.sources)

    @property
    def compiler(self) -> str:
        """The compiler as reports name it."""
        return f"numba-cuda {self.versions['numba-cuda']}"

    def key_parts(self) -> list[bytes]:
        """Return everything that determines the machine code."""
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        outside = [repr(sorted(self.versions.items())), repr(toolchain.settings())]
        head = [python, *outside, str(self.request.arch), repr(self.request.kernels)]
        return [
            *(text.encode() for text in head),
            *(part for name, text in self.sources for part in (name.encode(), text)),
        ]

    def readable(self, log: str) -> str:
        """Return the log as it is: it names no file of ours."""
        return log

    def compile(self) -> Compiled:
        """Compile every kernel for exactly the architecture asked for; BuildFailure says why there is no cubin.

        One at a time: Numba has a lock of its own around most of it.
        """
        numba = toolchain.load_numba()
        with _LOCK, _target_device(self.request.arch):
            module = self._loaded()
            ptx = [self._ptx(numba, module, kernel) for kernel in self.request.kernels]
        return link(self.request, [kernel.name for kernel in self.request.kernels], ptx)

    def _loaded(self) -> ModuleType:
        """Execute the bytes that were hashed, modules that they import too.

        What this process has imported may be older, and holds code that Numba compiled for another architecture.
        """
        module = ModuleType(f"numba_kernels_{self.request.source.stem}")
        texts = dict(self.sources)
        own = texts.pop("")
        with self._failing_with("cannot be loaded"), fresh_modules(texts):
            exec(compile(own, str(self.request.source), "exec"), vars(module))  # noqa: S102
        return module

    def _ptx(self, numba: Any, module: ModuleType, kernel: NumbaEntry) -> str:
        source = self.request.source
        dispatcher = getattr(module, kernel.name, None)
        options = getattr(dispatcher, "targetoptions", None)
        if dispatcher is None or options is None or options.get("device"):
            why = f"{source}: {kernel.name} is no function under @cuda.jit"
            remedy = "correct the name in the NumbaEntry, or mark the function @cuda.jit, without device=True"
            raise BuildFailure("NO_DEVICE_CODE", why, remedies=(remedy,))
        code = dispatcher.py_func.__code__
        at = f"{code.co_filename}:{code.co_firstlineno}"
        if refused := [name for name in _NOT_CARRIED if options.get(name)]:
            if refused == ["debug"] and numba.config.CUDA_DEBUGINFO_DEFAULT:
                raise toolchain.missing("NUMBA_CUDA_DEBUGINFO is set: no kernel is built for a debugger", _NO_DEBUG)
            why = f"{kernel.name}: @cuda.jit has {', '.join(refused)}, which is not carried; what is: {_CARRIED}"
            raise BuildFailure("COMPILE_FAILED", why, "", (f"take {', '.join(refused)} out of @cuda.jit",), (at,))
        names = code.co_varnames[: code.co_argcount]
        if len(names) != len(kernel.parameters):
            why = f"{len(kernel.parameters)} parameters are declared, the kernel takes {len(names)}"
            why = f"{kernel.name}: {why}: {', '.join(names) or 'none'} (at {at})"
            remedy = f"declare one type for each in the NumbaEntry of {kernel.name}"
            raise BuildFailure("NO_DEVICE_CODE", why, "", (remedy,), (at,))
        arch = self.request.arch
        with self._failing_with(f"{kernel.name}: for {arch}", (code.co_filename, code.co_firstlineno)):
            codes, _ = numba.cuda.compile_all(
                dispatcher.py_func,
                numba.types.void(*(_numba_type(numba.types, text) for text in kernel.parameters)),
                device=False,
                cc=(*arch.capability, *([arch.suffix] if arch.suffix else [])),
                abi="numba",
                output="ptx",
                fastmath=bool(options.get("fastmath")),
                lineinfo=bool(options.get("lineinfo")),
                launch_bounds=kernel.threads or None,
            )
        if len(codes) != 1:
            raise BuildFailure(
                "COMPILE_FAILED", f"{kernel.name}: needs code from outside its file, which is not linked"
            )
        return _renamed(codes[0], kernel.name)

    @contextmanager
    def _failing_with(self, what: str, function: Place | None = None) -> Iterator[None]:
        """Make a BuildFailure of whatever a file, or Numba with it, raises; ``function`` is where the kernel begins."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (a plugin's code runs here: SystemExit too)
            imported = (getattr(sys.modules.get(name), "__file__", None) for name, _ in self.sources if name)
            files = frozenset(filter(None, (str(self.request.source), *imported)))
            what = f"{self.request.source.name}: {what}"
            raise toolchain.fault_of(error, files, what) or build_failure(error, what, files, function) from None


def _numba_type(types: Any, text: str) -> Any:
    match = _PARAMETER.fullmatch(text)
    assert match is not None  # noqa: S101  (NumbaEntry checked it)
    element = getattr(types, _NUMBERS[match[1]])
    if match[2] is None:
        return element
    return types.CPointer(element) if match[2] == "*" else types.Array(element, text.count(":"), "C")


@contextmanager
def _target_device(arch: Arch) -> Iterator[None]:
    """Name the target where Numba, in this thread, asks which device is there: at each ``device=True`` function."""
    dispatcher: Any = import_module("numba.cuda.dispatcher")
    real, thread = dispatcher.get_current_device, threading.get_ident()
    target = SimpleNamespace(compute_capability=(*arch.capability, *([arch.suffix] if arch.suffix else [])))
    dispatcher.get_current_device = lambda: target if threading.get_ident() == thread else real()
    try:
        yield
    finally:
        dispatcher.get_current_device = real


def _renamed(ptx: str, kernel: str) -> str:
    """Give the kernel its function's name, and number what else Numba named, by first appearance."""
    entry = re.search(r"\.entry (\w+)\(", ptx)
    if entry is None:
        raise BuildFailure("NO_DEVICE_CODE", f"{kernel}: Numba's PTX holds no entry point")
    ptx = re.sub(rf"\b{entry[1]}(?=\b|_param_)", kernel, ptx)
    names: dict[str, str] = {}
    return re.sub(r"\b_(?:Z|cudapy_)\w+", lambda match: names.setdefault(match[0], f"{kernel}__{len(names)}"), ptx)
