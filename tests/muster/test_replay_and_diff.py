"""``muster replay`` and ``muster diff``."""

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def trace(cli: Any) -> Path:
    """A trace of another engine: one kernel there, one missing."""
    document = {
        "version": "1.0",
        "target": {"arch": "sm_121a", "quant": "nvfp4"},
        "model": "tiny",
        "kernels": [{"module": "acme", "func": "double"}],
        "lookups": [
            {"module": "acme", "func": "double", "site": "attn.rs:10", "kind": "required", "layer": "layers.0.attn"},
            {"module": "acme", "func": "gone", "site": "attn.rs:11", "kind": "optional", "layer": "layers.0.attn"},
        ],
    }
    file: Path = cli.folder / "trace.json"
    file.write_text(json.dumps(document))
    return file


def test_replay_judges_the_trace_of_any_engine(cli: Any, trace: Path) -> None:
    ran = cli("replay", trace, "--manifest", cli.manifest())
    assert ran.code == 1
    assert ran.out.startswith("REFUSED: tiny on sm_121a: 1 finding to act on")
    assert "MISSING acme::gone" in ran.out
    assert "attn.rs:11" in ran.out
    waived = cli.manifest('[expected_absent.acme]\ngone = "the engine falls back to double on purpose"')
    assert cli("replay", trace, "--manifest", waived).code == 0


def test_replay_takes_the_options_of_audit(cli: Any, trace: Path) -> None:
    manifest = cli.manifest()
    allowed = ("--dangerously-allow-unresolved", "acme::gone")
    ran = cli("replay", trace, "--manifest", manifest, *allowed, "--format", "json")
    assert (ran.code, ran.json["degraded"]) == (0, True)
    assert cli("replay", trace, "--manifest", manifest, *allowed, "--profile", "qualify").code == 2
    proven = cli("replay", trace, "--manifest", manifest, *allowed, "--stage", "proven")
    assert proven.out.startswith("PASSED, DEGRADED only at stage registered, not proven: tiny on sm_121a: ")
    assert "UNCHECKED proven" in proven.out
    assert "UNCHECKED" not in cli("replay", trace, "--manifest", manifest).out
    assert cli("replay", trace, "--manifest", manifest, "--as-of", "2020-01-01", "--format", "json").json["as_of"] == (
        "2020-01-01"
    )


def test_replay_of_a_boot_that_was_cut_short_does_not_pass(cli: Any, trace: Path) -> None:
    document = json.loads(trace.read_text())
    trace.write_text(json.dumps(document | {"lookups": document["lookups"][:1], "complete": False}))
    ran = cli("replay", trace, "--manifest", cli.manifest())
    assert ran.out.startswith("INCOMPLETE: tiny on sm_121a")
    assert ran.code == 3
    as_json = cli("replay", trace, "--manifest", cli.manifest(), "--format", "json")
    assert (as_json.code, as_json.json["verdict"], as_json.json["complete"]) == (3, "incomplete", False)


def test_replay_of_a_boot_that_was_cut_short_after_a_miss_is_refused(cli: Any, trace: Path) -> None:
    document = json.loads(trace.read_text())
    trace.write_text(json.dumps(document | {"complete": False}))
    ran = cli("replay", trace, "--manifest", cli.manifest(), "--format", "json")
    assert (ran.code, ran.json["verdict"]) == (1, "refused")


def test_replay_without_a_model_does_not_look_into_the_current_folder(
    cli: Any, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cli.folder / "config.json").write_text('{"model_type": "qwen3_6_moe", "hidden_size": 2048}')
    monkeypatch.chdir(cli.folder)
    document = json.loads(trace.read_text())
    trace.write_text(json.dumps({name: value for name, value in document.items() if name != "model"}))
    ran = cli("replay", trace)
    assert ran.code == 1
    assert "UNKNOWN_MODEL" in ran.out


def test_replay_stage_that_did_not_run_warns_when_serving_and_refuses_when_qualifying(cli: Any, trace: Path) -> None:
    document = json.loads(trace.read_text())
    trace.write_text(json.dumps(document | {"lookups": document["lookups"][:1]}))
    options = ("--manifest", cli.manifest(), "--stage", "proven")
    assert cli("replay", trace, *options).code == 0
    ran = cli("replay", trace, *options, "--profile", "qualify")
    assert ran.code == 1
    assert "UNCHECKED proven" in ran.out


