"""Plugins whose code ends the process: no command then exits with 0, and a written result stands."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kernel_muster.cli.app import run

IMPORT = "{body}\nimport kernel_muster as km\n@km.hookimpl\ndef muster_levers():\n    return []\n"
HOOK = "import kernel_muster as km\n@km.hookimpl\ndef muster_levers():\n    {body}\n"
OBSERVER = "import kernel_muster as km\n@km.hookimpl\ndef muster_audit_finished(report):\n    {body}\n"
EXIT = "import os; os._exit(0)"
CRASH = "import faulthandler; faulthandler._sigsegv()"
#: Ways to end a process: the command's exit code, and its message.
ENDS = {
    EXIT: (3, "exit code 0"),
    "import os; os._exit(7)": (3, "exit code 7"),
    "import os; os.execv('/bin/true', ['true'])": (3, "exit code 0"),
    "import os; os.fork() and os._exit(0); os._exit(0)": (3, "exit code 0"),
    "import os; os.kill(os.getpid(), 9)": (137, "signal SIGKILL"),
    "import signal; signal.raise_signal(signal.SIGTERM)": (143, "signal SIGTERM"),
    CRASH: (139, "signal SIGSEGV"),
}
SLOW = "import os, sys, time; sys.stderr.write(f'{os.getpid()}\\n'); sys.stderr.flush(); time.sleep(60)"
COMMANDS = (
    ("audit", "qwen3.6-27b", "--target", "cpu"), ("boot", "qwen3.6-27b", "--target", "cpu"),
    ("matrix", "--models", "qwen3.6-27b", "--targets", "cpu"), ("ab", "qwen3.6-27b", "--target", "cpu"),
    ("plugins",), ("kernels",), ("models",), ("levers",), ("explain", "silu::silu_mul", "--target", "cpu"),
)  # fmt: skip


def said_of(how: str, what_ran: str) -> str:
    return f"muster: error: there is no result: the process that does the work ended with {how} while {what_ran}\n"


@pytest.mark.parametrize(
    ("where", "body"), [*((IMPORT, body) for body in ENDS), (HOOK, EXIT), (OBSERVER, EXIT), (OBSERVER, CRASH)]
)
def test_plugin_that_ends_the_process_is_no_result_and_is_named(cli: Any, where: str, body: str) -> None:
    cli.install(where.format(body=body), "ending")
    done = cli.process("audit", "qwen3.6-27b", "--target", "cpu")
    code, how = ENDS[body]
    assert (done.returncode, done.stdout) == (code, "")
    ran = "the observer of plugin ending ran" if where == OBSERVER else "plugin ending was loading"
    assert said_of(how, ran) in done.stderr
    remedy = "repair that, or try --no-plugin ending; muster plugin check ending finds more"
    assert done.stderr.endswith(f"muster: plugin ending may have ended it, in a thread too: {remedy}\n")


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_command_whose_process_ended_does_not_end_well(cli: Any, arguments: tuple[str, ...]) -> None:
    cli.install(IMPORT.format(body=EXIT), "ending")
    done = cli.process(*arguments)
    assert (done.returncode, done.stdout) == (3, "")
    assert said_of("exit code 0", "plugin ending was loading") in done.stderr


@pytest.mark.parametrize("others", [(), ("aaa",)])
def test_thread_that_ends_the_process_while_others_load_is_suspected(cli: Any, others: tuple[str, ...]) -> None:
    thread = "import os, threading; threading.Thread(target=lambda: gate.wait() and os._exit(0)).start()"
    gate = "import sys, threading; sys.gate = gate = threading.Event()"
    cli.install(IMPORT.format(body=f"{gate}\n{thread}"), "bbb")
    for name in others:
        cli.install(IMPORT.format(body=""), name)
    # Stands in for a built-in plugin: it loads later, and waits where a slow one would be busy.
    module = cli.install(IMPORT.format(body="import sys, time\nsys.gate.set()\ntime.sleep(60)"), "ccc")
    file = next(Path(entry) for entry in sys.path if (Path(entry) / f"{module}.py").is_file()) / "ccc-1.0.dist-info"
    (file / "METADATA").write_text("Metadata-Version: 2.1\nName: kernel-muster\nVersion: 0\n")
    done = cli.process("plugins", env={"MUSTER_PLUGIN_TIMEOUT_S": "60"})
    assert (done.returncode, done.stdout) == (3, "")
    assert said_of("exit code 0", "plugin ccc was loading") in done.stderr
    which, more = ("plugins bbb, aaa", ", then aaa") if others else ("plugin bbb", "")
    remedy = f"repair that, or try --no-plugin bbb{more}; muster plugin check bbb finds more"
    assert done.stderr.endswith(f"muster: {which} may have ended it, in a thread too: {remedy}\n")


def test_process_that_ends_without_plugins_of_others_gets_a_remedy_too(cli: Any) -> None:
    before = "import kernel_muster.registry.discovery.discover as it\nit.load_plugin = lambda *given: os._exit(0)"
    done = probed(cli, before, "plugins")
    assert done.returncode == 3
    assert "no plugin of another distribution had begun to load: a library has crashed, or " in done.stderr


def test_builder_that_ends_the_process_is_named(cli: Any) -> None:
    cli.acme("acme::double", after=EXIT)
    done = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu")
    assert (done.returncode, done.stdout) == (3, "")
    assert said_of("exit code 0", "the builder of tiny ran") in done.stderr
    assert "try --no-plugin acme;" in done.stderr


def test_kernel_that_ends_the_process_in_a_proof_is_named(cli: Any) -> None:
    module = cli.acme("acme::double")
    file = next(Path(entry) for entry in sys.path if (Path(entry) / f"{module}.py").is_file()) / f"{module}.py"
    file.write_text(file.read_text().replace("    out[...] = x * 2\n", f"    {EXIT}\n"))
    done = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu", "--stage", "proven")
    assert (done.returncode, done.stdout) == (3, "")
    assert said_of("exit code 0", "proof of acme::double ran") in done.stderr


@pytest.mark.parametrize(
    ("body", "verdict", "said"),
    [
        ("raise KeyboardInterrupt", 1, "it failed on arguments that its contract allows: KeyboardInterrupt"),
        ("import os, sys; n = os.fork(); n and sys.stderr.write(f'forked {n}\\n'); out[...] = x * 2", 0, "PASSED: "),
    ],
    ids=["interrupt", "fork"],
)
def test_kernel_that_interrupts_or_forks_in_a_proof_is_judged_and_leaves_nothing(
    cli: Any, body: str, verdict: int, said: str
) -> None:
    module = cli.acme("acme::double")
    file = next(Path(entry) for entry in sys.path if (Path(entry) / f"{module}.py").is_file()) / f"{module}.py"
    file.write_text(file.read_text().replace("    out[...] = x * 2\n", f"    {body}\n"))
    done = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu", "--stage", "proven")
    assert (done.returncode, said in done.stdout) == (verdict, True), done.stdout
    forked = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("forked ")]
    assert bool(forked) is ("fork" in body)
    assert all(ends(number) for number in forked)


@pytest.mark.parametrize("exit", ["0", "7"])
def test_exit_handler_that_ends_the_process_leaves_the_verdict(cli: Any, exit: str) -> None:
    after = f"import atexit, os; atexit.register(os._exit, {exit}); return None"
    cli.acme("acme::gone", after=after)
    done = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu")
    assert (done.returncode, done.stderr) == (1, "a builder that prints\n")
    assert done.stdout.startswith("REFUSED: ")


def test_crash_after_the_result_leaves_the_verdict(cli: Any) -> None:
    after = "import atexit, faulthandler; atexit.register(faulthandler._sigsegv); return None"
    cli.acme("acme::double", after=after)
    done = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu")
    assert (done.returncode, done.stderr) == (0, "a builder that prints\n")
    assert done.stdout.startswith("PASSED: ")


def test_thread_that_does_not_end_holds_the_command_for_moments(cli: Any) -> None:
    before = "import kernel_muster.cli.process.guard as guard; guard._GRACE_S = guard._LOOK_S = 0.2"
    cli.install(IMPORT.format(body="import threading; threading.Thread(target=threading.Event().wait).start()"), "held")
    done = probed(cli, before, "plugins", "--format", "json")
    assert (done.returncode, done.stderr.endswith(" is 0\n")) == (0, True)
    assert json.loads(done.stdout)["plugins"]


def test_who_hears_whose_code_runs_cannot_say_that_the_result_is_written(cli: Any) -> None:
    body = "from kernel_muster.registry.plugin_code import running; running._listener.__self__.of_end(0)"
    cli.install(IMPORT.format(body=body), "lying")
    done = cli.process("plugins")
    assert done.returncode == 1
    assert "AttributeError" in done.stdout


LOUD = """
import atexit, os, sys, threading, time

