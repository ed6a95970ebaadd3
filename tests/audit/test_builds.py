"""Builds in a boot: sources that are really broken, compiled by the real compiler for an architecture without a GPU."""

import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import kernel_muster as km
import pytest
from kernel_muster.registry.backends import BuildRequest, EntryPoint
from kernel_muster.registry.backends.cuda_kernel import CudaKernel
from kernel_muster.registry.backends.nvrtc.compiler import compile_cubin
from kernel_muster.registry.backends.nvrtc.compiler_process import Compilers, compilers

PARAMETERS = ("ptr", "i32", "ptr")
GOOD = """\
extern "C" __global__ void __launch_bounds__(128) double_rows(const float* x, int n, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * 2;
}
"""
COMPILED_OUT = GOOD.replace("  if (i", "#if __CUDA_ARCH__ >= 1000\n  if (i").replace("* 2;\n", "* 2;\n#endif\n")
TILE = "  __shared__ float tile[60000];\n  tile[threadIdx.x] = n;\n  __syncthreads();\n  if"
TOO_MUCH_SHARED = GOOD.replace("  if", TILE).replace("* 2", "* tile[127 - threadIdx.x]")
_SERIAL = count()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache") / "cubins")


@pytest.fixture
def make_kernel(tmp_path):
    """Write a source and return the backend that compiles it."""

    def make(text=GOOD, entry="double_rows", parameters=PARAMETERS, **more):
        source = tmp_path / f"kernel{next(_SERIAL)}.cu"
        source.write_text(text)
        return CudaKernel(source, (EntryPoint(entry, parameters, **more),), lambda bound, entries: None)

    return make


@pytest.fixture
def compile_for(world, cache):
    """Boot for an architecture with one kernel a key, and ask for all of them."""

    def compile_for(kernels, target="sm_90a", stage="compiled", build=None, **options):
        specs = [world.spec(key, archs=("sm_80+",), backend=backend) for key, backend in kernels.items()]
        plugin = world.plugin("acme_plugin", kernels=specs)
        levers = {"MUSTER_CACHE_DIR": cache, **options.pop("levers", {})}
        return world.run(
            build or world.ask(*kernels), {"acme": plugin}, target=target, stage=stage, levers=levers, **options
        )

    return compile_for


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a", "sm_121a"])
def test_good_source_compiles_for_a_target_without_a_device(compile_for, make_kernel, target):
    outcome = compile_for({"acme::a": make_kernel()}, target)
    assert (outcome.codes, outcome.report.stage_reached) == ([], "compiled")
    assert [(row.backend, row.stage) for row in outcome.report.kernels] == [("cuda_cpp", "compiled")]


@pytest.mark.parametrize("stage", ["registered", "compiled", None])
def test_source_that_is_not_there_is_one_finding_at_every_stage(compile_for, make_kernel, stage):
    backend = make_kernel()
    backend.source.unlink()
    outcome = compile_for({"acme::a": backend, "acme::b": backend}, stage=stage)
    assert outcome.codes == ["COMPILE_FAILED"]
    found = outcome.finding("COMPILE_FAILED")
    assert "cannot be read: No such file" in found.why
    assert (found.subject, found.explains) == ("acme::a", ("acme::b has no code",))
    assert any("package data" in remedy for remedy in found.remedies)
    assert outcome.session.trace()["kernels"][0]["source_sha256"] == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": Path("kernel.cu")}, "source is 'kernel.cu', expected an absolute path, such as Path(__file__)"),
        ({"include_dirs": (Path(".."),)}, "include_dirs is '..', expected an absolute path"),
        ({"source": "/kernel.cu"}, "source is '/kernel.cu', expected a Path, such as Path('/kernel.cu')"),
        ({"source": "clip.cu"}, "source is 'clip.cu', expected a Path, such as Path(__file__).parent / 'clip.cu'"),
        ({"source": 7}, "source is 7, expected a Path"),
    ],
)
def test_kernel_whose_files_depend_on_the_working_directory_is_a_bad_spec(compile_for, make_kernel, change, said):
    outcome = compile_for({"acme::a": replace(make_kernel(), **change)})
    assert outcome.codes == ["BAD_SPEC"]
    assert said in outcome.finding("BAD_SPEC").why