def test_replay_on_another_target_than_the_traces_is_a_usage_error(cli: Any, trace: Path) -> None:
    ran = cli("replay", trace, "--manifest", cli.manifest(), "--target", "sm_90a")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "muster: error: --target is sm_90a, but the trace was made on sm_121a\n"
    assert cli("replay", trace, "--manifest", cli.manifest(), "--target", "sm_121a").code == 1


def test_replay_finds_manifests_by_the_traces_model(cli: Any, trace: Path) -> None:
    assert "UNKNOWN_MODEL" in cli("replay", trace).out
    folder = cli.manifest().parent.parent
    assert "MISSING acme::gone" in cli("replay", trace, "--manifests", folder).out
    assert cli("replay", trace, "--manifests", folder, "--manifest", cli.manifest()).code == 2


def test_replay_against_the_manifest_of_another_model_is_a_usage_error(cli: Any, trace: Path) -> None:
    other = cli.manifest(name="huge")
    ran = cli("replay", trace, "--manifest", other)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"muster: error: the trace is of 'tiny', but {other} describes 'huge'\n"
    named_by_id = cli.manifest('hf_id = "tiny"', name="huge")
    document = json.loads(trace.read_text())
    assert cli("replay", trace, "--manifest", named_by_id).code == 1
    trace.write_text(json.dumps(document | {"model": ""}))
    assert cli("replay", trace, "--manifest", other).code == 1


def test_replay_ignores_the_environments_levers(cli: Any, trace: Path) -> None:
    cli.monkeypatch.setenv("MUSTER_NO_SUCH", "1")
    cli.monkeypatch.setenv("MUSTER_DISABLE", "acme::double")
    out = cli("replay", trace, "--manifest", cli.manifest()).out
    assert "UNKNOWN_LEVER" not in out
    assert "DISABLED" not in out


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"version": "2.0"}', b'{"version": "1.0"}', b"{" * 9999])
def test_replay_of_what_is_no_trace_exits_2(cli: Any, content: bytes) -> None:
    file = cli.folder / "bad.json"
    file.write_bytes(content)
    ran = cli("replay", file)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("muster: error: ")
    assert str(file) in ran.err
    assert cli("replay", cli.folder / "none.json").code == 2


def test_replay_logs_one_event(cli: Any, trace: Path) -> None:
    ran = cli("replay", trace, "--manifest", cli.manifest(), "--verbose")
    assert json.loads(ran.err)["event"] == "audit.finished"


def test_diff_of_two_reports(cli: Any, audit: Any) -> None:
    cli.acme("acme::double", "acme::twice")
    manifest, one, other = cli.manifest(), cli.folder / "a.json", cli.folder / "b.json"
    audit("--format", "json", "--output", one, "--as-of", "2026-01-01", manifest=manifest)
    audit("--format", "json", "--output", other, "--as-of", "2026-02-02", manifest=manifest)
    same = cli("diff", one, other)
    assert (same.code, same.out) == (0, "EQUAL: the reports say the same\n")
    cli.monkeypatch.setenv("MUSTER_DISABLE", "acme::twice")
    audit("--format", "json", "--output", other, manifest=manifest)
    ran = cli("diff", one, other)
    assert ran.code == 1
    assert "  ~ verdict: passed -> refused\n" in ran.out
    assert "  + DISABLED acme::twice: severity refuse" in ran.out
    assert "  ~ acme::twice: outcome found -> absent; served by acme::twice -> (none)" in ran.out
    assert "  ~ MUSTER_DISABLE: value (none) -> acme::twice; origin built-in -> environment" in ran.out
    data = cli("diff", one, other, "--format", "json")
    assert (data.code, data.json["equal"]) == (1, False)
    assert {part["title"] for part in data.json["parts"]} == {"verdict", "findings", "kernels", "levers"}
    file = cli.folder / "diff.txt"
    assert cli("diff", one, other, "--output", file).code == 1
    assert file.read_text() == ran.out


def test_diff_of_what_is_no_report_exits_2(cli: Any, trace: Path) -> None:
    ran = cli("diff", trace, trace)
    assert (ran.code, ran.out) == (2, "")
    assert 'is no report: expected "schema": "kernel-muster/report"' in ran.err
    assert cli("diff", trace).code == 2
    assert cli("diff", trace, cli.folder / "none.json").code == 2
