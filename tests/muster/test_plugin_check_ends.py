"""``muster plugin check`` of plugins that end its process, block it, or leave processes behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plugin_texts import codes, source, steps


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
        ("120", "after 3 s", "raise MUSTER_PLUGIN_TIMEOUT_S"),
        (  # the other half is enough for the built-in plugins, on a slow machine too
            "5",
            "after 2.5 s",
            "raise --timeout: a plugin may load for half of it, and for MUSTER_PLUGIN_TIMEOUT_S (3 s) at most",
        ),
    ],
)
def test_limit_of_the_load_is_that_of_a_boot_or_half_of_a_steps_and_the_remedy_says_which(
    cli, check, timeout, said, remedy
):
    cli.monkeypatch.setenv("MUSTER_PLUGIN_TIMEOUT_S", "3")
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to a process that asks for them")
@pytest.mark.parametrize("timeout", [120, 4])
def test_processes_that_have_left_the_group_are_ended_and_named(check, tmp_path, timeout):
    note = tmp_path / "pids"
    head = f"""
import subprocess, sys
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open({str(note)!r}, "a") as file:
                file.write(f"{{os.getpid()}} ")
            os.execvpe("sleep", ["sleep", "3600"], {{}})
        os._exit(0)
daemon()
with open({str(note)!r}, "a") as file:
    file.write(f"{{subprocess.Popen(['sleep', '1800'], start_new_session=True).pid}} ")
time.sleep(0.3)  # both run by now
"""
    kernel = "double" if timeout == 120 else "hang"
    report = check(source(f'spec("acme::double", {kernel})', head=head), "--timeout", timeout)
    assert report["verdict"] == ("passed" if kernel == "double" else "refused")
    (said,) = report["notes"]
    assert {"sleep 1800", "sleep 3600"} == set(said.removeprefix("ended what was left running: ").split("; "))
    assert all(_has_ended(int(pid)) for pid in note.read_text().split())


def test_processes_that_end_by_themselves_are_not_named(check):
    head = "\nimport subprocess\nsubprocess.Popen(['sleep', '0.01'])\n"
    assert check(source('spec("acme::double")', head=head))["notes"] == []


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
        child = _child_of(_child_of(_child_of(process.pid)))
        process.send_signal(sent)
        assert process.wait(30) == code
        said = process.stderr.read()
    assert said == ("muster: interrupted\n" if code == 130 else "")
    assert _has_ended(child)
    assert bool(list(folders.iterdir())) == (sent == signal.SIGKILL)
