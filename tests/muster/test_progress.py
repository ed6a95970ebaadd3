"""Progress on stderr: a bar at a terminal, elsewhere a line now and then."""

import io
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from kernel_muster.cli.process.progress import shown_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    """Return what makes stderr a terminal; in the test itself, for pytest sets stderr anew before that."""

    def at_terminal(stream: io.StringIO | None = None, term: str = "xterm-256color") -> io.StringIO:
        stream = Terminal() if stream is None else stream
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("COLUMNS", "120")
        return stream

    return at_terminal


def test_audit_at_a_terminal_shows_each_proof_and_takes_the_bar_away(audit: Any, cli: Any, at_terminal: Any) -> None:
    cli.acme("acme::double", "acme::twice")
    stderr = at_terminal()
    ran = audit("--stage", "proven")
    assert ran.code == 0, ran.out
    assert "2/2" in stderr.getvalue()
    assert "proof of acme::twice" in stderr.getvalue()
    assert "\x1b[2K" in stderr.getvalue().rpartition("proof of")[2]
    assert "proof of" not in ran.out


def test_audit_without_work_to_wait_for_shows_nothing(audit: Any, cli: Any, at_terminal: Any) -> None:
    cli.acme("acme::double")
    manifest, stderr = cli.manifest(), at_terminal()
    assert audit(manifest=manifest).code == 0
    assert "\x1b" not in stderr.getvalue()


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO(), "xterm"), (Terminal(), "dumb")], ids=["pipe", "dumb"])
def test_progress_elsewhere_is_a_line_about_work_that_gets_no_further(
    at_terminal: Any, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, term: str
) -> None:
    monkeypatch.setattr("kernel_muster.cli.process.progress._PATIENCE_S", 0.2)
    at_terminal(stream, term)
    with shown_progress() as progress:
        progress(1, 3, "proof of acme::double, case caf\u00e9")
        deadline = time.monotonic() + 30
        while stream.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    first, second = stream.getvalue().splitlines()[:2]
    assert re.fullmatch(
        r"muster: nothing new for \d+ s; 1 of 3 done; last: proof of acme::double, case caf\\xe9", first
    )
    assert second.startswith("muster: nothing new for ")
    said = stream.getvalue()
    time.sleep(0.5)
    assert stream.getvalue() == said


def test_progress_elsewhere_is_silent_once_all_is_done(at_terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel_muster.cli.process.progress._PATIENCE_S", 0.1)
    stderr = at_terminal(io.StringIO())
    with shown_progress() as progress:
        progress(3, 3, "gemv.cu")
        time.sleep(0.6)
    assert stderr.getvalue() == ""


def test_progress_elsewhere_of_work_that_goes_on_is_a_line_now_and_then(
    at_terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernel_muster.cli.process.progress._PATIENCE_S", 0.5)
    stderr = at_terminal(io.StringIO())
    began = time.monotonic()
    with shown_progress() as progress:
        progress(0, 99, "builds")
        assert stderr.getvalue() == ""
        for done in range(1, 13):
            progress(done, 99, f"build of {done}.cu")
            time.sleep(0.1)
        elapsed = time.monotonic() - began
        lines = stderr.getvalue().splitlines()
    assert 1 <= len(lines) <= elapsed / 0.5
    assert all(re.fullmatch(r"muster: (\d+) of 99 done; last: build of \1\.cu", line) for line in lines)


def test_progress_elsewhere_is_silent_where_work_is_short(at_terminal: Any) -> None:
    stderr = at_terminal(io.StringIO())
    with shown_progress() as progress:
        for done in range(9):
            progress(done, 9, "gemv.cu")
    assert stderr.getvalue() == ""


def test_progress_ends_its_bar_when_the_work_raises(at_terminal: Any) -> None:
    stderr = at_terminal()

    def work() -> None:
        with shown_progress() as progress:
            progress(1, 3, "gemv.cu [not markup]")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert "\x1b[2K" in stderr.getvalue().rpartition("gemv.cu [not markup]")[2]
