"""``muster plugin check`` of compiled kernels, and the stage reached by a check."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from kernel_muster.registry.hardware.target import resolve_target
from plugin_texts import HEAD, codes, source

CUDA = """
from pathlib import Path
from kernel_muster.registry.backends import EntryPoint
from kernel_muster.registry.backends.cuda_kernel import CudaKernel

def cuda(text, name="twice"):
    path = Path(__file__).with_name(f"{name}.cu")
    head = 'extern "C" __global__ void __launch_bounds__(128) twice(const float* x, int n, float* out) {'
    path.write_text(f"{head}{text}}}")
    return CudaKernel(path, (EntryPoint("twice", ("ptr", "i32", "ptr")),), plan)

def plan(bound, entries):
    views = list(bound.views.values())
    return km.LaunchPlan("twice", (1, 1, 1), (views[0], views[0].size, views[-1]))
"""
BODY = "if (threadIdx.x < n) out[threadIdx.x] = x[threadIdx.x] * 2;"


def test_code_is_compiled_for_every_architecture_that_is_declared(check, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    report = check(
        source(
            f'spec("acme::a", backend=cuda({BODY!r}), archs=("sm_80+",))',
            f'spec("acme::b", backend=cuda({BODY!r}), archs=("sm_80+",))',
            f'spec("acme::c", backend=cuda({BODY!r}, "other"), archs=("sm_90a", "sm_120f"))',
            head=CUDA,
        )
    )
    compiled = {(s["subject"], s["target"]) for s in report["steps"] if s["kind"] == "compile"}
    assert compiled == {
        *(("twice.cu (acme::a, acme::b)", arch) for arch in ("sm_80", "sm_90a", "sm_100a", "sm_121a")),
        *(("other.cu (acme::c)", arch) for arch in ("sm_90a", "sm_120f", "sm_121a")),
    }
    assert {s["outcome"] for s in report["steps"] if s["kind"] == "compile"} == {"ok"}


def test_code_that_fails_for_one_architecture_is_refused_for_that_one(check, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    body = f"\n#if __CUDA_ARCH__ >= 1000\n{BODY}\n#endif\n"
    report = check(source(f'spec("acme::a", backend=cuda({body!r}), archs=("sm_90+",))', head=CUDA))
    failed = [s["target"] for s in report["steps"] if s["outcome"] == "failed"]
    assert failed == ["sm_90a"]
    assert codes(report) == [("NO_DEVICE_CODE", "acme::a")]


def test_planner_that_gives_no_launch_is_refused_without_a_device(check, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    head = CUDA.replace("return km.LaunchPlan(", "return (")
    report = check(source(f'spec("acme::a", backend=cuda({BODY!r}), archs=("sm_90a",))', head=head))
    assert [(s["kind"], s["target"]) for s in report["steps"] if s["outcome"] == "failed"] == [("plan", "sm_90a")]
    assert codes(report) == [("BAD_SPEC", "acme::a")]


def test_fault_on_several_architectures_is_one_finding_that_names_them(check, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    head = CUDA.replace("return km.LaunchPlan(", "return (")
    made = source(
        f'spec("acme::a", backend=cuda({BODY!r}), archs=("sm_80+",))',
        """spec("acme::b", backend=cuda('extern "C" broken(', "other"), archs=("sm_80+",))""",
        head=head,
    )
    report = check(made)
    assert codes(report) == [("COMPILE_FAILED", "acme::b"), ("BAD_SPEC", "acme::a")]
    planned = {(s["subject"], s["outcome"], s["reason"]) for s in report["steps"] if s["kind"] == "plan"}
    assert planned == {("acme::a", "failed", "BAD_SPEC"), ("acme::b", "skipped", "its code does not compile")}
    broken, planned = (finding["why"] for finding in report["findings"])
    assert broken.startswith("for sm_80, sm_90a, sm_100a, sm_121a: ")
    assert planned.startswith("case three on sm_80, sm_90a, sm_100a, sm_121a: the planner returned ")
    assert [finding["explains"] for finding in report["findings"]] == [[], []]


def test_cache_folder_that_cannot_be_used_is_said_and_hides_nothing(check, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "file" / "cubins"))
    text = source(f'spec("acme::a", backend=cuda({BODY!r}), archs=("sm_90a",))', head=CUDA)
    report = check(text, "--stage", "compiled")
    assert (report["verdict"], codes(report)) == ("passed", [("CACHE_NOT_KEPT", f"{tmp_path}/file/cubins")])
    (found,) = report["findings"]
    assert found["why"].startswith("1 compiled source was not kept")  # and is not compiled again for its plans
    assert "Not a directory" in found["why"]


def test_device_kernels_without_a_device_are_skipped_with_the_reason(check, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    _, no_device = resolve_target(None)
    text = source(f'spec("acme::a", backend=cuda({BODY!r}), archs=("sm_90+",))', head=CUDA)
    skipped = [s for s in check(text)["steps"] if s["outcome"] == "skipped"]
    expected = [("prove", "acme::a", no_device.why)] if no_device is not None else []
    assert [(s["kind"], s["subject"], s["reason"]) for s in skipped] == expected


@pytest.fixture
def without_compilers(cli, monkeypatch, tmp_path):
    """Take NVRTC from what the check's process sees: the same packages, in folders of links, but for its metadata."""
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    cli.install(source(TWO, 'spec("acme::host")', head=CUDA))
    path = []
    for number, entry in enumerate(sys.path):
        if list(Path(entry).glob("nvidia_cuda_nvrtc*.dist-info")):
            (shadow := tmp_path / f"shadow{number}").mkdir()
            for one in Path(entry).iterdir():
                if not one.name.startswith("nvidia_cuda_nvrtc"):
                    (shadow / one.name).symlink_to(one)
            entry = str(shadow)
        path.append(entry)
    monkeypatch.setattr(sys, "path", path)


