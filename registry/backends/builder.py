"""One build from request to checked machine code, through the cache."""

from dataclasses import replace
from functools import cached_property

from kernel_muster.registry.backends.cache import BuildCache, cache_key
from kernel_muster.registry.backends.cubin.cubin import BadCubin, Cubin, inspect_cubin
from kernel_muster.registry.backends.cubin.limits import check_limits
from kernel_muster.registry.backends.nvrtc import compiler_log, compiler_process
from kernel_muster.registry.backends.nvrtc.closure import read_closure
from kernel_muster.registry.backends.nvrtc.compiler import CompileInput
from kernel_muster.registry.backends.nvrtc.declared import declaration_checks, undeclared
from kernel_muster.registry.backends.nvrtc.headers import Toolkit, find_toolkit
from kernel_muster.registry.backends.nvrtc.options import normalise_options
from kernel_muster.registry.backends.request import (
    PARAMETER_TYPES,
    BuildFailure,
    BuildRequest,
    Built,
    Compiled,
    EntryPoint,
    EntryResources,
    Work,
)
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.values import frozen

# An empty kernel is the set-up of the stack pointer and EXIT.
_EMPTY_BODY = 2


@frozen
class NvrtcWork:
    """A compilation by NVRTC; in its log, files have the names of their closure."""

    input: CompileInput
    toolkit: Toolkit
    options: tuple[str, ...]  # as the kernel gives them

    @property
    def source_sha256(self) -> str:
        """The digest of the bytes that are compiled."""
        return self.input.closure.sha256(self.options)

    @property
    def compiler(self) -> str:
        """The compiler as reports name it."""
        return self.toolkit.compiler

    def key_parts(self) -> list[bytes]:
        """Return everything that determines the machine code."""
        work = self.input
        files = [part for header in work.closure.headers for part in (header.name.encode(), header.text)]
        options = [option.encode() for option in work.options]
        head = [self.toolkit.identity.encode(), str(work.arch).encode(), str(len(options)).encode(), *options]
        return [*head, work.closure.source.name.encode(), work.program, *files]

    def compile(self) -> Compiled:
        """Compile; BuildFailure, also for entry points that are not what is declared."""
        try:
            return compiler_process.compilers.compile(self.input, self.toolkit)
        except BuildFailure as failed:
            raise undeclared(failed.log, self.input.arch) or failed from None

    def readable(self, log: str) -> str:
        """Return a log with the paths of the files in it."""
        return self.input.closure.readable(log)


@frozen
class Begun:
    """A build up to the compiler: what to compile, its key, and the code if the cache has it."""

    request: BuildRequest
    work: Work
    key: str
    size: int
    compiled: Compiled | None = None

    @property
    def cost(self) -> int:
        """How long compiling takes, beside other builds: every entry point is instantiated from all of the text."""
        return self.size * len(self.request.entries)