def test_kernel_whose_source_is_text_is_a_bad_spec_that_does_not_repeat_it(compile_for, make_kernel):
    text = 'extern "C" __global__\nvoid k(float* x) {}\n' * 99
    outcome = compile_for({"acme::a": replace(make_kernel(), source=text)})
    why = outcome.finding("BAD_SPEC").why
    assert f"source is {len(text)} characters of text, 'extern " in why
    assert "Path(__file__).parent / 'kernel.cu'" in why
    assert len(why) < 400


@pytest.mark.parametrize("stage", ["compiled", None])
def test_host_kernel_for_a_device_has_no_device_code(world, stage):
    plugin = world.acme("acme::mul", archs=("sm_80+",))
    outcome = world.run(world.ask("acme::mul"), {"acme": plugin}, target="sm_90a", stage=stage)
    assert outcome.codes == ["NO_DEVICE_CODE"]
    assert outcome.finding("NO_DEVICE_CODE").why == "backend python runs on the host: it has no code for sm_90a"


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (
            lambda make: SimpleNamespace(name="own", source_sha256="0", plan=None, request=lambda arch: 5),
            "returned int",
        ),
        (
            lambda make: SimpleNamespace(
                name="own", source_sha256="0", plan=None, request=lambda arch: replace(make().request(arch), entries=())
            ),
            "no entry point is named",
        ),
    ],
    ids=["no request", "no entry point"],
)
def test_backend_that_asks_for_no_build_is_a_finding_and_no_exception(compile_for, make_kernel, backend, why):
    outcome = compile_for({"acme::a": backend(make_kernel)})
    assert outcome.codes == ["COMPILE_FAILED"]
    assert why in outcome.finding("COMPILE_FAILED").why


def test_backend_whose_digest_raises_is_a_finding(world):
    class Backend:
        name = "own"

        @property
        def source_sha256(self):
            raise ZeroDivisionError("no digest")

        def launch(self, arguments, dims, stream):
            """Do nothing."""

    outcome = world.run(world.ask("acme::mul"), {"acme": world.acme("acme::mul", backend=Backend())})
    assert outcome.codes == ["COMPILE_FAILED"]
    assert outcome.finding("COMPILE_FAILED").why == "ZeroDivisionError: no digest"


BROKEN = {
    "COMPILE_FAILED": (GOOD.replace("x[i]", "y[i]"), {}, r'identifier "y" is undefined', r"error: identifier"),
    "HEADERS_MISSING": (
        '#include "lucky.cuh"\n' + GOOD,
        {},
        r"lucky\.cuh was not found",
        r"cannot open source|could not open source",
    ),
    "NO_DEVICE_CODE": (COMPILED_OUT, {}, r"double_rows has an empty body for sm_90a", ""),
    "OVER_LIMIT": (TOO_MUCH_SHARED, {}, r"too much shared data \(240000 bytes, 232448 max", ""),
}


@pytest.mark.parametrize(
    ("code", "text", "more", "said", "logged"),
    [
        *((code, *row) for code, row in BROKEN.items()),
        ("HEADERS_MISSING", "#include <vector>\n" + GOOD, {}, "NVRTC has no host headers", "catastrophic error"),
        ("NO_DEVICE_CODE", GOOD, {"entry": "triple"}, "triple: no kernel of this name is compiled", "triple"),
        ("NO_DEVICE_CODE", GOOD, {"parameters": ("ptr", "i64", "ptr")}, "declared as i64, the kernel takes i32", ""),
        ("OVER_LIMIT", GOOD, {"dynamic_shared_bytes": 250_000}, "250000 bytes of shared memory", ""),
        ("OVER_LIMIT", GOOD, {"threads": 256}, "its __launch_bounds__ allow 128", ""),
    ],
)  # fmt: skip
def test_broken_source_trips_exactly_its_code(compile_for, make_kernel, code, text, more, said, logged):
    outcome = compile_for({"acme::a": make_kernel(text, **more)})
    assert outcome.codes == [code]
    finding = outcome.finding(code)
    assert (finding.subject, finding.severity, isinstance(outcome.error, km.BootRefused)) == ("acme::a", "refuse", True)
    assert re.search(said, finding.why), finding.why
    assert re.search(logged, finding.log), finding.log
    assert outcome.report.kernels[0].stage == "registered"


