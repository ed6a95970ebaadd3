"""``muster plugin check``: what an author hears about each kind of fault, crashes and hangs included."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from kernel_muster.audit import plugin_check
from kernel_muster.cli.wheels import installed
from kernel_muster.registry.target import resolve_target

HEAD = """
import ctypes, os, time
import kernel_muster as km


def double(x, out):
    out[...] = x * 2


def wrong(x, out):
    out[...] = x * 2.01


def crash(x, out):
    ctypes.string_at(0)


def leave(x, out):
    os._exit(0)


def hang(x, out):
    time.sleep(3600)


def chatter(x, out):
    print("a kernel that prints", flush=True)
    out[...] = x * 2


def contract(name="acme_double", reference=lambda arguments, dims: {"out": arguments["x"] * 2}, **more):
    signature = km.Signature((km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out")))
    return km.Contract(name=name, summary="out = 2 * x", signature=signature, reference=reference,
                       cases=(km.Case("three", {"M": 3}),), tolerance=km.Tolerance(0, 0, "exact"), **more)


def spec(key, function=double, **more):
    return km.KernelSpec(**{"key": key, "contract": "acme_double", "archs": ("cpu",),
                            "backend": km.PythonKernel(function), **more})
"""
HOOKS = """

@km.hookimpl
def muster_contracts():
    return [{contracts}]


@km.hookimpl
def muster_kernels():
    return [{kernels}]
"""


def source(*kernels: str, contracts: str = "contract()", head: str = "") -> str:
    return HEAD + head + HOOKS.format(kernels=", ".join(kernels), contracts=contracts)


@pytest.fixture
def check(cli: Any) -> Any:
    """Install a plugin of this source and check it; return the run and its JSON."""

    def check(text: str, *options: object, name: str = "acme") -> Any:
        cli.install(text, name)
        ran = cli("plugin", "check", name, "--format", "json", *options)
        assert ran.code in (0, 1), ran.err
        assert ran.code == int(ran.json["verdict"] == "refused")
        return ran.json

    return check


def steps(report: Any) -> dict[str, str]:
    return {f"{s['kind']} {s['subject']} {s['target']}".strip(): s["outcome"] for s in report["steps"]}


def codes(report: Any) -> list[tuple[str, str]]:
    return [(finding["code"], finding["subject"]) for finding in report["findings"]]


def test_sound_plugin_passes_with_every_step(check):
    report = check(source('spec("acme::double")', 'spec("acme::loud", chatter)'))
    assert (report["schema"], report["verdict"], report["findings"]) == ("kernel-muster/plugin-check", "passed", [])
    assert steps(report) == {
        "load acme": "ok",
        "contract acme_double": "ok",
        "prove acme::double cpu": "ok",
        "prove acme::loud cpu": "ok",
    }
    (plugin,) = report["plugins"]
    assert (plugin["name"], plugin["keys"]) == ("acme", ["acme::double", "acme::loud"])


def test_text_says_verdict_plugin_and_steps(cli):
    cli.install(source('spec("acme::double")'))
    ran = cli("plugin", "check", "acme")
    lines = ran.out.splitlines()
    assert lines[0] == lines[-1] == "PASSED: acme 1.0: 3 steps: 3 ok"
    assert "Plugin acme (loaded): contracts kernels" in lines
    assert "All steps" not in ran.out
    assert "prove     acme::double  cpu     ok" in cli("plugin", "check", "acme", "--verbose").out


BAD_REFERENCE = 'contract(reference=lambda arguments, dims: {"out": arguments["x"][:2]})'
NO_OUTPUT = 'contract(reference=lambda arguments, dims: {"ot": arguments["x"]})'
NO_INPUTS = 'contract(), contract("acme_other", inputs=lambda dims, rng: 1 / 0)'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("raise ImportError('no such library')\n", ("PLUGIN_LOAD_FAILED", "acme")),
        ("import sys\nsys.exit(0)\n", ("PLUGIN_LOAD_FAILED", "acme")),
        ("", ("PLUGIN_EMPTY", "acme")),
        (source('spec("acme::double")').replace("muster_contracts", "muster_contract"), ("UNKNOWN_HOOK", "acme")),
        (source('spec("other::double")'), ("BAD_SPEC", "acme")),
        (source('spec("acme::double", contract="nobodys")'), ("BAD_SPEC", "acme")),
        (source('spec("acme::double", archs=())'), ("BAD_SPEC", "acme")),
        (source('spec("acme::double", overrides="nobody")'), ("BAD_OVERRIDE", "acme")),
        (source('spec("acme::double")', 'spec("acme::double")'), ("DUPLICATE_KERNEL", "acme::double")),
        (source('spec("silu::silu_mul", overrides="kernel-muster")'), ("SIGNATURE_MISMATCH", "silu::silu_mul")),
        (source('spec("acme::double")', contracts=BAD_REFERENCE), ("BAD_SPEC", "acme_double")),
        (source('spec("acme::double")', contracts=NO_OUTPUT), ("BAD_SPEC", "acme_double")),
        (source('spec("acme::double", contract="acme_other")', contracts=NO_INPUTS), ("BAD_SPEC", "acme_other")),
        (source('spec("acme::double", wrong)'), ("NUMERICS_FAILED", "acme::double")),
        (source('spec("acme::double", bit_identical_to=("acme::gone",))'), ("UNCHECKED", "acme::double")),
    ],
)  # fmt: skip
def test_faulty_plugin_is_refused_with_its_code(check, text, found):
    report = check(text)
    assert report["verdict"] == "refused"
    assert codes(report) == [found]
    assert "--no-plugin" not in json.dumps(report["findings"])


def test_output_that_the_reference_lacks_is_said_once_for_all_cases(check):
    more = 'km.Case("three", {"M": 3}), km.Case("five", {"M": 5}),'
    text = source('spec("acme::double")', contracts=NO_OUTPUT).replace('km.Case("three", {"M": 3}),', more)
    (finding,) = check(text)["findings"]
    assert finding["why"] == "cases three, five: the reference gives no output out (it gives ot)"
    assert finding["log"] == ""


def test_scalar_that_a_case_does_not_give_is_refused(check):
    params = '(km.ScalarParam("cap", "f32"), km.TensorParam("x", "f32", ("M",)), '
    text = source('spec("acme::double")').replace('((km.TensorParam("x", "f32", ("M",)), ', f"({params}")
    (finding,) = check(text.replace("def double(x, out)", "def double(cap, x, out)"))["findings"]
    assert (finding["code"], finding["subject"]) == ("BAD_SPEC", "acme")
    assert finding["why"] == "muster_contracts()[0] acme_double: case three gives no value for the scalar cap"


def test_kernel_of_a_faulty_contract_is_not_blamed(check):
    report = check(source('spec("acme::double")', 'spec("acme::b", crash)', contracts=BAD_REFERENCE))
    skipped = {s["subject"]: s["reason"] for s in report["steps"] if s["outcome"] == "skipped"}
    assert skipped == dict.fromkeys(("acme::double", "acme::b"), "contract acme_double is faulty")


def test_failed_plugin_of_somebody_else_is_not_ones_own_fault(cli, check):
    cli.install("raise ImportError('broken')\n", "stranger")
    report = check(source('spec("acme::double")'))
    assert (report["verdict"], report["findings"]) == ("passed", [])


def test_builder_of_a_model_type_that_another_serves_is_found(check):
    hook = """
@km.hookimpl
def muster_models():
    return [km.ModelBuilder("mine", ("acme_type", "qwen3_5"), "production", lambda *given: None)]
"""
    report = check(source('spec("acme::double")') + hook)
    (finding,) = report["findings"]
    assert (finding["code"], finding["subject"]) == ("BAD_SPEC", "acme")
    said = "2 builders serve model type qwen3_5: hybrid_decoder, mine; a boot refuses its models"
    assert finding["why"] == said


def test_manifest_of_ones_own_that_refuses_every_boot_is_found(cli, check):
    folder = cli.manifest().parent.parent
    hook = f"@km.hookimpl\ndef muster_manifests():\n    import pathlib\n    return [pathlib.Path({str(folder)!r})]\n"
    text = source('spec("acme::double")') + hook
    cli.install("raise ImportError('broken')\n", "stranger")  # whose faults are not this plugin's
    assert check(text)["verdict"] == "passed"
    (folder / "tiny" / "MODEL.toml").write_text("[modell]\n")
    report = json.loads(cli("plugin", "check", "acme", "--format", "json").out)
    assert report["verdict"] == "refused"
    assert {row["code"] for row in report["findings"]} == {"BAD_MANIFEST"}
    assert all(row["where"][0].startswith(f"{folder}/tiny/MODEL.toml") for row in report["findings"])


# crashes and hangs


@pytest.mark.parametrize(
    ("function", "code", "said", "logged"),
    [
        ("crash", "OUT_OF_BOUNDS", "prove ended its process with signal SIGSEGV", "Segmentation fault"),
        ("leave", "NUMERICS_FAILED", "prove ended its process with exit code 0", ""),
        ("hang", "NUMERICS_FAILED", "prove was still running after 3 s, and its process was ended", "in hang"),
    ],
)
def test_kernel_that_ends_or_holds_its_process_hides_no_other(check, function, code, said, logged):
    start = time.monotonic()
    report = check(source('spec("acme::a")', f'spec("acme::b", {function})', 'spec("acme::c")'), "--timeout", 3)
    assert time.monotonic() - start < 30
    (finding,) = report["findings"]
    assert (finding["code"], finding["subject"], finding["why"]) == (code, "acme::b", said)
    assert logged in finding["log"]
    assert steps(report) == {
        "load acme": "ok",
        "contract acme_double": "ok",
        "prove acme::a cpu": "ok",
        "prove acme::b cpu": "failed",
        "prove acme::c cpu": "ok",
    }


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("os._exit(0)", "load ended its process with exit code 0 while plugin acme was loading"),
        ("os._exit(7)", "load ended its process with exit code 7 while plugin acme was loading"),
        ("ctypes.string_at(0)", "load ended its process with signal SIGSEGV while plugin acme was loading"),
        ("os.abort()", "load ended its process with signal SIGABRT while plugin acme was loading"),
        # holds the interpreter's lock
        (
            "ctypes.PyDLL(None).sleep(3600)",
            "load was still running after 3 s while plugin acme was loading, and its process was ended",
        ),
        ("time.sleep(3600)", "still importing, or in a hook, after 1.5 s"),
    ],
)
def test_import_that_ends_or_holds_its_process_is_load_failed(check, line, said):
    report = check(source('spec("acme::double")', head=f"\n{line}\n"), "--timeout", 3)
    (finding,) = report["findings"]
    assert (finding["code"], finding["subject"], finding["why"]) == ("PLUGIN_LOAD_FAILED", "acme", said)
    assert finding["where"][0].startswith("acme 1.0 (acme_plugin_")
    assert [step["kind"] for step in report["steps"]] == ["load"]
    hint = "look for os._exit in its modules and hooks, and in threads that the plugin starts"
    assert (hint in finding["remedies"]) == line.startswith("os._exit")
    assert not any("--no-plugin" in remedy for remedy in finding["remedies"])


def test_process_that_ends_while_a_plugin_of_others_loads_is_not_said_to_be_ones_own_fault(cli, check):
    cli.install("import os\nos._exit(0)\n", "stranger")
    (finding,) = check(source('spec("acme::double")'))["findings"]
    assert finding["subject"] == "acme"
    assert finding["why"] == "load ended its process with exit code 0 while plugin stranger was loading"
    assert finding["where"][0].startswith("stranger 1.0 (")
    assert finding["remedies"][-1] == "it may be the plugin that was loading too, which is another distribution's"


def test_thread_that_ends_the_process_while_built_in_plugins_load_is_not_their_fault(check):
    head = """
import sys
class Look:
    def find_spec(name, path=None, target=None):
        if name.startswith("kernel_muster.plugins."):
            os._exit(0)
sys.meta_path.insert(0, Look)
"""
    (finding,) = check(source('spec("acme::double")', head=head), name="acme")["findings"]
    assert (finding["subject"], finding["where"]) == ("acme", [])
    assert finding["why"].startswith("load ended its process with exit code 0 while plugin ")
    assert finding["remedies"][0].startswith("look for os._exit in its modules and hooks, and in threads that the ")


@pytest.mark.parametrize(
    ("timeout", "said", "remedy"),
    [
        ("120", "after 1 s", "raise MUSTER_PLUGIN_TIMEOUT_S"),
        (
            "1",
            "after 0.5 s",
            "raise --timeout: a plugin may load for half of it, and for MUSTER_PLUGIN_TIMEOUT_S (1 s) at most",
        ),
    ],
)
def test_limit_of_the_load_is_that_of_a_boot_or_half_of_a_steps_and_the_remedy_says_which(
    cli, check, timeout, said, remedy
):
    cli.monkeypatch.setenv("MUSTER_PLUGIN_TIMEOUT_S", "1")
    (finding,) = check("import time\ntime.sleep(3600)\n", "--timeout", timeout)["findings"]
    assert finding["why"] == f"still importing, or in a hook, {said}"
    assert finding["remedies"] == ["make its import and hooks quick", remedy]


def test_limit_of_the_load_that_is_no_number_is_a_usage_error(cli):
    cli.install(source('spec("acme::double")'))
    cli.monkeypatch.setenv("MUSTER_PLUGIN_TIMEOUT_S", "soon")
    ran = cli("plugin", "check", "acme")
    assert ran.code == 2
    assert "MUSTER_PLUGIN_TIMEOUT_S: " in ran.err


def test_reference_that_ends_its_process_is_found_where_it_is_written(check):
    text = source(
        'spec("acme::double")',
        contracts="contract(reference=leave_reference)",
        head="""
def leave_reference(arguments, dims):
    os._exit(0)
""",
    )
    (finding,) = check(text)["findings"]
    assert (finding["code"], finding["subject"]) == ("BAD_SPEC", "acme_double")
    (line,) = (number for number, said in enumerate(text.splitlines(), 1) if "def leave_reference" in said)
    (where,) = finding["where"]
    assert where.endswith(f".py:{line}")
    hint = "look for os._exit in the contract's inputs and reference, and in threads that the plugin starts"
    assert finding["remedies"] == [hint, "run it alone, under a debugger"]


def test_thread_that_a_plugin_leaves_running_holds_nobody(check):
    head = "\nimport threading\nthreading.Thread(target=time.sleep, args=(3600,)).start()\n"
    start = time.monotonic()
    assert check(source('spec("acme::double")', head=head))["verdict"] == "passed"
    assert time.monotonic() - start < 30


def test_processes_that_a_plugin_starts_end_with_the_check(check, tmp_path):
    note = tmp_path / "pid"
    head = f"""
import subprocess
import sys
if not os.path.exists({str(note)!r}):
    child = subprocess.Popen(["sleep", "3600"])
    with open({str(note)!r}, "w") as file:
        file.write(str(child.pid))
"""
    check(source('spec("acme::double", hang)', head=head), "--timeout", 2)
    assert _has_ended(int(note.read_text()))


@pytest.mark.parametrize("function", ["double", "leave"])
def test_process_that_a_plugin_forks_is_not_waited_for(check, function):
    head = "\nif os.fork() == 0:\n    time.sleep(25)\n    os._exit(0)\n"
    start = time.monotonic()
    report = check(source(f'spec("acme::double", {function})', head=head), "--timeout", 20)
    assert time.monotonic() - start < 15
    assert codes(report) == ([] if function == "double" else [("NUMERICS_FAILED", "acme::double")])


def test_plugin_that_ends_the_process_that_follows_a_crash_hides_nothing(check, tmp_path):
    flag = str(tmp_path / "flag")
    head = f"""
if os.path.exists({flag!r}):
    os._exit(64)


def once(x, out):
    open({flag!r}, "w").close()
    os._exit(3)
"""
    report = check(source('spec("acme::a")', 'spec("acme::b", once)', 'spec("acme::c")', head=head))
    assert {(finding["code"], finding["subject"], finding["why"]) for finding in report["findings"]} == {
        ("NUMERICS_FAILED", "acme::b", "prove ended its process with exit code 3"),
        (
            "PLUGIN_LOAD_FAILED",
            "acme",
            "loading it again, for what follows prove acme::b cpu, ended its process with exit code 64"
            " while plugin acme was loading",
        ),
    }
    assert [step["outcome"] for step in report["steps"]] == ["ok", "ok", "ok", "failed", "failed"]


@pytest.mark.parametrize("text", ["hello\n", "hello", "5\n{}\n", '{"event": "end"}\n', "[" * 9999 + "\n", "\xff\n"])
def test_what_a_plugin_writes_to_file_descriptors_that_are_not_its_own_is_passed_over(check, text):
    head = f"""
def spray():
    for number in range(3, 20):
        try:
            os.write(number, {text.encode("latin-1")!r})
        except OSError:
            pass


spray()


def loud(x, out):
    spray()
    out[...] = x * 2.01
"""
    report = check(source('spec("acme::a", loud)', 'spec("acme::b")', head=head))
    assert codes(report) == [("NUMERICS_FAILED", "acme::a")]
    assert steps(report)["prove acme::b cpu"] == "ok"


def test_step_whose_end_was_written_over_is_not_taken_for_a_sound_one():
    collected = plugin_check._Collected()
    head = {"event": "start", "name": "prove acme::a cpu", "kind": "prove", "subject": "acme::a", "target": "cpu"}
    lines = [json.dumps(head | {"where": []}).encode(), b'{"event": "dohello\n', b'{"event": "end"}']
    for event in plugin_check._events(plugin_check.MARK + line for line in lines):
        collected.take(event)
    assert [(step.subject, step.outcome) for step in collected.steps] == [("acme::a", "failed")]
    assert (collected.has_ended, collected.open) == (True, None)


def _has_ended(pid: int) -> bool:
    """Wait for a process that is not ours; one that nobody has collected yet has ended too."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def _child_of(pid: int) -> int:
    deadline = time.monotonic() + 60
    while not (found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(found[0])


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGHUP, -signal.SIGHUP),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_check_that_is_ended_takes_its_child_along(cli, tmp_path, sent, code):
    cli.install(source('spec("acme::double", hang)'))
    (folders := tmp_path / "folders").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    environment["TMPDIR"] = str(folders)
    command = [sys.executable, "-m", "kernel_muster", "plugin", "check", "acme", "--timeout", "600"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        child = _child_of(_child_of(process.pid))
        process.send_signal(sent)
        assert process.wait(30) == code
        said = process.stderr.read()
    assert said == ("muster: interrupted\n" if code == 130 else "")
    assert _has_ended(child)
    assert bool(list(folders.iterdir())) == (sent == signal.SIGKILL)


# compiled kernels

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


# what is named


def test_distribution_without_a_plugin_is_refused(cli):
    ran = cli("plugin", "check", "numpy", "--format", "json")
    assert (ran.code, codes(ran.json)) == (1, [("PLUGIN_NOT_FOUND", "numpy")])


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300", "0", "-1", "x"])
def test_time_limit_that_is_none_is_a_usage_error(cli, seconds):
    cli.install(source('spec("acme::double")'), "acme")
    ran = cli("plugin", "check", "acme", "--timeout", seconds)
    assert (ran.code, ran.out) == (2, "")
    assert "Invalid value for '--timeout'" in ran.err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kernel-mustre", "no wheel, installed distribution or plugin; did you mean kernel-muster"),
        ("gone-1.0-py3-none-any.whl", "is no file"),
        ("", "no wheel, installed distribution or plugin"),
        (".", ". is a folder, and what is checked is installed: pip install ., or pip wheel --no-deps . and check"),
    ],
)
def test_nothing_of_that_name_is_a_usage_error(cli, name, said):
    ran = cli("plugin", "check", name)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_plugin_is_found_by_its_entry_point_name(cli):
    def offer(distribution: str) -> None:
        info = cli.folder / f"site_{distribution}" / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[kernel_muster.v1]\nentry_a = nowhere\n")
        cli.monkeypatch.syspath_prepend(str(info.parent))

    offer("acme-wheels")
    assert installed("entry_a").metadata["Name"] == "acme-wheels"
    offer("other-wheels")
    ran = cli("plugin", "check", "entry_a")
    assert (ran.code, ran.out) == (2, "")
    assert "plugin entry_a is offered by acme-wheels and other-wheels" in ran.err


def wheel(folder: Path, text: str, version: str = "2.0", name: str = "acme") -> Path:
    """Write a wheel of one module."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}_wheel.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[kernel_muster.v1]\n{name} = {name}_wheel\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD")))
    return path


@pytest.mark.install
def test_wheel_is_checked_without_being_installed(cli, tmp_path):
    ran = cli("plugin", "check", wheel(tmp_path, source('spec("acme::double")')), "--format", "json")
    assert ran.code == 0, ran.out + ran.err
    assert (ran.json["distribution"], ran.json["distribution_version"]) == ("acme", "2.0")
    assert cli("plugin", "check", "acme").code == 2


@pytest.mark.install
def test_wheel_takes_the_place_of_the_version_that_is_installed(cli, tmp_path):
    cli.install(source('spec("acme::old", wrong)'))
    ran = cli("plugin", "check", wheel(tmp_path, source('spec("acme::new")')), "--format", "json")
    assert ran.code == 0, ran.out + ran.err
    assert [plugin["keys"] for plugin in ran.json["plugins"]] == [["acme::new"]]


@pytest.mark.install
@pytest.mark.parametrize("name", ["acme-2.0-py3-none-any.whl", "acme.whl"])
def test_file_that_is_no_wheel_is_refused_with_what_pip_says(cli, tmp_path, name):
    (tmp_path / name).write_text("no archive")
    ran = cli("plugin", "check", tmp_path / name, "--format", "json")
    assert (ran.code, codes(ran.json)) == (1, [("PLUGIN_LOAD_FAILED", name)])
    assert ran.json["findings"][0]["log"].startswith("ERROR: ")


def test_report_goes_to_a_file_whole(cli, tmp_path):
    cli.install(source('spec("acme::double")'))
    target = tmp_path / "check.json"
    assert cli("plugin", "check", "acme", "--format", "json", "--output", target).out == ""
    assert json.loads(target.read_text())["verdict"] == "passed"
