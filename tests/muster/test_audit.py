"""``muster audit``: verdicts, exit codes, options and formats."""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kernel_muster.cli.options import ProfileName, QuantName, StageName
from kernel_muster.MODEL_toml import QUANTS
from kernel_muster.registry.contract.specs import STAGES
from kernel_muster.registry.findings import PROFILES


def test_audit_that_finds_every_kernel_passes(cli: Any, audit: Any) -> None:
    cli.acme("acme::double", "acme::twice")
    ran = audit()
    assert ran.code == 0
    assert ran.out.startswith("PASSED: tiny on cpu: 2 kernels asked for, 0 waived; 0 warnings, 0 notes\n")
    assert ran.out.rstrip().endswith("PASSED: tiny on cpu: 2 kernels asked for, 0 waived; 0 warnings, 0 notes")


def test_audit_that_misses_a_kernel_refuses_and_says_what_where_and_what_to_do(cli: Any, audit: Any) -> None:
    cli.acme("acme::double", "acme::doubel")
    ran = audit()
    assert ran.code == 1
    assert ran.out.startswith("REFUSED: tiny on cpu: 1 finding to act on")
    for part in (
        "  1. MISSING acme::doubel\n",
        "did you mean acme::double?",
        "layers.0..39 ffn (40)",
        " in build (40x)",
        "remedy  install the distribution that provides acme::doubel",
        "or, if the name is misspelt: did you mean acme::double?",
        '[expected_absent.acme] doubel = "..."',
    ):
        assert part in ran.out
    assert ran.out.isascii()


def test_audit_without_target_and_gpu_refuses_with_no_device(cli: Any, audit: Any) -> None:
    cli.acme("acme::double")
    ran = audit(target="cuda:99")
    assert ran.code == 1
    assert "NO_DEVICE cuda" in ran.out
    assert "--target cpu" in ran.out


def test_audit_of_an_unknown_model_refuses(cli: Any) -> None:
    ran = cli("audit", "qwen3.6-28b", "--target", "cpu")
    assert ran.code == 1
    assert "UNKNOWN_MODEL" in ran.out


def test_audit_of_a_broken_manifest_refuses_with_line_and_path(cli: Any, audit: Any) -> None:
    ran = audit(manifest=cli.manifest("no_such_key = 1"))
    assert ran.code == 1
    assert "BAD_MANIFEST model.no_such_key" in ran.out
    assert "MODEL.toml:5" in ran.out


def test_audit_with_a_bad_lever_refuses(cli: Any, audit: Any) -> None:
    cli.acme("acme::double")
    cli.monkeypatch.setenv("MUSTER_NO_ACNE", "1")
    ran = audit()
    assert ran.code == 1
    assert "UNKNOWN_LEVER MUSTER_NO_ACNE" in ran.out
    assert "did you mean MUSTER_NO_ACME?" in ran.out


def test_audit_shows_levers_of_the_environment_with_their_effect(cli: Any, audit: Any) -> None:
    cli.acme("acme::double")
    cli.monkeypatch.setenv("MUSTER_NO_ACME", "0")
    assert "MUSTER_NO_ACME=0 (environment) -> kernel kept" in audit().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--as-of", "tomorrow"), "--as-of: 'tomorrow' is no date: expected YYYY-MM-DD"),
        (("--as-of", "2026-02-30"), "is no date"),
        (("--as-of", "20260101"), "is no date"),
        (("--expect-set-hash", "abc"), "is no SHA-256: expected 64 hexadecimal digits"),
        (("--dangerously-allow-unresolved", "gemm"), "--dangerously-allow-unresolved: 'gemm' is not a key"),
        (("--dangerously-allow-unresolved", "a::b,,c::d"), "--dangerously-allow-unresolved: an item is empty"),
        (("--dangerously-allow-unresolved", "a::b", "--profile", "qualify"), "does not go with profile qualify"),
        (("--target", "gpu"), "error: target: 'gpu' is no target"),
        (("--target", "sm_91"), "names no known compute capability"),
        (("--plugin", "acme", "--no-plugin", "acme"), "acme: demanded and blocked at once"),
        (("--output", "no/such/folder/report.txt"), "cannot be written: No such file"),
        (("--trace", "."), "cannot be written: it is a directory"),
        (("--ref", "tiny"), "--ref and --manifests choose among manifests"),
        (("--config", "."), "--manifest and --config both say which model it is"),
        (("other",), "describes 'tiny', not 'other'"),
    ],
)
def test_audit_usage_error_exits_2_with_one_line(cli: Any, audit: Any, options: Any, message: str) -> None:
    cli.acme("acme::double")
    cli.monkeypatch.chdir(cli.folder)
    ran = audit(*options)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("muster: error: ")
    assert message in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--no-such-option",),
        ("--profile", "fast"),
        ("--stage", "magic"),
        ("--quant", "int4"),
        ("--format", "xml"),
        ("--manifest", "no/such/file.toml"),
        ("--manifest", "."),
        ("--config", "no/such/config.json"),
        ("--manifests", "no/such/folder"),
    ],
)
def test_audit_option_that_means_nothing_exits_2(cli: Any, options: Any) -> None:
    ran = cli("audit", "tiny", *options)
    assert (ran.code, ran.out) == (2, "")
    assert "Error: " in ran.err
    assert ran.err.isascii()