def test_log_of_a_failed_compilation_names_the_file_and_line(compile_for, make_kernel):
    kernel = make_kernel(BROKEN["COMPILE_FAILED"][0])
    assert f"{kernel.source}(3): error:" in compile_for({"acme::a": kernel}).finding("COMPILE_FAILED").log


@pytest.mark.parametrize("raised", [ZeroDivisionError("no digits"), SystemExit("no licence")], ids=repr)
@pytest.mark.parametrize("place", ["request", "work"])
def test_build_that_raises_what_nobody_foresaw_is_one_finding_and_hides_no_other(
    compile_for, make_kernel, place, raised
):
    kernel = make_kernel()

    class Request(BuildRequest):
        def work(self):
            raise raised

    def request(arch):
        if place == "request":
            raise raised
        return Request("own", kernel.source, arch, kernel.entries)

    own = SimpleNamespace(name="own", source_sha256="0", plan=None, request=request)
    outcome = compile_for({"acme::a": own, "acme::b": make_kernel("void broken("), "acme::c": make_kernel()})
    assert outcome.codes == ["COMPILE_FAILED", "COMPILE_FAILED"]
    found, other = sorted(outcome.report.findings, key=lambda finding: finding.subject)
    began = "backend own asks for no build: " if place == "request" else "its build raised "
    assert found.why == f"{began}{type(raised).__name__}: {raised}"
    assert found.log.startswith(f"{type(raised).__name__}: {raised}")
    assert other.subject == "acme::b"


def test_body_compiled_out_for_one_architecture_compiles_for_another(compile_for, make_kernel):
    kernel = make_kernel(COMPILED_OUT)
    assert compile_for({"acme::a": kernel}, "sm_100a").codes == []
    assert compile_for({"acme::a": kernel}, "sm_80").codes == ["NO_DEVICE_CODE"]


def test_one_failing_source_behind_many_keys_is_one_finding(compile_for, make_kernel):
    broken = make_kernel(BROKEN["COMPILE_FAILED"][0])
    keys = [f"acme::a{n}" for n in range(9)]
    outcome = compile_for({**dict.fromkeys(keys, broken), "acme::good": make_kernel()})
    assert outcome.codes == ["COMPILE_FAILED"]
    finding = outcome.finding("COMPILE_FAILED")
    assert finding.subject == keys[0]
    assert finding.explains == tuple(f"{key} has no code" for key in keys[1:])
    assert not any("JSON" in remedy for remedy in finding.remedies)
    assert {row.key: row.stage for row in outcome.report.kernels}["acme::good"] == "compiled"


def test_two_failing_sources_are_two_findings(compile_for, make_kernel):
    sources = {"acme::a": make_kernel(BROKEN["COMPILE_FAILED"][0]), "acme::b": make_kernel(BROKEN["OVER_LIMIT"][0])}
    assert compile_for(sources).codes == ["COMPILE_FAILED", "OVER_LIMIT"]


def test_failed_build_does_not_advance_a_chain(compile_for, make_kernel):
    def build(boot):
        handle = boot.kernels.first_of(("acme", "a"), ("acme", "b"))
        assert str(handle.key) == "acme::a"

    sources = {"acme::a": make_kernel(BROKEN["COMPILE_FAILED"][0]), "acme::b": make_kernel()}
    outcome = compile_for(sources, build=build)
    assert outcome.codes == ["COMPILE_FAILED"]
    assert outcome.report.kernels[0].served_by == "acme::a"


def test_broken_source_is_no_finding_where_nothing_is_compiled(compile_for, make_kernel):
    assert compile_for({"acme::a": make_kernel(BROKEN["COMPILE_FAILED"][0])}, stage="registered").codes == []


