"""Reports as text, Markdown and on a terminal, from reports made by hand."""

import io
import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from kernel_muster.audit.render.json_report import render_json
from kernel_muster.audit.render.markdown import render_markdown
from kernel_muster.audit.render.plain import ascii_only, fold_layers, printable, size_text
from kernel_muster.audit.render.sections import (
    MOST_LINES,
    Section,
    Table,
    headline,
    lever_text,
    tone_of,
)
from kernel_muster.audit.render.terminal import print_report, print_sections
from kernel_muster.audit.render.text import render_text
from kernel_muster.audit.report import Counts, FindingRow, KernelRow, LayoutRow, LeverRow, Report, WaiverRow
from kernel_muster.registry.keys import parse_key
from kernel_muster.registry.messages.message import joined, message
from work import instructions


def finding(code: str = "MISSING", severity: Any = "refuse", **fields: Any) -> FindingRow:
    filled = {
        "allowed": False,
        "subject": "acme::gemm",
        "title": "no registered kernel serves a key that a layer asked for",
        "why": "no plugin registers acme::gemm",
        "where": ("model/attn.py:12 in Attn.__init__ (40x)",),
        "layers": tuple(f"layers.{n}.attn" for n in range(40)),
        "remedies": ("install it", "or gate the lookup"),
        "explains": (),
        "log": "",
    } | fields
    return FindingRow(code=code, severity=severity, **filled)


def kernel(**fields: Any) -> KernelRow:
    filled = {
        "key": "acme::norm",
        "chain": (),
        "kind": "required",
        "outcome": "found",
        "served_by": "acme::norm",
        "distribution": "acme",
        "version": "1.0",
        "tier": "fast",
        "backend": "python",
        "archs": ("cpu",),
        "contract": "norm",
        "stage": "loaded",
        "reason": "",
        "when": "",
        "sites": {"model/attn.py:10 in Attn.__init__": 2},
        "layers": ("layers.0.attn", "layers.1.attn"),
    } | fields
    return KernelRow(**filled)


def lever(name: str = "MUSTER_NO_X", **fields: Any) -> LeverRow:
    filled = {"value": False, "origin": "built-in", "effect": "", "evidence": "", "diagnostic": False} | fields
    return LeverRow(name=name, **filled)


def report(*findings: FindingRow, **fields: Any) -> Report:
    def count(severity: str) -> int:
        return sum(f.severity == severity and not f.allowed for f in findings)

    allowed = sum(f.allowed for f in findings)
    refusing = count("refuse")
    filled = {
        "muster_version": "0.1.0",
        "verdict": "refused" if refusing else "passed",
        "degraded": bool(allowed) and not refusing,
        "complete": True,
        "model": "tiny",
        "manifest": "m/MODEL.toml",
        "target": "cpu",
        "arch": "cpu",
        "device": "",
        "quant": "nvfp4",
        "profile": "serve",
        "stage_asked": "",
        "stage_reached": "loaded",
        "as_of": "2026-01-31",
        "set_hash": "ab" * 32,
        "counts": Counts(
            refusing=refusing,
            warnings=count("warn"),
            notes=count("note"),
            allowed=allowed,
            lookups=2,
            keys=1,
            waived=0,
        ),
    } | fields
    return Report(findings=findings, **filled)


def test_text_of_a_refused_report_reads_as_expected() -> None:
    text = render_text(report(finding(), kernels=(kernel(),), levers=(lever(),)))
    assert (
        text
        == """\
REFUSED: tiny on cpu: 1 finding to act on, 0 warnings, 0 notes

To act on: 1 MISSING
  1. MISSING acme::gemm
     what    no registered kernel serves a key that a layer asked for
     why     no plugin registers acme::gemm
     layers  layers.0..39 attn (40)
     where   model/attn.py:12 in Attn.__init__ (40x)
     remedy  install it
             or gate the lookup

Levers
  all at their built-in values

Kernels: 1 key in 2 lookups
  1 key served by acme 1.0 (tier fast, python)

Basis
  manifest: m/MODEL.toml
  quant: nvfp4
  profile: serve
  as of: 2026-01-31
  stage: loaded
  set hash: abababababababababababababababababababababababababababababababab
  kernel-muster: 0.1.0

REFUSED: tiny on cpu: 1 finding to act on, 0 warnings, 0 notes"""
    )