def test_audit_without_model_exits_2(cli: Any) -> None:
    ran = cli("audit")
    assert ran.code == 2
    assert "name a MODEL" in ran.err


def test_audit_model_beside_its_own_manifest_is_fine(cli: Any, audit: Any) -> None:
    cli.acme("acme::double")
    assert audit("tiny").code == 0


def test_audit_with_unreadable_config_exits_2(cli: Any) -> None:
    file = cli.folder / "config.json"
    file.write_text("{")
    ran = cli("audit", "--config", file, "--target", "cpu")
    assert ran.code == 2
    assert "is not valid JSON" in ran.err


def test_audit_resolves_config_and_reference_among_given_folders_only(cli: Any) -> None:
    cli.acme("acme::double")
    rows = 'match_names = ["{0}"]\n[[model_types]]\nmodel_type = "acme_type"\nhidden_size = 64'
    cli.monkeypatch.chdir(cli.folder)
    for name in ("alpha", "beta"):
        cli.manifest(rows.format(name), name).parent.rename(cli.folder / name)
    (cli.folder / "config.json").write_text('{"model_type": "acme_type", "hidden_size": 64}')
    options = ("--config", "config.json", "--manifests", ".", "--target", "cpu")
    assert "AMBIGUOUS_MODEL" in cli("audit", *options).out
    ran = cli("audit", *options, "--ref", "my-beta-model")
    assert ran.code == 0
    assert ran.out.startswith("PASSED: beta on cpu")
    folder = cli("audit", cli.folder, *options[2:], "--ref", "my-beta-model")
    assert (folder.code, folder.out) == (0, ran.out)
    assert "--ref goes with --config, or with a MODEL that is a folder" in cli("audit", "beta", "--ref", "my-beta").err
    assert cli("audit", "qwen3.6-27b", "--manifests", ".", "--target", "cpu").code == 1


def test_audit_with_a_misspelt_choice_says_so_in_plain_words(cli: Any) -> None:
    ran = cli("audit", "tiny", "--stage", "prooven")
    assert ran.code == 2
    assert "Invalid value for '--stage': 'prooven' is not one of 'registered'" in ran.err


def test_audit_degraded_pass_exits_0_and_says_so_first(cli: Any, audit: Any) -> None:
    cli.acme("acme::double", "acme::gone", "acme::lost")
    ran = audit("--dangerously-allow-unresolved", "acme::gone,acme::lost")
    assert ran.code == 0
    assert ran.out.startswith("PASSED, DEGRADED: tiny on cpu: absent and allowed")
    assert "  1. MISSING acme::gone" in ran.out
    assert audit("--dangerously-allow-unresolved", "acme::gone").code == 1
    again = audit("--dangerously-allow-unresolved=acme::gone,acme::lost", "--format", "json").json
    assert (again["verdict"], again["degraded"]) == ("passed", True)


def test_audit_expected_set_hash_passes_and_any_other_refuses(cli: Any, audit: Any) -> None:
    cli.acme("acme::double")
    actual = audit("--format", "json").json["set_hash"]
    assert audit("--expect-set-hash", actual.upper()).code == 0
    ran = audit("--expect-set-hash", "0" * 64)
    assert ran.code == 1
    assert "SET_HASH_MISMATCH" in ran.out


def test_audit_judges_waivers_as_of_the_given_day(cli: Any, audit: Any) -> None:
    cli.acme("acme::double", "acme::gone")
    waiver = '[expected_absent.acme.gone]\nreason = "nobody ships it for this chip"\nuntil = 2027-06-30'
    manifest = cli.manifest(waiver)
    before = audit("--as-of", "2027-01-01", manifest=manifest)
    after = audit("--as-of", "2027-07-01", manifest=manifest)
    assert (before.code, after.code) == (0, 0)
    assert "Waived: 1 absent kernel" in before.out
    assert "EXPIRED_WAIVER" not in before.out
    assert "EXPIRED_WAIVER acme::gone" in after.out


def test_audit_demanded_and_blocked_plugins(cli: Any, audit: Any) -> None:
    cli.acme("acme::double")
    assert audit("--plugin", "acme").code == 0
    assert "PLUGIN_NOT_FOUND acne" in audit("--plugin", "acne").out
    ran = audit("--no-plugin", "acme")
    assert ran.code == 1
    assert "no builder serves model type 'acme_type'" in ran.out


