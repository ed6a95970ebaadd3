"""Progress on stderr, for whoever sits at a terminal and for nobody else."""

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from kernel_muster.cli.progress import shown_progress


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
def test_progress_elsewhere_is_none(at_terminal: Any, stream: io.StringIO, term: str) -> None:
    at_terminal(stream, term)
    with shown_progress() as progress:
        assert progress is None


def test_progress_ends_its_bar_when_the_work_raises(at_terminal: Any) -> None:
    stderr = at_terminal()

    def work() -> None:
        with shown_progress() as progress:
            assert progress is not None
            progress(1, 3, "gemv.cu [not markup]")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert "\x1b[2K" in stderr.getvalue().rpartition("gemv.cu [not markup]")[2]
