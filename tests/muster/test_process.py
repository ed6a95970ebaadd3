"""The command as a process: exit codes, streams, signals, terminals and files."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from kernel_muster import __version__
from kernel_muster.cli.process import exits, output
from kernel_muster.registry.errors import DeviceStuck, UsageError


def test_version_is_printed_without_importing_the_command(cli: Any) -> None:
    probe = (
        "import sys; sys.argv = ['muster', '--version']\n"
        "from kernel_muster.__main__ import main\n"
        "code = main()\n"
        "assert not {'typer', 'numpy', 'pydantic', 'structlog'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=cli.folder)
    assert done.stdout == f"kernel-muster {__version__}\n"
    assert cli("--version").out == done.stdout


def test_help_is_plain_ascii_and_needs_no_numpy(cli: Any) -> None:
    probe = (
        "import sys\nfrom kernel_muster.cli.app import run\n"
        "assert run(['audit', '--help']) == 0\n"
        "assert not {'numpy', 'structlog', 'rich.console'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=cli.folder, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "--dangerously-allow-unresolved" in done.stdout


def test_audit_imports_no_package_that_a_plain_report_does_not_need(cli: Any) -> None:
    probe = (
        "import sys\nfrom kernel_muster.cli.app import run\n"
        "assert run(['audit', 'qwen3.6-27b', '--target', 'cpu']) == 0\n"
        "assert not {'structlog', 'rich.console', 'jsonschema', 'numpy.random'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=cli.folder, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("audit", "qwen3.6-27b", "--target", "cpu"), 0), (("audit", "nobody", "--target", "cpu"), 1), (("audit",), 2)],
)
def test_exit_codes_of_the_process(cli: Any, arguments: tuple[str, ...], code: int) -> None:
    done = cli.process(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout.isascii()
    assert "Traceback" not in done.stderr


def test_no_arguments_and_unknown_commands_are_usage_errors(cli: Any) -> None:
    assert cli().code == 2
    assert cli("frobnicate").code == 2


def test_reader_that_goes_away_leaves_the_verdict_and_no_noise(cli: Any) -> None:
    cli.acme("acme::double")
    command = [sys.executable, "-m", "kernel_muster", "kernels", "--verbose"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cli.folder)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    noise = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), noise) == (0, b"")


@pytest.mark.parametrize(
    "text", [b"[kernel_muster.v1]\nacme\n", b"[kernel_muster.v1]\nacm\xe9 = acme\n", b"[other]\nx\n"]
)
def test_distribution_with_malformed_entry_points_breaks_nothing_but_itself(cli: Any, text: bytes) -> None:
    cli.acme("acme::double")
    info = cli.folder / "site" / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(text)
    cli.monkeypatch.syspath_prepend(str(info.parent))
    ran = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu")
    is_ours = b"muster" in text
    assert (ran.returncode, "bug in kernel-muster" in ran.stderr) == (int(is_ours), False), ran.stderr
    assert ("PLUGIN_LOAD_FAILED broken-1.0.dist-info" in ran.stdout) == is_ours


@pytest.mark.parametrize(("arguments", "what"), [
    (("manifest", "schema"), "stdout"), (("--version",), "stdout"), (("--help",), "help and usage errors"),
    (("plugins", "--help"), "help and usage errors"),
])  # fmt: skip
def test_full_disk_is_no_success(cli: Any, arguments: tuple[str, ...], what: str) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("w") as stream:
        command = [sys.executable, "-m", "kernel_muster", *arguments]
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, cwd=cli.folder, check=False)
    assert done.returncode == 2
    assert done.stderr == f"muster: error: {what} cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [("plugins", "--nope"), ("models", "a", "b"), ("diff",), ("nope",)])
def test_usage_error_that_cannot_be_written_is_one_all_the_same(cli: Any, arguments: tuple[str, ...]) -> None:
    if not (full := Path("/dev/full")).exists():
        pytest.skip("this system has no /dev/full")
    with full.open("w") as stream:
        command = [sys.executable, "-m", "kernel_muster", *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stream, text=True, cwd=cli.folder, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_terminal_gets_colour_and_a_pipe_does_not(cli: Any) -> None:
    cli.acme("acme::double")
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "kernel_muster", "audit", "nobody", "--target", "cpu"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=child, stderr=subprocess.PIPE, cwd=cli.folder, env=environment) as process:
        os.close(child)
        text = _read_all(parent)
        assert process.wait(60) == 1
    assert "\x1b[1;31mREFUSED" in text
    assert "UNKNOWN_MODEL" in text
    assert "\x1b" not in cli.process("audit", "nobody", "--target", "cpu").stdout


def test_text_fits_the_terminal_that_it_goes_to_where_no_other_stream_is_one(cli: Any) -> None:
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (50, 60))
    command = [sys.executable, "-m", "kernel_muster", "audit", "nobody", "--target", "cpu"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    others = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, stdout=child, cwd=cli.folder, env={**environment, "TERM": "xterm"}, **others) as run:
        os.close(child)
        text = re.sub(r"\x1b\[[\d;]*m", "", _read_all(parent))
        assert run.wait(60) == 1
    assert 40 < max(map(len, text.splitlines())) <= 60


def test_terminal_that_lacks_a_letter_gets_it_escaped(cli: Any) -> None:
    cli.install("raise RuntimeError('caf\\u00e9')\n", "broken")
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "kernel_muster", "plugins"]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "ascii", "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=child, stderr=subprocess.PIPE, cwd=cli.folder, env=environment) as process:
        os.close(child)
        text = _read_all(parent)
        assert process.wait(60) == 1
    assert "caf\\xe9" in text


def _read_all(parent: int) -> str:
    parts = []
    try:
        while part := os.read(parent, 65536):
            parts.append(part)
    except OSError:  # a closed terminal reads as an error on Linux
        pass
    finally:
        os.close(parent)
    return b"".join(parts).decode()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(("arguments", "code"), [(("plugins",), 0), (("audit", "acme", "--as-of", "soon"), 2)])
def test_closed_streams_leave_the_exit_code_as_it_is(
    cli: Any, closed: str, arguments: tuple[str, ...], code: int
) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    line = f'exec "$0" -m kernel_muster "$@" {closed}'
    done = subprocess.run(
        ["/bin/sh", "-c", line, sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
        cwd=cli.folder,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "internal error" not in done.stderr


def test_ascii_locale_changes_nothing(cli: Any) -> None:
    cli.install("raise RuntimeError('caf\\u00e9')\n", "broken")
    done = cli.process("plugins", env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert done.returncode == 1
    assert "caf\\xe9" in done.stdout
    data = cli.process("plugins", "--format", "json", env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert "caf\u00e9" in json.loads(data.stdout)["findings"][0]["log"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("no"), 2, "muster: error: no\n"),
        (DeviceStuck("cuda:0 still runs x"), 1, "muster: error: cuda:0 still runs x\n"),
        (KeyboardInterrupt(), 130, "muster: interrupted\n"),
        (SystemExit(0), 3, "muster: internal error: SystemExit: 0"),
        (ZeroDivisionError("x\ny"), 3, "muster: internal error: ZeroDivisionError: x y (at "),
    ],
)
def test_guarded_turns_everything_into_an_exit_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert exits.guarded(fail) == code
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert "Traceback" not in err
    assert ("CONTRIBUTING.md" in err) is (code == 3)


def test_guarded_shows_a_traceback_when_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ZeroDivisionError("x")

    assert exits.guarded(fail, is_verbose=True) == 3
    assert "Traceback" in capsys.readouterr().err


def test_written_file_is_whole_or_untouched(tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    file.write_text("before\n")
    with pytest.raises(UnicodeEncodeError):
        output.write_file(file, "\udcff")
    assert file.read_text() == "before\n"
    output.write_file(file, "after")
    assert file.read_text() == "after\n"
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


def test_link_stays_a_link_and_a_file_keeps_who_may_read_it(tmp_path: Path) -> None:
    file, link = tmp_path / "report.json", tmp_path / "latest.json"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file.name)
    output.check_writable(link)
    output.write_file(link, "after")
    assert (link.is_symlink(), file.read_text(), file.stat().st_mode & 0o777) == (True, "after\n", 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "report.json"]
    dangling = tmp_path / "new.json"
    dangling.symlink_to("made.json")
    output.write_file(dangling, "new")
    assert (tmp_path / "made.json").read_text() == "new\n"


def test_device_is_written_to_and_not_replaced() -> None:
    output.check_writable(Path("/dev/null"))
    output.write_file(Path("/dev/null"), "x")
    assert not Path("/dev/null").is_file()


def test_unwritable_paths_are_usage_errors(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "file", Path("/proc/none/file")):
        with pytest.raises(UsageError, match="cannot be written"):
            output.check_writable(path)
        with pytest.raises(UsageError, match="cannot be written"):
            output.write_file(path, "x")


WRITES = (
    "import ctypes, os, sys; os.write(1, b'one '); print('two ', file=sys.__stdout__); ctypes.CDLL(None).puts(b'three')"
)
CLOSED = ("pass", "sys.stdout.close(); sys.stderr.close()", "sys.__stdout__.close(); sys.__stderr__.close()")


@pytest.mark.parametrize("closed", CLOSED)
def test_what_is_written_past_python_does_not_mix_with_the_result(cli: Any, closed: str) -> None:
    after = f"{WRITES}; os.system('echo four'); {closed}"
    cli.acme("acme::double", after=f"{after}; return None")
    done = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "passed"
    for word in ("one", "two", "three", "four"):
        assert word in done.stderr


@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_leave_the_verdict_where_others_write(cli: Any, redirect: str) -> None:
    cli.acme("acme::double", after=f"{WRITES}; return None")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    options = f"--manifest {cli.manifest()} --target cpu --format json"
    command = f"{sys.executable} -m kernel_muster audit {options} {redirect}"
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
        cwd=cli.folder, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if not redirect.startswith((">", "<")):
        assert json.loads(done.stdout)["verdict"] == "passed"


def test_stdout_that_was_lent_to_others_is_back_though_their_code_raised(capfd: Any) -> None:
    def fails() -> None:
        with output.only_results_on_stdout(), output.only_results_on_stdout():
            os.write(1, b"theirs\n")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    os.write(1, b"ours\n")
    assert capfd.readouterr() == ("ours\n", "theirs\n")


@pytest.mark.parametrize("exit", ["lambda *given: None", "None", "os._exit"])
def test_exit_that_a_plugin_replaced_leaves_the_exit_code(cli: Any, exit: str) -> None:
    cli.acme("acme::gone", after=f"import os, sys; sys.exit = {exit}; return None")
    done = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu")
    assert (done.returncode, done.stderr) == (1, "a builder that prints\n")
    assert done.stdout.startswith("REFUSED: ")