def say():
    os.write(1, b"PASSED raw\\n")
    for stream in (sys.stdout, sys.__stdout__):
        stream.write("PASSED text\\n")
        stream.flush()

def say_on():
    while True:
        say()
        time.sleep(0.001)

class Left:
    def __del__(self):
        say()

sys.modules["acme_left"] = Left()
atexit.register(say)
threading.Thread(target=say_on, daemon=True).start()
"""


@pytest.mark.parametrize("where", ["stdout", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_what_a_plugin_prints_at_any_time_is_no_part_of_the_result(cli: Any, where: str) -> None:
    cli.install(LOUD, "loud")
    output = () if where == "stdout" else ("--output", where)
    done = cli.process("plugins", "--format", "json", *output)
    assert "loud" in {row["name"] for row in json.loads(done.stdout)["plugins"]}
    assert "PASSED raw\n" in done.stderr
    assert "PASSED text\n" in done.stderr


def test_result_in_a_file_that_stdout_is_holds_the_result_alone(cli: Any) -> None:
    cli.install(LOUD, "loud")
    file = cli.folder / "out.json"
    with file.open("w") as stream:
        cli.process("plugins", "--format", "json", capture_output=False, stdout=stream, stderr=subprocess.DEVNULL)
    assert json.loads(file.read_text())["plugins"]


def test_plugin_that_closes_low_descriptors_does_not_meet_that_of_the_result(cli: Any) -> None:
    cli.install(IMPORT.format(body="import os; os.closerange(3, 100)"), "closing")
    done = cli.process("plugins", "--format", "json")
    assert json.loads(done.stdout)["plugins"]


def test_plugin_that_closes_what_stdout_is_kept_in_is_told(cli: Any) -> None:
    cli.install(IMPORT.format(body="import os; os.closerange(3, 1 << 16)"), "closing")
    done = cli.process("plugins")
    assert (done.returncode, done.stdout) == (2, "")
    assert "muster: error: stdout cannot be written: what ran has closed its copy, file descriptor " in done.stderr


def test_command_in_a_new_namespace_of_processes_does_its_work(cli: Any) -> None:
    done = probed(cli, "os.getppid = lambda: 0", "plugins")  # as the first process of a namespace sees it
    assert done.returncode == 0, done.stderr


def test_process_that_a_plugin_forked_speaks_for_nobody(cli: Any) -> None:
    # The child of the child continues the command. The child itself exits with 0.
    cli.acme("acme::gone", after="import os; (os.fork() == 0) or (os._exit(os.wait()[1])); return None")
    done = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu")
    assert done.returncode == 3
    assert "there is no result" in done.stderr


# signals


@contextmanager
def started(cli: Any, **options: Any) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Start an audit that does not come to its end, and return it and its child's number."""
    cli.install(IMPORT.format(body=SLOW), "slow")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "MUSTER_PLUGIN_TIMEOUT_S": "60"}
    command = [sys.executable, "-m", "kernel_muster", "audit", "qwen3.6-27b", "--target", "cpu"]
    options = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE} | options
    with subprocess.Popen(command, env=environment, cwd=cli.folder, **options) as process:
        try:
            assert process.stderr is not None
            child = int(process.stderr.readline())
            yield process, child
        finally:
            process.kill()