# Architectures without a device for tests.
TWO = f'spec("acme::a", backend=cuda({BODY!r}), archs=("sm_100a", "sm_103a"))'


def test_verdict_says_what_was_not_done_and_one_line_why(cli, without_compilers):
    ran = cli("plugin", "check", "acme")
    lines = ran.out.splitlines()
    assert ran.code == 0
    assert lines[0].endswith("skipped; not compiled, not proven on a device")
    assert lines[0] == lines[-1]
    skipped = lines[lines.index("Skipped") + 1 :]
    assert skipped[0] == (
        "  4 x compile, plan on sm_100a, sm_103a: no compiler is installed: "
        "kernel-muster[nvrtc13,numba13] or kernel-muster[nvrtc12,numba12]"
    )


@pytest.mark.parametrize("stage", ["compiled", "proven"])
def test_stage_that_is_not_reached_for_want_of_a_compiler_refuses(cli, without_compilers, stage):
    ran = cli("plugin", "check", "acme", "--stage", stage, "--format", "json")
    assert (ran.code, ran.json["verdict"], ran.json["stage_asked"]) == (1, "refused", stage)
    assert ran.json["not_done"] == ["not compiled", "not proven on a device"]
    found = [row for row in ran.json["findings"] if "not compiled" in row["why"]]
    assert [(row["code"], row["subject"], row["severity"]) for row in found] == [("UNCHECKED", stage, "refuse")]
    assert found[0]["why"].startswith(f"stage {stage} was asked for, but not compiled: no compiler is installed")
    assert found[0]["where"] == ["twice.cu (acme::a)"]