def test_text_lists_what_refuses_before_warnings_and_notes_and_numbers_on() -> None:
    text = render_text(report(finding("LATE_HIT", "note"), finding("STALE_WAIVER", "warn"), finding()))
    places = [text.index(part) for part in ("  1. MISSING", "  2. STALE_WAIVER", "  3. LATE_HIT")]
    assert places == sorted(places)


def test_text_says_once_what_a_code_means() -> None:
    text = render_text(report(finding(), finding(subject="acme::norm"), finding("STALE_WAIVER", "warn", title="stale")))
    assert text.count("what    no registered kernel serves a key") == 1
    assert text.count("what    stale") == 1


def test_headline_of_a_degraded_pass_says_so_and_names_the_keys() -> None:
    degraded = report(finding(allowed=True), finding(subject="acme::norm", allowed=True))
    assert headline(degraded) == (
        "PASSED, DEGRADED: tiny on cpu: absent and allowed by --dangerously-allow-unresolved: "
        "acme::gemm, acme::norm; 0 warnings, 0 notes"
    )
    first, *_, last = render_text(degraded).splitlines()
    assert first == last == headline(degraded)


def test_headline_of_a_pass_below_the_stage_asked_for_says_so() -> None:
    below = {"stage_asked": "proven", "stage_reached": "compiled", "below_stage_asked": True}
    short = report(finding("UNCHECKED", "warn"), target="sm_90a", arch="sm_90a", **below)
    first = "PASSED only at stage compiled, not proven: tiny on sm_90a: "
    assert headline(short).startswith(first)
    assert tone_of(short) == "warn"
    assert render_markdown(short).startswith("## " + first.replace("_", "\\_"))
    degraded = report(finding(allowed=True), **below)
    assert headline(degraded).startswith("PASSED, DEGRADED only at stage compiled, not proven: ")
    assert headline(report(finding(), **below)).startswith("REFUSED: ")


def test_headline_of_an_unfinished_build_never_says_passed() -> None:
    assert headline(report(verdict="incomplete", complete=False)).startswith(
        "INCOMPLETE: tiny on cpu: the model was not built"
    )


@pytest.mark.parametrize(
    ("rows", "found", "said"),
    [
        ([{"stage": "registered"}], [], "; nothing was compiled: install kernel-muster[nvrtc13,numba13]"),
        ([], [], "; no kernel serves, so that nothing was compiled"),
        ([{"served_by": "", "stage": "", "outcome": "absent"}], [], "; no kernel serves, so that nothing was compiled"),
        ([{"stage": "registered"}], [finding("COMPILE_FAILED")], ""),
        ([{"stage": "registered"}, {"stage": "compiled", "key": "acme::gemm"}], [], ""),
    ],
)
def test_basis_says_why_nothing_was_compiled(rows: Any, found: Any, said: str) -> None:
    kernels = tuple(kernel(**row) for row in rows)
    made = report(*found, target="sm_75", arch="sm_75", stage_asked="", stage_reached="registered", kernels=kernels)
    assert f"  stage: registered{said}\n" in render_text(made)


def test_headline_names_architecture_and_device() -> None:
    assert "on cuda:0 (sm_90a, NVIDIA H200):" in headline(report(target="cuda:0", arch="sm_90a", device="NVIDIA H200"))


@pytest.mark.parametrize("render", [render_text, render_markdown])
def test_renderers_give_printable_ascii_whatever_a_plugin_is_called(render: Any) -> None:
    text_of = {"subject": "\u00e9\x1b[31m\u202e", "why": "caf\u00e9\nPASSED: \x07", "log": "\udcff\ttab"}
    hostile = finding(where=("\u2028\nPASSED:",), remedies=("\nPASSED: ",), **text_of)
    text = render(report(hostile), verbose=True)
    assert text.isascii()
    assert all(character == "\n" or character.isprintable() for character in text)
    assert not any(line.startswith("PASSED") for line in text.splitlines())


def test_text_says_value_origin_and_effect_of_levers_that_are_set() -> None:
    rows = (lever(effect="kernel kept", origin="environment"), lever("MUSTER_B"), lever("MUSTER_C", value=None))
    assert lever_text(rows[0]) == "MUSTER_NO_X=0 (environment) -> kernel kept"
    text = render_text(report(levers=rows))
    assert "  MUSTER_NO_X=0 (environment) -> kernel kept\n" in text
    assert "MUSTER_B" not in text
    assert "  MUSTER_C unset\n" in render_text(report(levers=rows), verbose=True)