def test_audit_formats_go_to_stdout_or_to_a_file(cli: Any, audit: Any, tmp_path: Path) -> None:
    cli.acme("acme::double")
    assert audit("--format", "markdown").out.startswith("## PASSED: tiny on cpu")
    file = tmp_path / "report.json"
    ran = audit("--format", "json", "--output", file)
    assert ran.out == (f"PASSED: tiny on cpu: 1 kernel asked for, 0 waived; 0 warnings, 0 notes\nreport: {file}\n")
    assert json.loads(file.read_text())["verdict"] == "passed"
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_audit_keeps_stdout_for_the_report(cli: Any, audit: Any) -> None:
    cli.acme("acme::double")
    ran = audit("--format", "json")
    assert ran.json["model"] == "tiny"
    assert ran.err == "a builder that prints\n"


def test_audit_verbose_logs_one_event_to_stderr(cli: Any, audit: Any) -> None:
    cli.acme("acme::double")
    ran = audit("--verbose", "--format", "json")
    (line,) = [line for line in ran.err.splitlines() if line.startswith("{")]
    event = json.loads(line)
    assert (event["event"], event["level"], event["verdict"]) == ("audit.finished", "info", "passed")
    assert ran.json["verdict"] == "passed"


def test_audit_of_a_builder_that_raises_prints_the_report_and_exits_3(cli: Any, audit: Any) -> None:
    cli.acme("acme::double", after="raise ValueError('bad shape')")
    ran = audit()
    assert ran.code == 3
    assert ran.out.startswith("INCOMPLETE: tiny on cpu")
    assert "the model's builder failed: ValueError: bad shape (at " in ran.err
    assert "Traceback" not in ran.err
    assert "Traceback" in audit("--verbose").err


def test_report_of_a_builder_that_raises_holds_what_it_raised_and_where(cli: Any, audit: Any) -> None:
    module = cli.acme("acme::double", after="raise ValueError('bad\\nshape') from KeyError('hidden')")
    file = cli.folder / f"site_{module}" / f"{module}.py"
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "raise ValueError" in text)
    raised = f"ValueError: bad\nshape (at {file}:{line})\n  because of KeyError: 'hidden'"
    written = json.loads(audit("--format", "json").out)
    assert (written["complete"], written["findings"], written["failure"]) == (False, [], raised)
    lines = audit().out.splitlines()
    assert lines[2:6] == ["The model was not built to its end", *(f"  {text}" for text in raised.splitlines())]
    assert "### The model was not built to its end" in audit("--format", "markdown").out


def test_report_of_a_builder_that_raises_after_a_miss_says_first_what_refuses(cli: Any, audit: Any) -> None:
    cli.acme("acme::gone", after="raise ValueError('bad shape')")
    out = audit().out
    assert (
        0 < out.index("To act on: 1 MISSING") < out.index("The model was not built to its end\n  ValueError: bad shape")
    )


def test_report_names_the_builder_and_its_maturity(cli: Any, audit: Any) -> None:
    module = cli.acme("acme::double")
    assert "  builder: acme (production)" in audit().out.splitlines()
    file = cli.folder / f"site_{module}" / f"{module}.py"
    file.write_text(file.read_text().replace('"production"', '"partial"'))
    sys.modules.pop(module, None)
    importlib.invalidate_caches()
    written = audit("--format", "json").json
    assert (written["builder"], written["maturity"]) == ("acme", "partial")
    assert "- builder: acme (partial)" in audit("--format", "markdown").out


def test_report_of_a_model_that_nobody_builds_says_it_once(cli: Any, audit: Any) -> None:
    cli.acme("acme::double")
    file = cli.folder / "other.toml"
    file.write_text(cli.manifest().read_text().replace("acme_type", "nobodys_type"))
    ran = cli("audit", "--manifest", file, "--target", "cpu")
    assert ran.code == 1
    assert ran.out.count("no builder serves model type") == 1
    assert ran.err == ""


def test_report_of_a_model_without_dimensions_names_its_manifest_and_says_it_once(cli: Any) -> None:
    file = cli.folder / "MODEL.toml"
    file.write_text('\n[model]\nname = "tiny"\nquant = "nvfp4"\nmodel_type = "qwen3_5"\n')
    ran = cli("audit", "--manifest", file, "--target", "cpu", "--format", "json")
    assert (ran.code, ran.err) == (1, "")
    (finding,) = ran.json["findings"]
    assert "model.vocab_size is missing" in finding["why"]
    assert finding["where"] == [f"{file}:2"]


