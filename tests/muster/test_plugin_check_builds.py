"""``muster plugin check`` of kernels that are compiled, and the stage that a check reached."""

import sys
from pathlib import Path

import pytest
from kernel_muster.registry.target import resolve_target
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


def test_cache_folder_that_cannot_be_used_is_a_usage_error(cli, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "file" / "cubins"))
    cli.install(source(f'spec("acme::a", backend=cuda({BODY!r}), archs=("sm_90a",))', head=CUDA), "acme")
    ran = cli("plugin", "check", "acme")
    assert (ran.code, ran.out) == (2, "")
    assert "cubins: it cannot be made: Not a directory" in ran.err
    assert "bug in kernel-muster" not in ran.err


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


# Architectures that tests run on no device of.
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