@pytest.mark.parametrize("stage", ["loaded", "proven"])
def test_stage_that_needs_a_device_is_unchecked_without_one(compile_for, make_kernel, stage):
    outcome = compile_for({"acme::a": make_kernel()}, stage=stage)
    assert outcome.codes == ["UNCHECKED"]
    finding = outcome.finding("UNCHECKED")
    assert (finding.subject, finding.severity) == (stage, "warn")
    assert f"stage {stage} was asked for, but the kernels reached compiled on sm_90a" in finding.why
    assert outcome.error is None
    report = outcome.report
    assert (report.stage_asked, report.stage_reached, report.below_stage_asked) == (stage, "compiled", True)
    assert not compile_for({"acme::a": make_kernel()}, stage="compiled").report.below_stage_asked
    qualified = compile_for({"acme::a": make_kernel()}, stage=stage, profile="qualify")
    assert isinstance(qualified.error, km.BootRefused)


def test_kernel_of_a_target_without_a_device_cannot_be_called(compile_for, make_kernel):
    import numpy as np

    def build(boot):
        with pytest.raises(km.MusterError, match="no device to launch on"):
            boot.kernels.kernel("acme", "a")(x=np.ones(3, np.float32), out=np.ones(3, np.float32))

    compile_for({"acme::a": make_kernel()}, build=build)


# after the seal


def ask_a(boot):
    boot.kernels.kernel("acme", "a")


def test_kernel_first_asked_for_after_the_seal_is_a_late_compile(compile_for, make_kernel):
    outcome = compile_for({"acme::a": make_kernel(), "acme::b": make_kernel()}, build=ask_a)
    assert outcome.codes == []
    for _ in range(3):
        outcome.session.kernels.for_layer("layers.0").kernel("acme", "a")
        outcome.session.kernels.for_layer("layers.0").kernel("acme", "b")
    outcome.judged_late()
    assert outcome.codes == ["LATE_COMPILE", "LATE_HIT"]
    finding = outcome.finding("LATE_COMPILE")
    assert (finding.subject, finding.severity, finding.layers) == ("acme::b", "warn", ("layers.0",))
    assert "test_builds.py" in finding.where[0]
    assert outcome.finding("LATE_HIT").subject == "acme::a"


def test_late_lookup_where_nothing_is_compiled_is_a_late_hit(compile_for, make_kernel):
    kernels = {"acme::a": make_kernel(), "acme::b": make_kernel()}
    outcome = compile_for(kernels, stage="registered", build=ask_a)
    outcome.session.kernels.kernel("acme", "b")
    assert outcome.judged_late(stage="registered").codes == ["LATE_HIT"]


# replay


@pytest.mark.parametrize("code", BROKEN)
def test_replay_knows_registrations_and_claims_nothing_of_builds(compile_for, make_kernel, code):
    outcome = compile_for({"acme::a": make_kernel(BROKEN[code][0])})
    assert outcome.codes == [code]
    assert [f.code for f in outcome.replay().findings] == []
    replayed = outcome.replay(stage="compiled")
    assert [f.code for f in replayed.findings] == ["UNCHECKED"]
    assert replayed.set_hash == outcome.report.set_hash
    assert [(row.key, row.backend) for row in replayed.kernels] == [("acme::a", "cuda_cpp")]


# the cache