def test_text_marks_diagnostic_levers_that_are_set() -> None:
    row = lever(value="v2", origin="given", diagnostic=True)
    assert lever_text(row) == "MUSTER_NO_X=v2 (given) [diagnostic: not for serving]"


def test_text_says_once_which_thresholds_are_assumed() -> None:
    rows = tuple(lever(f"MUSTER_{name}", assumed=name != "C") for name in "ABC")
    said = "  assumed, not measured on {} with the kernels that serve: MUSTER_A, MUSTER_B\n"
    assert said.format("sm_90a") in render_text(report(levers=rows, target="sm_90a", arch="sm_90a"))
    on_device = report(levers=rows, target="cuda:0", arch="sm_90a", device="NVIDIA H100")
    assert said.format("NVIDIA H100") in render_text(on_device)
    assert "assumed" not in render_text(report(levers=rows[2:], target="sm_90a", arch="sm_90a"))


@pytest.mark.parametrize(
    ("keys", "is_named"),
    [
        (("acme::norm",), True),
        (("moe::*", "acme::norm"), False),
        (("acme::slow|moe::*", "acme::*"), True),
        (("acme::*", "acme::n*m"), True),
        (("moe::*",), False),
    ],
)
def test_text_names_thresholds_only_of_levers_that_concern_what_was_asked_for(
    keys: tuple[str, ...], is_named: bool
) -> None:
    row = lever(assumed=True, keys=keys)
    asked = kernel(chain=("acme::norm", "acme::slow"))
    text = render_text(report(levers=(row,), kernels=(asked,), target="sm_90a", arch="sm_90a"))
    assert ("that serve: MUSTER_NO_X" in text) is is_named


def test_text_gives_reasons_of_waivers_and_all_rows_on_verbose_only() -> None:
    waiver = WaiverRow(key="w4a4::gemm", reason="nobody ships it", where="MODEL.toml:9", until="2027-01-01")
    full = report(waivers=(waiver,), kernels=(kernel(chain=("acme::fast", "acme::norm"), outcome="fallback"),))
    short, long = render_text(full), render_text(full, verbose=True)
    assert "Waived: 1 absent kernel (reasons: --verbose)\n  w4a4::gemm\n" in short
    assert "nobody ships it" not in short
    assert "w4a4::gemm: nobody ships it (MODEL.toml:9, until 2027-01-01)" in long
    assert "KEY OR CHAIN" not in short
    assert "acme::fast > acme::norm  required  fallback  acme 1.0  fast  loaded  2" in long
    assert "acme::fast > acme::norm: acme::norm serves" in short


