"""Faults of the Numba toolchain are findings about it, and never ask for a correction of the source."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from kernel_muster.registry.backends import BuildFailure
from kernel_muster.registry.backends.numba import linking, numba_kernel, toolchain
from kernel_muster.registry.backends.numba.numba_kernel import NumbaEntry, NumbaKernel
from kernel_muster.registry.hardware.arch import Arch, parse_arch

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
GOOD = """\
import numpy as np
from numba import cuda


@cuda.jit
def scale(x, factor, n, out):
    i = cuda.grid(1)
    if i < n:
        out[i] = x[i] * factor
"""
SM_90A = parse_arch("sm_90a")
ENTRY = NumbaEntry("scale", ("f32*", "f32", "i32", "f32*"))
SCRIPT = """
import sys
from pathlib import Path
{before}
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.backends import BuildFailure
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.numba.numba_kernel import NumbaEntry, NumbaKernel
backend = NumbaKernel(Path(sys.argv[1]), (NumbaEntry("scale", ("f32*", "f32", "i32", "f32*")),), None)
try:
    Builder().build(backend.request(parse_arch("sm_90a")))
except BuildFailure as failure:
    print(failure.code, failure.why, *failure.remedies, sep="\\n")
"""
NO_REDIRECTOR = "sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != 'NumbaCudaFinder']"
HIDDEN = """
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("{name}"):
            raise ModuleNotFoundError("No module named {name}", name=name)
sys.meta_path.insert(0, Hidden())
"""
NO_LIBRARY = """
import cuda.pathfinder
def fail(name):
    raise cuda.pathfinder.DynamicLibNotFoundError("libnvvm.so.4 was not found")
cuda.pathfinder.load_nvidia_dynamic_lib = fail
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "kernels.py").write_text(GOOD)
    return tmp_path / "kernels.py"


@pytest.fixture
def failure(builder, source):
    def of(arch=SM_90A):
        with pytest.raises(BuildFailure) as caught:
            builder.build(NumbaKernel(source, (ENTRY,), None).request(arch))
        return caught.value

    return of


@needs_numba
@pytest.mark.parametrize(
    ("before", "environment", "why", "remedy"),
    [
        (
            NO_REDIRECTOR,
            {},
            "the redirector of numba-cuda did not run",
            "install numba-cuda into a site-packages folder",
        ),
        ("", {"NUMBA_ENABLE_CUDASIM": "1"}, "NUMBA_ENABLE_CUDASIM is set", "unset NUMBA_ENABLE_CUDASIM"),
        ("", {"NUMBA_CUDA_DEBUGINFO": "1"}, "NUMBA_CUDA_DEBUGINFO is set", "unset NUMBA_CUDA_DEBUGINFO"),
        (HIDDEN.format(name="numba_cuda"), {}, "No module named numba_cuda", "install kernel-muster["),
        (HIDDEN.format(name="cuda.core"), {}, "No module named cuda.core", "install kernel-muster["),
        (
            HIDDEN.format(name="cuda.bindings.nvjitlink"),
            {},
            "No module named cuda.bindings.nvjitlink",
            "install kernel-muster[",
        ),
        (HIDDEN.format(name="llvmlite"), {}, "No module named llvmlite", "install kernel-muster["),
        (NO_LIBRARY, {}, "DynamicLibNotFoundError: libnvvm.so.4 was not found", "install kernel-muster["),
    ],
    ids=["redirector", "simulator", "debug", "numba_cuda", "core", "nvjitlink", "llvmlite", "library"],
)
def test_toolchain_that_cannot_compile_is_missing(source, before, environment, why, remedy):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.format(before=before), str(source)]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    code, said, *remedies = run.stdout.splitlines()
    assert code == "TOOLCHAIN_MISSING"
    assert why in said
    assert remedies[0].startswith(remedy)
    assert "source" not in " ".join(remedies)


def test_missing_package_is_a_missing_toolchain(failure, monkeypatch):
    monkeypatch.setattr(toolchain, "REQUIRED", ("numpy", "no-such-compiler"))
    found = failure()
    assert (found.code, found.remedies) == ("TOOLCHAIN_MISSING", (toolchain.INSTALL,))
    assert "no-such-compiler" in found.why