def state_of(number: int) -> str:
    """Return the state of a process as /proc tells it: ``Z`` where it has ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def is_there(number: int) -> bool:
    return state_of(number) != "Z"


def ends(number: int) -> bool:
    """Wait until a process has ended; False if it does not."""
    deadline = time.monotonic() + 10
    while is_there(number) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_there(number)


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        (signal.SIGTERM, -signal.SIGTERM, b""), (signal.SIGHUP, -signal.SIGHUP, b""),
        (signal.SIGINT, 130, b"muster: interrupted\n"), (signal.SIGKILL, -signal.SIGKILL, b""),
    ],
)  # fmt: skip
def test_signal_to_the_command_ends_what_it_started(cli: Any, sent: signal.Signals, code: int, said: bytes) -> None:
    with started(cli) as (process, child):
        assert child != process.pid
        process.send_signal(sent)
        assert process.wait(20) == code
        assert ends(child)
        assert process.stderr is not None
        assert process.stderr.read() == said


def test_interrupt_counts_from_the_first_moment_on(cli: Any) -> None:
    cli.install(IMPORT.format(body=SLOW), "slow")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "kernel_muster", "plugins"]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, cwd=cli.folder, stderr=subprocess.PIPE) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None
        assert process.stderr.read().endswith(b"muster: interrupted\n")


def test_key_that_interrupts_at_a_terminal_does_so_once(cli: Any) -> None:
    parent, terminal = pty.openpty()
    options = {"stdin": terminal, "stdout": terminal, "start_new_session": True}
    with started(cli, preexec_fn=lambda: _take_terminal(terminal), **options) as (process, child):
        os.close(terminal)
        os.write(parent, b"\x03")
        assert process.wait(20) == 130
        assert ends(child)
        assert process.stderr is not None
        assert process.stderr.read() == b"muster: interrupted\n"
    os.close(parent)


def _take_terminal(terminal: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def test_signal_that_stops_the_command_stops_what_it_started(cli: Any) -> None:
    with started(cli, process_group=0) as (process, child):
        for sent, states in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "SR")):
            process.send_signal(sent)
            deadline = time.monotonic() + 10
            while not all(state_of(number) in states for number in (process.pid, child)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
        assert ends(child)


def test_second_interrupt_ends_what_the_first_does_not(cli: Any) -> None:
    cli.monkeypatch.setattr(sys.modules[__name__], "SLOW", f"import ctypes; ctypes.CDLL(None).signal(2, 1); {SLOW}")
    with started(cli) as (process, child):
        process.send_signal(signal.SIGINT)
        time.sleep(1.3)
        assert is_there(child)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert ends(child)
        assert process.stderr is not None
        assert process.stderr.read() == b"muster: interrupted\n"


def test_child_that_is_ended_by_others_is_no_result(cli: Any) -> None:
    with started(cli) as (process, child):
        os.kill(child, signal.SIGKILL)
        assert process.wait(20) == 137
        assert process.stderr is not None
        assert process.stderr.read().decode().startswith(said_of("signal SIGKILL", "plugin slow was loading"))


# where there is no child

PROBE = """
import os, sys
{before}
sys.argv = ["muster", *sys.argv[1:]]
from kernel_muster.__main__ import main
code = main()
os.write(2, f"{{os.getpid()}} is {{code}}\\n".encode())
sys.exit(code)
"""


def probed(cli: Any, before: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", PROBE.format(before=before), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cli.folder, env={**os.environ, "PYTHONPATH": path}, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("here", ["sys.settrace(lambda *given: None)", "import signal; del signal.sigtimedwait"])
def test_command_under_a_debugger_or_on_another_system_runs_in_its_own_process(cli: Any, here: str) -> None:
    done = probed(cli, f"{here}; os.fork = None", "plugins")
    assert done.returncode == 0, done.stderr


def test_process_that_cannot_be_started_is_an_error(cli: Any) -> None:
    before = "def fork():\n    raise OSError(11, 'Resource temporarily unavailable')\nos.fork = fork"
    done = probed(cli, before, "plugins")
    assert done.returncode == 3
    wanted = "muster: error: the command needs a process of its own: Resource temporarily unavailable\n"
    assert done.stderr.startswith(wanted)


@pytest.mark.parametrize("when", ["import", "work"])
def test_interrupt_that_comes_right_behind_another_is_the_same(cli: Any, when: str) -> None:
    # As timeout(1) sends it: to the process, and then to its group.
    before = """import signal
