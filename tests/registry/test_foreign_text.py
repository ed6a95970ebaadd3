"""Text of others on its way to each kind of output."""

import logging
import pickle

import pytest
from kernel_muster.audit import session
from kernel_muster.registry import errors
from kernel_muster.registry.foreign_text import code_span, written
from kernel_muster.registry.logs import logger

HOSTILE = "a\x1b[2Jb\nc\rd\u202ee\u200bf\u2028g\udc80h\x9bi\x00j\x85k\ufeff"
ESCAPED = r"a\x1b[2Jb\nc\rd\u202ee\u200bf\u2028g\udc80h\x9bi\x00j\x85k\ufeff"


@pytest.mark.parametrize("medium", ["terminal", "plain", "log"])
def test_nothing_of_it_is_obeyed_and_all_is_on_one_line(medium):
    assert written(HOSTILE, medium) == ESCAPED


def test_exceptions_keep_line_breaks_alone():
    assert written(HOSTILE, "exception") == ESCAPED.replace(r"b\nc", "b\nc")


def test_letters_of_any_script_stay_on_a_terminal_alone():
    text = "caf\u00e9 \u6838 \u05d0"
    assert written(text, "terminal") == text
    assert written(text, "plain") == r"caf\xe9 \u6838 \u05d0"


@pytest.mark.parametrize("unseen", ["\u3164", "\u115f", "\u2800", "\ufe0f", "\u034f", "\u20dd", "\xad", "\U000e0041"])
def test_what_cannot_be_seen_is_escaped_on_a_terminal_too(unseen):
    assert written(unseen, "terminal").startswith("\\")


def test_long_text_is_cut_in_its_middle():
    text = written("a" * 5000 + "b" * 1_000_000, "log")
    assert len(text) <= 10_000
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "characters)..." in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ask @octocat now", "ask `@octocat` now"),
        ("see #1 and GH-7", "see `#1` and `GH-7`"),
        ("owner/name#12", "`owner/name#12`"),
        ("at https://evil.example/x_y, or www.evil.example", "at `https://evil.example/x_y,` or `www.evil.example`"),
        ("mail a@b.example", "mail `a@b.example`"),
        ("commit a5c3785ed8d6a35868bc169f07e40e889087fd2e", "commit `a5c3785ed8d6a35868bc169f07e40e889087fd2e`"),
        ("a `@x` b", "a `'@x'` b"),
        ("# title", r"\# title"),
        ("- item", r"\- item"),
        ("1. item", r"1\. item"),
        ("~~~", r"\~\~\~"),
        ("&lt; $x$ <b> *a* _b_", r"\&lt; \$x\$ \<b\> \*a\* \_b\_"),
        ("norm::rms_norm: it missed", r"norm::rms\_norm: it missed"),
        ("a\n# b", r"a\\n# b"),
    ],
)
def test_markdown_makes_nothing_of_it(text, shown):
    assert written(text, "markdown") == shown


def test_code_span_cannot_be_left():
    assert code_span("a`b\nc") == r"`a'b\nc`"


def test_log_lines_and_their_fields_hold_nothing_that_is_obeyed(caplog):
    with caplog.at_level(logging.WARNING, logger="kernel_muster"):
        logger().warning(f"LATE_MISS: {HOSTILE}", key=HOSTILE, count=3)
    (record,) = caplog.records
    assert (record.getMessage(), record.key, record.count) == (f"LATE_MISS: {ESCAPED}", ESCAPED, 3)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MusterError)]


@pytest.mark.parametrize("kind", KINDS)
def test_exception_texts_hold_nothing_that_is_obeyed_and_travel_as_they_are(kind):
    made = kind(HOSTILE, None) if kind is errors.BootRefused else kind(HOSTILE)
    assert str(made).replace("\n", r"\n") == ESCAPED
    copy = pickle.loads(pickle.dumps(made))  # noqa: S301  (our own)
    assert (str(copy), copy.args) == (str(made), made.args)


@pytest.mark.parametrize("kind", ["NullKernelError", "KernelMissing", "LateKernelMiss", "LateRegistration"])
def test_exceptions_about_one_lookup_are_one_line(kind):
    assert str(getattr(errors, kind)(HOSTILE)) == ESCAPED


def test_abort_of_a_late_miss_writes_one_line(monkeypatch, capsys):
    monkeypatch.setattr(session.os, "abort", lambda: None)
    session.abort_process(HOSTILE)
    assert capsys.readouterr().err == f"kernel-muster: LATE_MISS: {ESCAPED}\n"