@pytest.fixture
def full_disk(monkeypatch):
    """Let every file that is written meet a full disk."""

    def fsync(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield patch


@pytest.mark.parametrize(("profile", "severity"), [("serve", "note"), ("qualify", "warn")])
def test_cache_that_keeps_nothing_is_one_finding_of_all_builds(
    compile_for, make_kernel, full_disk, tmp_path, profile, severity
):
    kernels = {"acme::a": make_kernel(), "acme::b": make_kernel(), "acme::c": make_kernel("void broken(")}
    levers = {"MUSTER_CACHE_DIR": str(tmp_path / "full")}
    broken = compile_for(kernels, levers=levers, profile=profile)
    assert broken.codes == ["CACHE_NOT_KEPT", "COMPILE_FAILED"]
    del kernels["acme::c"]
    outcome = compile_for(kernels, levers=levers, profile=profile)  # compiles again
    assert (outcome.codes, outcome.error) == (["CACHE_NOT_KEPT"], None)
    found = outcome.finding("CACHE_NOT_KEPT")
    assert (found.subject, found.severity) == (str(tmp_path / "full"), severity)
    assert found.why == (
        "2 compiled sources were not kept, and will be compiled again in the next boot; "
        "the first could not be stored: No space left on device"
    )
    assert "MUSTER_CACHE_DIR=FOLDER" in found.remedies[1]
    assert [f.code for f in outcome.replay(profile=profile, stage="registered").findings] == []
    full_disk.undo()
    assert [compile_for(kernels, levers=levers).codes for _ in range(2)] == [[], []]


# the toolchain

CHILD = """
import site, sys
site.addsitedir(sys.argv[1])
import json
from pathlib import Path
import kernel_muster as km
from kernel_muster.registry.backends import EntryPoint
from kernel_muster.registry.backends.cuda_kernel import CudaKernel
source, manifest, cache, stage = sys.argv[2:]
session = km.boot(manifest=manifest, target="sm_90a", stage=stage or None, levers={"MUSTER_CACHE_DIR": cache})
try:
    with session as boot:
        boot.kernels.kernel("w4a16_gemv", "w4a16_gemv")
        boot.kernels.kernel("gemv", "dense_gemv_bf16")
except km.BootRefused:
    pass
print(json.dumps([[f.code, f.subject, f.why, f.remedies, f.explains] for f in session.report.findings]))
"""


@pytest.fixture
def without_packages(tmp_path, world):
    """Return the findings of a boot in a process that sees no package whose name begins like this."""

    def boot(*prefixes, stage="compiled"):
        folder = tmp_path / f"site{next(_SERIAL)}"
        folder.mkdir()
        for site in {Path(entry) for entry in sys.path if Path(entry).name == "site-packages"}:
            for path in site.iterdir():
                if not path.name.startswith(prefixes) and not (folder / path.name).exists():
                    (folder / path.name).symlink_to(path)
        arguments = (folder, "", world.manifest(), tmp_path / "cubins", stage)
        done = subprocess.run(
            [sys.executable, "-S", "-c", CHILD, *map(str, arguments)],
            env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, folder.glob("nvidia/*/lib")))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return boot


def test_machine_without_a_compiler_says_so_once_for_all_kernels(without_packages):
    ((code, subject, why, remedies, explains),) = without_packages("nvidia", "cuda")
    assert (code, subject) == ("TOOLCHAIN_MISSING", "toolchain")
    assert "no NVRTC wheel is installed" in why
    assert remedies[0] == "install kernel-muster[nvrtc13,numba13]"
    assert explains == ["gemv::dense_gemv_bf16 has no code", "w4a16_gemv::w4a16_gemv has no code"]


def test_machine_without_a_compiler_compiles_nothing_unless_asked(without_packages):
    assert without_packages("nvidia", "cuda", stage="") == []


def test_machine_without_the_bindings_says_so(without_packages):
    ((code, subject, why, *_),) = without_packages("cuda")
    assert (code, subject) == ("TOOLCHAIN_MISSING", "toolchain")
    assert "cuda.bindings cannot use NVRTC" in why


def test_machine_without_the_header_wheels_names_the_wheel(without_packages):
    found = without_packages("nvidia_cuda_cccl", "nvidia_cuda_runtime", "nvidia_cuda_crt")
    assert {code for code, *_ in found} == {"HEADERS_MISSING"}, found
    assert "comes with the wheel nvidia-cuda-" in found[0][2]


CRASHING = """
import importlib, os, signal, sys

sys.path.remove({site!r})
for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
    del sys.modules[name]
real = importlib.import_module("cuda.bindings.nvrtc")
create = real.nvrtcCreateProgram


def crash_on_one(source, *rest):
    if b"crashes the compiler" in source:
        os.kill(os.getpid(), signal.SIGSEGV)
    return create(source, *rest)


real.nvrtcCreateProgram = crash_on_one
"""


