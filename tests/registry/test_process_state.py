"""Changes of the process by a loading plugin are undone, and give a finding that names them."""

import locale
import os
import sys
import threading

import pytest
from kernel_muster.registry.discovery.loading import load_plugin
from kernel_muster.registry.plugin_code.process_state import process_state, put_back

CHANGES = {
    "the working directory to /": lambda: os.chdir("/"),
    "the umask from 022 to 000": lambda: os.umask(0),
    "the recursion limit from ": lambda: sys.setrecursionlimit(200),
    "sys.stdout": lambda: setattr(sys, "stdout", None),
    "sys.stderr": lambda: setattr(sys, "stderr", sys.stdout),
    "sys.excepthook": lambda: setattr(sys, "excepthook", lambda *given: os._exit(0)),
    "sys.exit": lambda: setattr(sys, "exit", lambda *given: None),
    "os._exit": lambda: setattr(os, "_exit", lambda *given: None),
    "os.environ": lambda: setattr(os, "environ", {}),
    "the environment variable CUDA_VISIBLE_DEVICES": lambda: os.environ.update(CUDA_VISIBLE_DEVICES="1"),
    "the environment variable HOME": lambda: os.environ.pop("HOME"),
    "the environment variable MUSTER_DISABLE": lambda: os.environ.update(MUSTER_DISABLE="norm::rms_norm"),
    "the locale to ": lambda: locale.setlocale(locale.LC_ALL, "C"),
}


@pytest.fixture(autouse=True)
def known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = os.umask(0o022)
    text = locale.setlocale(locale.LC_ALL, "C.UTF-8")
    yield
    os.umask(before)
    locale.setlocale(locale.LC_ALL, text)


def load(action):
    return load_plugin("acme", "here", action, 10)


@pytest.mark.parametrize("what", CHANGES)
def test_change_is_put_back_and_reported(what, monkeypatch):
    # Threads left by earlier tests would prevent the restoration of streams and functions.
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    before = process_state()
    loaded = load(CHANGES[what])
    assert process_state() == before
    (finding,) = [one for one in loaded.findings if one.code == "PROCESS_CHANGED"]
    assert finding.subject == "acme"
    assert f"while it loaded it changed {what}" in finding.why
    assert "leave acme out" in finding.remedies[1] or "--no-plugin acme" in finding.remedies[1]


@pytest.mark.parametrize(
    "action",
    [
        lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
        lambda: os.environ.update(ACME_CACHE="1"),
        lambda: sys.path.append("/nowhere"),
    ],
)
def test_what_libraries_do_is_no_finding(action, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("ACME_CACHE", "0")
    limit = sys.getrecursionlimit()
    try:
        assert "PROCESS_CHANGED" not in [one.code for one in load(action).findings]
    finally:
        sys.setrecursionlimit(limit)


def test_stream_that_a_thread_of_the_program_redirects_meanwhile_is_left_alone(monkeypatch):
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        before = process_state()
        monkeypatch.setattr(sys, "stdout", sys.stderr)
        assert put_back(before) == []
        assert sys.stdout is sys.stderr
    finally:
        is_over.set()
        thread.join()


def test_folder_that_is_gone_is_told(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = process_state()
    os.chdir("/")
    (tmp_path / "here").rmdir()
    assert put_back(before) == ["the working directory to /"]