def test_audit_of_a_builder_that_reads_an_undeclared_lever_names_its_line(cli: Any, audit: Any) -> None:
    module = cli.acme("acme::double", after="kernels.levers.flag('MUSTER_NO_ACNE')")
    file = cli.folder / f"site_{module}" / f"{module}.py"
    line = file.read_text().splitlines().index("    kernels.levers.flag('MUSTER_NO_ACNE')") + 1
    said = (
        "UndeclaredLever: nobody declares a lever MUSTER_NO_ACNE; did you mean MUSTER_NO_ACME?; a plugin that reads it"
    )
    assert f"{said} returns a km.Lever from muster_levers (at {file}:{line})" in audit().err


def test_audit_of_a_builder_that_raises_after_a_miss_exits_1(cli: Any, audit: Any) -> None:
    cli.acme("acme::gone", after="raise ValueError('bad shape')")
    ran = audit()
    assert ran.code == 1
    assert "MISSING acme::gone" in ran.out
    assert "the model's builder failed: ValueError" in ran.err


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "import sys; sys.exit()", "raise GeneratorExit"])
def test_audit_of_a_builder_that_ends_the_process_does_not_pass(cli: Any, audit: Any, end: str) -> None:
    cli.acme("acme::double", after=end)
    assert audit().code == 3


def test_audit_interrupted_exits_130(cli: Any, audit: Any) -> None:
    cli.acme("acme::double", after="raise KeyboardInterrupt")
    ran = audit()
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.endswith("muster: interrupted\n")


def test_name_with_a_line_end_in_it_makes_no_second_verdict(cli: Any) -> None:
    ran = cli("audit", "x\nPASSED: qwen3.6-27b", "--target", "cpu", "--output", cli.folder / "a\nPASSED: b")
    assert ran.code == 1
    assert [line.partition(":")[0] for line in ran.out.splitlines()] == ["REFUSED", "report"]
    told = (cli.folder / "a\nPASSED: b").read_text()
    assert [line.partition(":")[0] for line in told.splitlines() if line.startswith(("PASSED", "REFUSED"))] == [
        "REFUSED", "REFUSED",
    ]  # fmt: skip


def test_audit_interrupted_waits_for_nothing_that_still_builds(cli: Any) -> None:
    begin = "from concurrent.futures import ThreadPoolExecutor; from time import sleep; pool = ThreadPoolExecutor(1)"
    cli.acme("acme::double", after=f"{begin}; pool.submit(sleep, 60); pool.submit(sleep, 60); raise KeyboardInterrupt")
    began = time.monotonic()
    ran = cli.process("audit", "--manifest", cli.manifest(), "--target", "cpu")
    assert (ran.returncode, ran.stdout) == (130, "")
    assert ran.stderr.endswith("muster: interrupted\n")
    assert time.monotonic() - began < 40


def test_audit_of_a_type_that_nobody_builds_refuses(cli: Any, audit: Any) -> None:
    cli.install("import kernel_muster as km\n\n\n@km.hookimpl\ndef muster_models():\n    return []\n")
    ran = audit()
    assert ran.code == 1
    assert "no builder serves model type 'acme_type'" in ran.out


def test_audit_trace_replays_to_the_same_findings(cli: Any, audit: Any, tmp_path: Path) -> None:
    cli.acme("acme::double", "acme::gone")
    manifest, trace = cli.manifest(), tmp_path / "trace.json"
    live = audit("--trace", trace, "--format", "json", manifest=manifest).json
    ran = cli("replay", trace, "--manifest", manifest, "--format", "json")
    assert ran.code == 1
    assert ran.json["findings"] == live["findings"]
    assert ran.json["set_hash"] == live["set_hash"]


def test_audit_refused_on_entry_has_no_trace_and_says_so(cli: Any, tmp_path: Path) -> None:
    ran = cli("audit", "nobody", "--target", "cpu", "--trace", tmp_path / "t.json")
    assert ran.code == 1
    assert "no trace was written" in ran.err
    assert not (tmp_path / "t.json").exists()


def test_option_values_are_the_audits_own() -> None:
    assert tuple(StageName) == STAGES
    assert tuple(ProfileName) == PROFILES
    assert set(QuantName) == set(QUANTS)


@pytest.mark.parametrize("model", ["qwen3.6-35b-a3b", "qwen3.6-27b"])
def test_audit_of_the_shipped_models_passes_on_cpu(cli: Any, model: str) -> None:
    ran = cli("audit", model, "--target", "cpu")
    assert ran.code == 0, ran.out
    assert ran.out.startswith(f"PASSED: {model} on cpu")
    assert ran.out.isascii()


def test_output_and_trace_to_one_file_is_a_usage_error(cli: Any, tmp_path: Path) -> None:
    ran = cli("audit", "nobody", "--target", "cpu", "--output", tmp_path / "x", "--trace", tmp_path / "." / "x")
    assert ran.code == 2
    assert "one would overwrite the other" in ran.err
    assert not (tmp_path / "x").exists()