def test_compiler_that_crashes_over_one_source_is_a_finding_of_that_one(
    compile_for, make_kernel, monkeypatch, tmp_path
):
    package = tmp_path / "site" / "cuda" / "bindings"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").write_text("")
    (package / "nvrtc.py").write_text(CRASHING.format(site=str(tmp_path / "site")))
    monkeypatch.syspath_prepend(tmp_path / "site")
    own = Compilers()
    monkeypatch.setattr(compilers, "compile", own.compile)
    kernels = {"acme::a": make_kernel(GOOD + "// crashes the compiler"), "acme::b": make_kernel(entry="double_rows")}
    outcome = compile_for(kernels, levers={"MUSTER_CACHE_DIR": str(tmp_path / "new")})
    own.end()
    assert outcome.codes == ["COMPILE_FAILED"]
    found = outcome.finding("COMPILE_FAILED")
    assert found.subject == "acme::a"
    assert "itself ended with signal SIGSEGV while it compiled " in found.why
    assert [(row.key, row.stage) for row in outcome.report.kernels] == [
        ("acme::a", "registered"),
        ("acme::b", "compiled"),
    ]


class OlderCompiler(SimpleNamespace):
    """The real compiler, which says that it knows two architectures only."""

    def __getattr__(self, name):
        return getattr(self.real, name)

    def nvrtcGetSupportedArchs(self):  # noqa: N802  (a function of the bindings)
        status, _ = self.real.nvrtcGetSupportedArchs()
        return status, [80, 90]


def test_older_compiler_says_so_once_for_all_kernels(compile_for, make_kernel, monkeypatch, tmp_path):
    real = importlib.import_module("cuda.bindings.nvrtc")
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", OlderCompiler(real=real))
    monkeypatch.setattr(compilers, "compile", compile_cubin)  # in this process
    kernels = {"acme::a": make_kernel(), "acme::b": make_kernel(GOOD.replace("double", "twice"), entry="twice_rows")}
    outcome = compile_for(kernels, "sm_100a", levers={"MUSTER_CACHE_DIR": str(tmp_path / "new")})
    assert outcome.codes == ["TOOLCHAIN_TOO_OLD"]
    finding = outcome.finding("TOOLCHAIN_TOO_OLD")
    assert finding.subject == "toolchain"
    assert "does not compile for sm_100a; it knows sm_80, sm_90" in finding.why
    assert len(finding.explains) == 2
    assert compile_for(kernels, "sm_90a", levers={"MUSTER_CACHE_DIR": str(tmp_path / "new")}).codes == []


THRICE = """\
import numpy as np
from numba import cuda


@cuda.jit
def thrice(x, n, out):
    i = cuda.grid(1)
    if i < n:
        out[i] = x[i] * np.float32(2)
"""


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
@pytest.mark.parametrize(("pointer", "codes"), [("f32*", []), ("u32*", []), ("f64*", ["BAD_SPEC"])])
def test_numba_pointer_to_other_floats_than_the_contracts_refuses_the_boot(compile_for, tmp_path, pointer, codes):
    (tmp_path / "thrice.py").write_text(THRICE)

    def plan(bound, entries):
        return km.LaunchPlan("thrice", (1, 1, 1), (bound.views["x"], bound.dims["M"], bound.views["out"]))

    entry = km.NumbaEntry("thrice", (pointer, "i32", "f32*"), threads=128)
    outcome = compile_for({"acme::a": km.NumbaKernel(tmp_path / "thrice.py", (entry,), plan)})
    assert outcome.codes == codes
    if codes:
        found = outcome.finding("BAD_SPEC")
        said = "case one: thrice: argument 0 is an array of float32, declared as f64*: expected f32* (or u32*, "
        assert found.why.startswith(said)
        assert found.remedies[0] == "declare in the NumbaEntry what the contract's tensor holds"