def test_stage_proven_refuses_without_a_device_and_stage_compiled_does_not(cli, check, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    compiled = check(source(TWO, head=CUDA), "--stage", "compiled")
    assert (compiled["verdict"], compiled["findings"]) == ("passed", [])
    assert compiled["not_done"] == ["not proven on a device"]
    proven = cli("plugin", "check", "acme", "--stage", "proven", "--format", "json")
    assert (proven.code, codes(proven.json)) == (1, [("UNCHECKED", "proven")])


def test_stage_of_host_kernels_is_reached_everywhere_and_of_no_kernel_nowhere(check):
    proven = check(source('spec("acme::double")'), "--stage", "proven")
    assert (proven["verdict"], proven["not_done"]) == ("passed", [])
    lever = "km.Lever(name='MUSTER_NO_ACME', kind='bool', default=False, doc='Drop it.')"
    text = f"{HEAD}@km.hookimpl\ndef muster_levers():\n    return [{lever}]\n"
    nothing = check(text, "--stage", "proven", name="levers")
    assert codes(nothing) == [("UNCHECKED", "proven")]
    assert "there is no kernel" in nothing["findings"][0]["why"]


SPILL = """
const int i = threadIdx.x; float v[128];
#pragma unroll
for (int k = 0; k < 128; ++k) v[k] = x[i * 128 + k];
__syncthreads();
float s = 0;
#pragma unroll
for (int k = 0; k < 128; ++k) { s = s * v[k] + v[127 - k]; v[k] = s; }
__syncthreads();
#pragma unroll
for (int k = 0; k < 128; ++k) out[i * 128 + k] = v[k] * s;
"""


def test_what_compiled_code_needs_is_shown_and_what_spills_is_told(cli, check, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    head = CUDA.replace("128) twice", "1024, 2) twice").replace('"ptr")),), plan)', '"ptr")),), plan, options=OPTIONS)')
    head += 'OPTIONS = ("-Xptxas=--warn-on-spills",)\n'
    kernels = f'spec("acme::a", backend=cuda({SPILL!r}), archs=("sm_80", "sm_90a"))'
    report = check(source(kernels, head=head))
    rows = {row["target"]: row for row in report["entries"]}
    assert list(rows) == ["sm_80", "sm_90a", "sm_121a"] or list(rows) == ["sm_80", "sm_90a"]
    assert report["version"] == "1.4"
    for row in rows.values():
        assert (row["entry"], row["source"], row["keys"]) == ("twice", "twice.cu", ["acme::a"])
        assert (row["max_threads"], row["static_shared_bytes"], row["registers"] <= 32) == (1024, 0, True)
        assert row["spill_store_bytes"] > 0 < row["spill_load_bytes"]
    assert {row["target"] for row in report["warnings"]} == set(rows)
    assert all("spill" in row["text"] for row in report["warnings"])
    text = cli("plugin", "check", "acme").out
    told = text[text.index("Registers do not suffice: these kernels spill to memory") :].splitlines()[1]
    assert told.startswith(f"  twice of twice.cu, bytes a thread: sm_80 {rows['sm_80']['spill_store_bytes']} stored, ")
    assert "Compiled code: " not in text
    verbose = cli("plugin", "check", "acme", "--verbose").out
    assert "Compiled code: registers, stack and spilled bytes a thread; " in verbose
    assert "Warnings of the compilers" in verbose


def test_code_that_does_not_spill_is_told_of_only_when_asked(cli, check, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    report = check(source(f'spec("acme::a", backend=cuda({BODY!r}), archs=("sm_90a",))', head=CUDA))
    ((row,), warnings) = report["entries"], report["warnings"]
    assert (row["spill_store_bytes"], row["spill_load_bytes"], row["stack_bytes"], warnings) == (0, 0, 0, [])
    assert "spill" not in cli("plugin", "check", "acme").out


def test_findings_about_device_kernels_say_where(check, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    made = source(
        f'spec("acme::a", backend=cuda({BODY!r}), archs=("sm_90a",))',
        """spec("acme::b", backend=cuda('nothing;', "other"), archs=("sm_90a",))""",
        head=CUDA.replace("return km.LaunchPlan(", "return ("),
    )
    where = {row["subject"]: row["where"] for row in check(made)["findings"]}
    assert where["acme::b"][0].endswith("/other.cu:1")
    assert where["acme::a"][0].rpartition(":")[0].endswith(".py")


NUMBA = """
from pathlib import Path

def numba(pointer):
    path = Path(__file__).with_name("thrice.py")
    path.write_text('''
import numpy as np
from numba import cuda


@cuda.jit
def thrice(x, n, out):
    i = cuda.grid(1)
    if i < n:
        out[i] = x[i] * np.float32(2)
''')
    entry = km.NumbaEntry("thrice", (pointer, "i32", "f32*"), threads=128)
    return km.NumbaKernel(path, (entry,), plan)

def plan(bound, entries):
    return km.LaunchPlan("thrice", (1, 1, 1), (bound.views["x"], bound.dims["M"], bound.views["out"]))
"""


@pytest.mark.skipif(find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
def test_numba_pointer_to_other_floats_than_the_contracts_is_refused(check, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    report = check(source('spec("acme::a", backend=numba("f64*"), archs=("sm_90a",))', head=NUMBA))
    assert (report["verdict"], codes(report)) == ("refused", [("BAD_SPEC", "acme::a")])
    (found,) = report["findings"]
    said = "case three on sm_90a: thrice: argument 0 is an array of float32, declared as f64*: expected f32* (or u32*, "
    assert found["why"].startswith(said)
    assert found["remedies"][0] == "declare in the NumbaEntry what the contract's tensor holds"
    assert (found["log"], found["where"][0].rpartition(":")[0].endswith(".py")) == ("", True)