def test_text_cuts_long_logs_in_their_middle_and_says_where_the_rest_is() -> None:
    lines = [f"line {n}." for n in range(MOST_LINES + 5)]
    text = render_text(report(finding(log="\n".join(lines))))
    shown = [line for line in lines if line in text]
    assert shown == [*lines[: MOST_LINES // 2], *lines[-MOST_LINES // 2 :]]
    assert "... (5 lines between: --verbose, or --format json)" in text
    assert all(line in render_text(report(finding(log="\n".join(lines))), verbose=True) for line in lines)


def test_text_lists_consequences_under_their_cause() -> None:
    cause = finding("PLUGIN_LOAD_FAILED", explains=("MISSING acme::gemm: asked for at x.py:1",))
    assert "explains  MISSING acme::gemm: asked for at x.py:1" in render_text(report(cause))


def test_text_sums_copies_of_weights_by_layout() -> None:
    rows = [LayoutRow(weight=f"w{n}", layout="plain", size_bytes=1 << 30, reason="r", readers=()) for n in range(2)]
    text = render_text(report(layouts=tuple(rows)))
    assert "Copies of weights: 2.0 GiB\n  plain: 2 weights, 2.0 GiB" in text
    assert "built" not in text
    some = (rows[0], replace(rows[1], condition="if scales differ"))
    assert "\n  1 copy is built, 1.0 GiB, if scales differ\n" in render_text(report(layouts=some))


def absent(key: str, **fields: Any) -> FindingRow:
    why = message("decision.missing", key=parse_key(key), near=())
    func = key.partition("::")[2]
    remedies = (
        message("remedy.install", key=parse_key(key)),
        message("remedy.declare", manifest="MODEL.toml", module="acme", func=func),
    )
    where = (f"model/{func}.py:12",)
    return finding(**{"subject": key, "why": why, "remedies": remedies, "where": where} | fields)


def test_findings_of_one_code_cause_and_remedy_are_told_once_with_their_keys() -> None:
    made = report(*map(absent, ("acme::a", "acme::b", "acme::c")), absent("acme::d", why="switched off"))
    text = render_text(made)
    assert text.startswith("REFUSED: tiny on cpu: 4 findings to act on")
    assert "To act on: 4 MISSING\n  1. MISSING 3 keys\n" in text
    assert "     keys    acme::a\n             acme::b\n             acme::c\n     where   --verbose" in text
    assert "why     no plugin registers KEY\n" in text
    assert "install the distribution that provides KEY" in text
    assert '[expected_absent.MODULE] FUNC = "..."' in text
    assert "  2. MISSING acme::d\n" in text
    assert "model/a.py:12" not in text
    assert "acme::a (layers.0..39 attn (40))\n                 model/a.py:12\n" in render_text(made, verbose=True)
    assert [row["subject"] for row in json.loads(render_json(made))["findings"]] == [f"acme::{n}" for n in "abcd"]


def test_findings_that_are_few_or_have_another_way_out_are_not_folded() -> None:
    assert "keys" not in render_text(report(absent("acme::a"), absent("acme::b")))
    others = (absent(f"acme::{name}", remedies=(f"do {name}",)) for name in "abc")
    assert "  3. MISSING acme::c" in render_text(report(*others))


def test_findings_of_chains_of_any_length_fold_when_their_reasons_are_the_same() -> None:
    chains = [("acme::a", "acme::x"), ("acme::b", "acme::x", "acme::y"), ("acme::c", "acme::z")]
    rows = [
        absent(
            chain[0],
            why=joined(
                (
                    message("lookup.chain", chain=" > ".join(chain), outcome=message("lookup.no_member")),
                    *(message("lookup.reason", key=parse_key(key), reason="no") for key in chain),
                )
            ),
        )
        for chain in chains
    ]
    assert rows[0].why == "chain acme::a > acme::x: no member resolves; acme::a: no; acme::x: no"
    assert "why     chain: no member resolves; no\n" in render_text(report(*rows))


def test_text_tells_what_many_keys_share_once_with_the_keys() -> None:
    explains = (
        *(message("consequence.no_code", key=parse_key(f"acme::k{i}")) for i in range(69)),
        "MISSING acme::gone: asked for at x.py:1",
    )
    text = render_text(report(finding("TOOLCHAIN_MISSING", subject="toolchain", explains=explains)))
    assert "explains  KEY has no code, for 69 keys:\n" in text
    assert text.count("has no code") == 1
    assert all(f"acme::k{i}" in text for i in range(69))
    assert "MISSING acme::gone: asked for at x.py:1" in text
    few = render_text(report(finding("TOOLCHAIN_MISSING", explains=explains[:2])))
    assert "acme::k0 has no code" in few


def test_paths_on_a_narrow_terminal_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    path = f"/home/acme/{'models/' * 9}MODEL.toml"
    print_sections([Section("Basis", lines=(f"manifest: {path}", "words " * 20))], stream)
    first, *others = stream.getvalue().splitlines()[1:]
    assert first == f"  manifest: {path}"
    assert len(others) > 1
    assert max(map(len, others)) <= 40


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_tables_on_a_terminal_break_no_word(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    words = ("a_key_of_many_letters::that_is_not_cut", "reference", "a reason of several words " * 3, "sm_90a sm_100a")
    stream = io.StringIO()
    print_sections([Section("T", table=Table(("KEY", "TIER", "REASON", "ARCHS"), (words,) * 2))], stream)
    printed = stream.getvalue().split()
    for word in {word for cell in words for word in cell.split()}:
        assert printed.count(word) >= 2
    assert max(map(len, stream.getvalue().splitlines())) <= max(columns, 44)


@pytest.mark.parametrize(
    ("labels", "folded"),
    [
        ((), ""),
        (("lm_head",), "lm_head"),
        (("layers.3.attn",), "layers.3.attn".replace(".attn", " attn")),
        (("layers.3.attn", "layers.7.attn"), "layers.3,7 attn"),
        (tuple(f"layers.{n}.attn" for n in (9, 3, 7, 1)), "layers.1..9 attn (4)"),
        (("layers.0", "layers.1", "mtp.0.ffn.up"), "layers.0..1 (2), mtp.0 ffn.up"),
        (("layers.0.attn", "layers.0.attn"), "layers.0 attn"),
    ],
)
def test_fold_layers_keeps_the_count_and_loses_no_label(labels: tuple[str, ...], folded: str) -> None:
    assert fold_layers(labels) == folded


def test_many_sites_do_not_hide_the_remedy() -> None:
    made = report(finding(where=tuple(f"model/attn.py:{line}" for line in range(60))))
    lines = render_text(made).splitlines()
    at = next(at for at, line in enumerate(lines) if line.lstrip().startswith("remedy"))
    assert 0 < at < 18
    assert "--verbose" in lines[at - 1]
    assert "model/attn.py:59" not in "\n".join(lines)
    assert "model/attn.py:59" in render_text(made, verbose=True)


def test_plain_helpers_escape_and_keep_line_ends() -> None:
    assert ascii_only("a\n\u00e9\t") == "a\n\\xe9\\t"
    assert printable("\u00e9\x1b") == "\u00e9\\x1b"
    assert [size_text(n) for n in (512, 2048, 3 << 30)] == ["512 B", "2.0 KiB", "3.0 GiB"]


def test_markdown_takes_names_literally() -> None:
    text = render_markdown(report(finding(subject="a`b", why="<script> *x* [y](z) | __init__", log="```\nend")))
    assert "1. **MISSING** `a'b`" in text
    assert "\\<script\\> \\*x\\* \\[y\\](z) \\| \\_\\_init\\_\\_" in text
    assert "````text\n      ```\n      end\n      ````" in text
    assert text.startswith("## REFUSED: tiny on cpu")


def test_markdown_draws_tables_on_verbose() -> None:
    text = render_markdown(report(kernels=(kernel(when="a|b", reached_by="arm: one"),)), verbose=True)
    assert "| acme::norm | required | found | acme 1.0 | fast | loaded | 2 |" in text
    assert "| LAYERS | REACHED BY | WHEN |" in text
    assert "| arm: one | a\\|b |" in text


def terminal(made: Report, **options: Any) -> str:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    print_report(made, stream, **options)
    return stream.getvalue()


def test_terminal_shows_the_same_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = terminal(report(finding(why="[bold]not markup[/]"), kernels=(kernel(),)), verbose=True)
    assert "\x1b[" in text
    for part in ("MISSING", "acme::gemm", "[bold]not markup[/]", "layers.0..39 attn (40)", "acme::norm"):
        assert part in text


def test_terminal_obeys_nothing_that_a_plugin_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = terminal(report(finding(subject="\x1b]0;title\x07", why="caf\u00e9")))
    assert "\x1b]0" not in text
    assert "\\x1b]0;title\\x07" in text
    assert "caf\u00e9" in text


def test_renderers_agree_on_the_first_line() -> None:
    made = replace(report(finding()), model="m_1")
    assert render_text(made).splitlines()[0] == headline(made)
    assert render_markdown(made).splitlines()[0] == "## " + headline(made).replace("_", "\\_")


def waived(key: str) -> WaiverRow:
    return WaiverRow(key=key, reason="nobody ships it", where="MODEL.toml:9", until="")


def test_thousands_of_findings_are_all_on_a_terminal_and_cost_little_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def made(count: int) -> Report:
        rows = [finding("PLUGIN_LOAD_FAILED", subject=f"plugin_{n:04}", remedies=()) for n in range(count)]
        return report(*rows, waivers=tuple(waived(f"acme::k{n:04}") for n in range(count)))

    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal(made(1000)))
    assert re.findall(r"^ *\d+\. PLUGIN_LOAD_FAILED (\S+)$", text, re.MULTILINE) == [
        f"plugin_{n:04}" for n in range(1000)
    ]
    assert re.findall(r"^  (acme::k\d+) *$", text, re.MULTILINE) == [f"acme::k{n:04}" for n in range(1000)]
    work = [instructions(partial(print_report, made(count), io.StringIO())) for count in (1000, 2000)]
    assert work[1] - work[0] < 1000 * 3000


def test_table_of_thousands_of_rows_is_whole_on_a_terminal_and_costs_little_each() -> None:
    def drawn(count: int) -> Report:
        return report(kernels=tuple(kernel(key=f"acme::k{n:04}") for n in range(count)))

    text = terminal(drawn(1000), verbose=True)
    assert re.findall(r"^acme::k(\d+) +required  found", text, re.MULTILINE) == [f"{n:04}" for n in range(1000)]
    work = [instructions(partial(print_report, drawn(count), io.StringIO(), verbose=True)) for count in (500, 1000)]
    assert work[1] - work[0] < 500 * 6000