@needs_numba
@pytest.mark.parametrize(
    ("arch", "why"),
    [
        (Arch((5, 0)), "kernels.py: scale: for sm_50: CCSupportError: GPU compute capability 5.0 is not supported"),
        (Arch((13, 0)), "nvJitLink does not make code for sm_130"),
    ],
    ids=str,
)
def test_architecture_that_the_toolchain_does_not_know_is_a_toolchain_too_old(failure, arch, why):
    found = failure(arch)
    assert (found.code, found.remedies) == ("TOOLCHAIN_TOO_OLD", (toolchain.INSTALL,))
    assert found.why.startswith(why)


class Raises:
    """Numba with a compile_all that raises."""

    def __init__(self, error):
        self.error, self.cuda, self.types = error, self, importlib.import_module("numba").types
        self.config = importlib.import_module("numba").config

    def compile_all(self, *given, **options):
        raise self.error


class NvvmSupportError(ImportError):
    pass


class FunctionNotFoundError(RuntimeError):
    pass


def caused(error, cause):
    error.__cause__ = cause
    return error


@needs_numba
@pytest.mark.parametrize(
    "error",
    [
        NvvmSupportError("libNVVM is not available"),
        FileNotFoundError("libdevice.10.bc not found"),
        RuntimeError("Missing libdevice file."),
        FunctionNotFoundError("nvvmLazyAddModuleToProgram"),
        caused(ValueError("Failed in cuda mode pipeline"), OSError("cannot open shared object file")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_library_that_fails_while_a_kernel_compiles_is_a_missing_toolchain(failure, monkeypatch, error):
    monkeypatch.setattr(toolchain, "load_numba", lambda: Raises(error))
    found = failure()
    assert (found.code, found.remedies) == ("TOOLCHAIN_MISSING", (toolchain.INSTALL,))
    assert type(error).__name__ in found.log


@needs_numba
@pytest.mark.parametrize("text", ["import acme_no_such_module\n", "open('/nowhere/at/all')\n", "1 / 0\n"])
def test_what_the_authors_file_does_is_no_fault_of_the_toolchain(failure, source, text):
    source.write_text(text + GOOD)
    found = failure()
    assert found.code == "COMPILE_FAILED"
    assert found.remedies == (f"correct the source at {source}:1: the log says more",)


@needs_numba
@pytest.mark.parametrize(
    ("version", "target", "why"),
    [
        ("99.0", "sm_90", "Unsupported .version 99.0"),
        ("8.0", "sm_199", "Unsupported .target 'sm_199'"),
        ("7.0", "sm_90", "PTX .version 7.0 does not support .target sm_90"),
        ("9.0", "sm_121", "SM version specified by .target is higher"),
    ],
)
def test_linker_that_does_not_know_what_numba_wrote_is_too_old(version, target, why):
    ptx = f".version {version}\n.target {target}\n.address_size 64\n.visible .entry k() {{ ret; }}\n"
    request = SimpleNamespace(arch="sm_90a", source=SimpleNamespace(name="kernels.py"))
    with pytest.raises(BuildFailure) as caught:
        linking.link(request, ["k"], [ptx])
    assert (caught.value.code, caught.value.remedies) == ("TOOLCHAIN_TOO_OLD", (toolchain.INSTALL,))
    assert why in caught.value.why
    assert why in caught.value.log


@needs_numba
def test_ptx_that_is_wrong_is_the_sources_fault():
    request = SimpleNamespace(arch=SM_90A, source=SimpleNamespace(name="kernels.py"))
    with pytest.raises(BuildFailure) as caught:
        linking.link(request, ["k"], [".version 8.0\n.target sm_90\n.address_size 64\nnonsense\n"])
    assert caught.value.code == "COMPILE_FAILED"


@needs_numba
@pytest.mark.parametrize("error", [RuntimeError("libnvJitLink.so was not found"), OSError("no such library")])
def test_linker_whose_library_does_not_load_is_a_missing_toolchain(failure, monkeypatch, error):
    real = toolchain.load_linker()

    def create(*given):
        raise error

    broken = SimpleNamespace(nvJitLinkError=real.nvJitLinkError, create=create)
    monkeypatch.setattr(toolchain, "load_linker", lambda: broken)
    found = failure()
    assert (found.code, found.remedies) == ("TOOLCHAIN_MISSING", (toolchain.INSTALL,))
    assert str(error) in found.why


def test_failures_of_kernels_keep_their_code():
    assert numba_kernel.toolchain.fault_of(ValueError("any"), frozenset()) is None