class Builder:
    """Builds requests with the installed toolkit; safe to share between threads.

    The checks run on every build, also on code from the cache: what the cache holds is only what the compiler gave.
    """

    def __init__(self, cache: BuildCache | None = None, toolkit: Toolkit | None = None) -> None:
        self._cache = cache
        if toolkit is not None:
            self.toolkit = toolkit

    @cached_property
    def toolkit(self) -> Toolkit:
        """The installed toolkit; BuildFailure TOOLCHAIN_MISSING without one."""
        return find_toolkit()

    def findings(self) -> tuple[Finding, ...]:
        """Return what is to be said of all builds together."""
        return () if self._cache is None else self._cache.findings()

    def waits(self) -> tuple[str, ...]:
        """Return the locks of other processes that builds wait for."""
        return () if self._cache is None else tuple(self._cache.waits)

    def build(self, request: BuildRequest) -> Built:
        """Return the machine code that a request asks for, or raise BuildFailure."""
        return self.finish(self.begin(request))

    def begin(self, request: BuildRequest) -> Begun:
        """Do what takes no compiler: read the sources, look into the cache; BuildFailure where they cannot be read."""
        work = self._work(request)
        parts = work.key_parts()
        key = cache_key(parts)
        compiled = None if self._cache is None else self._cache.get(key)
        return Begun(request, work, key, sum(map(len, parts)), compiled)

    def finish(self, begun: Begun) -> Built:
        """Compile what the cache does not have, and check the machine code; BuildFailure says what is wrong."""
        request, work = begun.request, begun.work
        compiled, from_cache = self._compiled(begun)
        log = work.readable(compiled.log)
        try:
            cubin = inspect_cubin(compiled.cubin)
        except BadCubin as error:
            raise BuildFailure("NO_DEVICE_CODE", f"{request.source}: {error}", log) from None
        if not cubin.serves(request.arch):
            found = Arch(cubin.capability, cubin.suffix or "")
            raise BuildFailure("NO_DEVICE_CODE", f"compiled for {found}, expected {request.arch}", log)
        spills = compiler_log.spills(log)
        entries = {}
        for entry in request.entries:
            needs = _checked(entry, cubin, request.arch, log)
            stores, loads = spills.get(entry.name, (None, None))
            entries[entry.name] = replace(needs, spill_store_bytes=stores, spill_load_bytes=loads)
        return Built(compiled.cubin, request.arch, entries, log, work.compiler, work.source_sha256, from_cache)

    def key(self, request: BuildRequest) -> str:
        """Return the digest of everything that determines the machine code of a request."""
        return cache_key(self._work(request).key_parts())

    def _work(self, request: BuildRequest) -> Work:
        return request.work() or NvrtcWork(_compile_input(request), self.toolkit, request.options)

    def _compiled(self, begun: Begun) -> tuple[Compiled, bool]:
        if begun.compiled is not None:
            return begun.compiled, True
        if self._cache is None:
            return begun.work.compile(), False
        return self._cache.get_or_build(begun.key, begun.work.compile)


def _compile_input(request: BuildRequest) -> CompileInput:
    try:
        options = normalise_options(request.options)
    except ValueError as error:
        remedy = "take the option out of the CudaKernel, or write it as one of those"
        raise BuildFailure("COMPILE_FAILED", f"{request.source}: {error}", remedies=(remedy,)) from None
    closure = read_closure(request.source, request.include_dirs)
    return CompileInput(closure, request.arch, options, declaration_checks(request.entries))


# Parameters begin at 0x160, 0x210 or 0x380 of the constant bank, by architecture, and are aligned there: a tensor map,
# which is aligned to 64, need not stand at a multiple of 64 from the first parameter.
_BASES = (0, 16, 32, 48)


def _offsets(entry: EntryPoint, base: int) -> tuple[tuple[int, int], ...]:
    """Return ``(offset, size)`` of the declared parameters if the first may begin at ``base`` modulo 64."""
    offsets, at = [], base
    for name in entry.parameters:
        size = PARAMETER_TYPES[name].size
        align = min(size, 64)  # CUtensorMap is aligned to 64, every other type to its size
        at = -(-at // align) * align
        offsets.append((at - base, size))
        at += size
    return tuple(offsets)


def _checked(entry: EntryPoint, cubin: Cubin, arch: Arch, log: str) -> EntryResources:
    """Return what an entry point needs, after checking that it is really there and fits."""
    needs = cubin.entries.get(entry.name)
    if needs is None:
        there = ", ".join(sorted(cubin.entries)) or "none"
        why = f"{entry.name} is not in the cubin for {arch}; entry points: {there}"
        mangled = f"_Z{len(entry.name)}{entry.name}"
        is_mangled = any(name.startswith(mangled) for name in cubin.entries)
        remedy = f'declare {entry.name} extern "C"' if is_mangled else "correct the name of the entry point in the spec"
        raise BuildFailure("NO_DEVICE_CODE", why, log, (remedy,))
    if needs.parameters not in [_offsets(entry, base) for base in _BASES]:
        raise BuildFailure(
            "NO_DEVICE_CODE",
            f"{entry.name}: the cubin has parameters (offset, size) {needs.parameters}, "
            f"expected {_offsets(entry, 0)} of ({', '.join(entry.parameters)})",
            log,
            ("declare the parameters in the spec as the kernel has them",),
        )
    if entry.parameters and needs.instructions <= _EMPTY_BODY:
        raise BuildFailure(
            "NO_DEVICE_CODE",
            f"{entry.name} has an empty body for {arch}: its code is compiled out",
            log,
            ("look for an #if on __CUDA_ARCH__ that leaves this architecture out",),
        )
    check_limits(entry, needs, arch)
    return needs