write = sys.stderr.write
sys.stderr.write = lambda text: (write(text), signal.raise_signal(2))[0]
"""
    if when == "import":
        before += "import kernel_muster.cli.app as app; app.run = lambda *given: signal.raise_signal(2)"
    cli.install(IMPORT.format(body="import signal; signal.raise_signal(2)"), "interrupting")
    done = probed(cli, before, "plugins")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "muster: interrupted\n")


def test_interrupt_between_the_parsing_and_the_work_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(body: Any) -> int:
        raise KeyboardInterrupt

    assert run(["plugins"], interrupted) == 130
    assert capsys.readouterr().err == "muster: interrupted\n"


def test_signal_of_ended_children_that_is_ignored_leaves_the_verdict(cli: Any) -> None:
    done = probed(cli, "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "diff", "a", "b")
    assert done.returncode == 2, done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("audit", "--help"), ("audit", "--nope")])
def test_help_and_usage_errors_start_no_process(cli: Any, arguments: tuple[str, ...]) -> None:
    done = probed(cli, "os.fork = None", *arguments)
    assert done.returncode == (2 if "--nope" in arguments else 0), done.stderr


def test_device_that_is_stuck_does_not_hold_the_command(cli: Any) -> None:
    # A thread that is not awaited stands for a wait for the device at the end of the interpreter.
    after = (
        "import threading; from kernel_muster.registry.hardware.stuck import mark_stuck; "
        "mark_stuck(0, 'acme::double'); "
        "threading.Thread(target=threading.Event().wait).start(); return None"
    )
    cli.acme("acme::gone", after=after)
    done = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu")
    assert (done.returncode, done.stderr) == (1, "a builder that prints\n")
    assert done.stdout.startswith("REFUSED: ")
