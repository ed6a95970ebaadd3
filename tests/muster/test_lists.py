"""``muster models``, ``kernels``, ``plugins``, ``levers`` and ``manifest``."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kernel_muster.MODEL_toml.generate import schema_text

LISTS = ("models", "kernels", "plugins", "levers")
BROKEN = "raise RuntimeError('no toolchain')\n"


@pytest.mark.parametrize("command", LISTS)
def test_lists_are_ascii_text_or_json(cli: Any, command: str) -> None:
    cli.acme()
    text, data = cli(command), cli(command, "--format", "json")
    assert (text.code, data.code) == (0, 0)
    assert text.out.isascii()
    assert data.json["schema"] == f"kernel-muster/{command}"
    assert data.json["findings"] == []
    assert data.json[command]


@pytest.mark.parametrize("command", LISTS)
def test_lists_name_a_broken_plugin_beside_the_healthy_ones_and_exit_1(cli: Any, command: str) -> None:
    cli.acme()
    cli.install(BROKEN, "broken")
    ran = cli(command)
    assert ran.code == 1
    assert "PLUGIN_LOAD_FAILED broken" in ran.out
    assert "no toolchain" in ran.out
    assert cli(command, "--format", "json").json["findings"][0]["code"] == "PLUGIN_LOAD_FAILED"
    assert cli(command, "--no-plugin", "broken").code == 0


def test_plugins_show_status_hooks_and_keys(cli: Any) -> None:
    cli.acme()
    cli.install(BROKEN, "broken")
    rows = {row["name"]: row for row in cli("plugins", "--no-plugin", "silu", "--format", "json").json["plugins"]}
    assert {name: rows[name]["status"] for name in ("acme", "broken", "silu", "norm")} == {
        "acme": "loaded",
        "broken": "failed",
        "silu": "blocked",
        "norm": "loaded",
    }
    assert rows["acme"]["keys"] == ["acme::double", "acme::hopper", "acme::twice"]
    assert "muster_kernels" in rows["acme"]["hooks"]
    assert rows["broken"]["location"].endswith(f"site_{rows['broken']['module']}")


def test_plugins_demands_a_plugin_by_name(cli: Any) -> None:
    ran = cli("plugins", "--plugin", "acne")
    assert ran.code == 1
    assert "PLUGIN_NOT_FOUND acne" in ran.out


def test_kernels_filters_by_part_and_by_pattern(cli: Any) -> None:
    cli.acme()

    def keys(*arguments: str) -> list[str]:
        return [row["key"] for row in cli("kernels", *arguments, "--format", "json").json["kernels"]]

    assert keys("acme::") == ["acme::double", "acme::hopper", "acme::twice"]
    assert keys("acme::*e") == ["acme::double", "acme::twice"]
    assert keys("nothing_like_it") == []
    nothing = cli("kernels", "acme::doubel")
    assert nothing.out.startswith("Kernels: 0 of ")
    assert "did you mean acme::double?" in nothing.out
    assert "modules: acme, argmax," in nothing.out


def test_kernels_with_a_target_say_which_serve_there(cli: Any) -> None:
    cli.acme()
    rows = cli("kernels", "acme", "--target", "cpu", "--format", "json").json["kernels"]
    assert {row["key"]: row["on_target"] for row in rows} == {
        "acme::double": "serves",
        "acme::hopper": "arch: needs sm_90a, the target is cpu",
        "acme::twice": "serves",
    }
    assert "ON TARGET" in cli("kernels", "acme", "--target", "sm_90a").out
    assert "ON TARGET" not in cli("kernels", "acme").out


def test_kernels_of_a_target_that_means_nothing_exit_2(cli: Any) -> None:
    assert cli("kernels", "--target", "gpu").code == 2


def test_kernels_verbose_shows_aliases(cli: Any) -> None:
    cli.acme()
    assert "acme::old_twice" in cli("kernels", "acme", "--verbose").out


def test_levers_show_value_origin_effect_and_evidence(cli: Any) -> None:
    cli.acme()
    cli.monkeypatch.setenv("MUSTER_NO_ACME", "1")
    out = cli("levers", "--target", "sm_90a").out
    assert "  MUSTER_NO_ACME=1 (environment) -> acme dropped\n" in out
    assert "evidence: GB10 (sm_121a, 48 SMs): 20 1.74x" in out
    assumed = "assumed, not measured on {} with the kernels that serve: "
    assert assumed.format("sm_90a") in out
    assert "MUSTER_NO_ACME" not in out.partition("assumed")[2]  # that value was set by the user
    cli.monkeypatch.delenv("MUSTER_NO_ACME")
    for target in ("sm_90a", "sm_121a"):  # figures without kernels are of no chip's kernels here
        (line,) = [line for line in cli("levers", "--target", target).out.splitlines() if "assumed" in line]
        assert line.startswith("  " + assumed.format(target))
        assert "MUSTER_NO_ACME" in line
    assert "assumed" not in cli("levers").out


def test_levers_of_a_model_count_its_defaults(cli: Any) -> None:
    cli.acme()
    manifest = cli.manifest("[defaults]\nMUSTER_NO_ACME = true")
    rows = cli("levers", "--manifest", manifest, "--format", "json").json
    (row,) = [row for row in rows["levers"] if row["name"] == "MUSTER_NO_ACME"]
    assert (rows["model"], row["value"], row["origin"], row["effect"]) == ("tiny", True, "manifest", "acme dropped")


def test_levers_with_a_bad_value_or_an_unknown_model_exit_1(cli: Any) -> None:
    nobody = cli("levers", "nobody")
    assert nobody.code == 1
    assert nobody.out.startswith("To act on: 1 UNKNOWN_MODEL\n")
    assert "MUSTER_QKV_ARM" not in nobody.out  # the effect of a model's defaults is unknown
    cli.monkeypatch.setenv("MUSTER_QKV_ARM", "sideways")
    ran = cli("levers")
    assert ran.code == 1
    assert ran.out.startswith("To act on: 1 BAD_LEVER\n  1. BAD_LEVER MUSTER_QKV_ARM\n")
    assert "\n\nLevers: " in ran.out


def test_models_lists_all_with_builder_and_file(cli: Any) -> None:
    rows = {row["name"]: row for row in cli("models", "--format", "json").json["models"]}
    assert "qwen3.6-35b-a3b" in rows
    assert rows["qwen3.6-27b"]["model_types"] == ["qwen3_5/5120"]
    assert Path(rows["qwen3.6-27b"]["manifest"]).is_file()


def test_models_resolution_shows_its_steps_alone(cli: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3_5", "hidden_size": 5120}')
    ran = cli("models", "--config", config, "--ref", "my/Qwen3.8-27B-finetune")
    assert ran.code == 0
    assert ran.out.startswith("Resolved: qwen3.8-27b\n")
    assert "exact rows: qwen3.6-27b, qwen3.8-27b" in ran.out
    assert cli("models", tmp_path, "--ref", "my/Qwen3.8-27B-finetune").out == ran.out
    tie = cli("models", "--config", config)
    assert tie.code == 1
    assert tie.out.startswith("Not resolved\n")
    assert "AMBIGUOUS_MODEL (qwen3_5, 5120)" in tie.out


def test_models_resolution_among_given_folders_leaves_the_shipped_ones_out(cli: Any, tmp_path: Path) -> None:
    file = cli.manifest('[[model_types]]\nmodel_type = "qwen3_5"\nhidden_size = 5120', "mine")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3_5", "hidden_size": 5120}')
    ran = cli("models", "--config", config, "--manifests", file.parent.parent, "--format", "json")
    assert (ran.code, ran.json["model"], ran.json["manifest"]) == (0, "mine", str(file))
    assert cli("models", "--manifests", file.parent.parent).out.startswith("Models: 1\n")


def test_models_by_name_and_unreadable_config(cli: Any, tmp_path: Path) -> None:
    assert cli("models", "qwen3.6-27b").out.startswith("Resolved: qwen3.6-27b\n")
    assert cli("models", "--ref", "qwen3.6-28b").code == 1
    assert cli("models", "a", "--ref", "b").code == 2
    assert cli("models", "--config", tmp_path / "none.json").code == 2
    (tmp_path / "bad.json").write_bytes(b"\xff")
    assert cli("models", "--config", tmp_path / "bad.json").code == 2


def test_model_that_is_a_path_is_told_what_is_wrong_with_it(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "there is no such file or folder" in cli("models", str(tmp_path / "none")).out
    assert "the folder of that name holds no config.json" in cli("models", str(tmp_path)).out
    assert "is no folder of a model" in cli("models", str(tmp_path / "file")).out
    assert "no such file" not in cli("models", "some/Model").out


def test_model_in_other_letters_is_suggested(cli: Any) -> None:
    assert "did you mean qwen3.6-27b" in cli("models", "QWEN3.6-27B").out


def test_models_show_short_paths_of_manifests(cli: Any) -> None:
    whole = str(cli.manifest().parent.parent)
    assert ".../tiny/MODEL.toml" in cli("models", "--manifests", whole).out
    assert f"{whole}/tiny/MODEL.toml" in cli("models", "--manifests", whole, "--verbose").out


def test_levers_json_names_the_keys_that_each_decides_about(cli: Any) -> None:
    keys = {row["name"]: row["keys"] for row in cli("levers", "--format", "json").json["levers"]}
    assert keys["MUSTER_NO_PREFILL_MMA"] == ["prefill_paged::prefill_paged_attn_mma"]
    assert keys["MUSTER_CACHE_DIR"] == []


def test_manifest_lint_passes_sound_files_and_names_everything_wrong(cli: Any) -> None:
    cli.acme()
    good, bad = cli.manifest(), cli.manifest("hiden_size = 4\nhidden_size = '4'", "bad")
    assert cli("manifest", "lint", good).out.startswith("Manifests: 1 file, 1 sound\n")
    ran = cli("manifest", "lint", good, bad)
    assert ran.code == 1
    assert ran.out.startswith("Manifests: 2 files, 1 sound\n")
    assert "2 BAD_MANIFEST" in ran.out
    assert f"{bad}:5" in ran.out
    assert "did you mean hidden_size?" in ran.out
    assert cli("manifest", "lint", bad, "--format", "json").json["sound"] == []


def test_manifest_lint_says_whose_levers_it_does_not_know(cli: Any) -> None:
    file = cli.manifest()
    cli.install("import sys\nsys.exit(0)\n", "broken")
    cli.acme()
    ran = cli("manifest", "lint", file, "--no-plugin", "acme")
    assert ran.code == 0
    unknown = "levers that it declares are not known here"
    assert f"plugin broken did not load (muster plugins says why): {unknown}\n" in ran.out
    assert f"plugin acme is blocked: {unknown}\n" in ran.out
    document = cli("manifest", "lint", file, "--format", "json").json
    assert (document["sound"], document["plugins_not_loaded"]) == (["tiny"], ["broken"])
    ran = cli("manifest", "lint", file, "--no-plugin", "acne")
    assert ran.code == 1
    assert "PLUGIN_NOT_FOUND acne" in ran.out


def test_manifest_lint_checks_lever_scopes_and_duplicates(cli: Any) -> None:
    cli.acme()
    scoped = '[expected_absent.acme.gone]\nreason = "nobody ships it for this chip"\nlevers = ["MUSTER_NO_ACNE=1"]'
    assert "MUSTER_NO_ACNE" in cli("manifest", "lint", cli.manifest(scoped)).out
    assert "DUPLICATE_MODEL tiny" in cli("manifest", "lint", cli.manifest(), cli.manifest()).out


def test_manifest_lint_checks_defaults_and_warns_of_waivers_that_have_run_out(cli: Any) -> None:
    cli.acme()
    bad = cli.manifest('[defaults]\nMUSTER_NO_ACME = "maybe"\nMUSTER_NO_ACNE = true')
    ran = cli("manifest", "lint", bad)
    assert ran.code == 1
    assert "BAD_LEVER MUSTER_NO_ACME" in ran.out
    assert f"{bad}:6" in ran.out
    assert "UNKNOWN_LEVER MUSTER_NO_ACNE" in ran.out
    assert f"{bad}:7" in ran.out
    assert ran.out.startswith("Manifests: 1 file, 0 sound\n")
    ran_out = cli.manifest('[expected_absent.acme.gone]\nreason = "nobody ships it for this chip"\nuntil = 2020-01-01')
    ran = cli("manifest", "lint", ran_out)
    assert (ran.code, "EXPIRED_WAIVER acme::gone" in ran.out) == (0, True)
    assert "not checked here: whether anything asks" in ran.out
    assert "whether a builder serves the model" in ran.out
    soon = datetime.now(UTC).date() + timedelta(days=3)
    ran = cli("manifest", "lint", cli.manifest(f'[expected_absent.acme.gone]\nreason = "not ported"\nuntil = {soon}'))
    assert (ran.code, "WAIVER_EXPIRING acme::gone" in ran.out) == (0, True)


def test_manifest_lint_notes_architectures_that_no_device_is_called_by(cli: Any) -> None:
    cli.acme()
    text = """
[expected_absent.acme]
gone = { reason = "nobody ships it", archs = ["cpu", "sm_90"] }
fine = { reason = "nobody ships it", archs = ["sm_90", "sm_90a", "sm_80"] }
[target.sm_90.expected_present.acme]
double = "every layer asks"
"""
    file = cli.manifest(text)
    ran = cli("manifest", "lint", file, "--format", "json")
    (found,) = ran.json["findings"]
    assert (ran.code, found["code"], found["subject"], found["severity"]) == (0, "PLAIN_ARCH", "sm_90", "note")
    assert found["where"] == [f"{file}:7", f"{file}:10"]
    assert found["why"].endswith("9.0 are called sm_90a: a scope of sm_90 does not hold on them")


def test_audit_names_the_line_of_a_default_that_is_wrong(cli: Any) -> None:
    cli.acme()
    bad = cli.manifest("[defaults]\nMUSTER_NO_ACNE = true")
    ran = cli("audit", "--manifest", bad, "--target", "cpu", "--format", "json")
    assert [(f["code"], f["where"]) for f in ran.json["findings"]] == [("UNKNOWN_LEVER", [f"{bad}:6"])]


ENGINES = """
[defaults]
MUSTER_TOY_SCALE = "fast"
[expected_absent.acme.gone]
reason = "nobody ships it for this chip"
levers = ["MUSTER_TOY_SAFE=on"]
"""
TOY = [{"name": "MUSTER_TOY_SCALE", "kind": "enum", "choices": ["fast", "exact"], "default": "exact"},
       {"name": "MUSTER_TOY_SAFE", "kind": "bool"}]  # fmt: skip


def lever_file(cli: Any, content: Any) -> Path:
    file: Path = cli.folder / "levers.json"
    file.write_text(json.dumps(content))
    return file


def test_manifest_lint_knows_the_levers_that_an_engine_declares(cli: Any) -> None:
    cli.acme()
    file = cli.manifest(ENGINES)
    ran = cli("manifest", "lint", file)
    assert ran.code == 1
    scoped = cli.manifest("[defaults]\nMUSTER_TOY_SCALE = 1")
    for refused in (ran, cli("manifest", "lint", scoped)):
        assert "or, if an engine of yours declares it, give its levers: --levers FILE" in refused.out
    trace = {"version": "1.0", "target": {"arch": "sm_90a"}, "kernels": [], "lookups": [], "declared_levers": TOY}
    for content in ({"declared_levers": TOY}, trace):
        ran = cli("manifest", "lint", file, "--levers", lever_file(cli, content))
        assert (ran.code, ran.out.splitlines()[0]) == (0, "Manifests: 1 file, 1 sound")
    wrong = cli.manifest(ENGINES.replace('"fast"', '"slow"').replace("SAFE=on", "SAFE=maybe"))
    ran = cli("manifest", "lint", wrong, "--levers", lever_file(cli, trace))
    assert (ran.code, "MUSTER_TOY_SAFE: 'maybe' is not 1/0/true/false/on/off" in ran.out) == (1, True)


def test_levers_that_an_engine_declares_malformed_are_findings(cli: Any) -> None:
    cli.acme()
    levers = lever_file(cli, {"declared_levers": [{"name": "MUSTER_TOY_SCALE", "kind": "enum"}, TOY[1]]})
    ran = cli("manifest", "lint", cli.manifest(ENGINES), "--levers", levers, "--format", "json")
    (found,) = ran.json["findings"]
    assert (ran.code, found["code"], found["subject"]) == (1, "BAD_LEVER", "MUSTER_TOY_SCALE")
    assert found["where"] == [str(levers)]


@pytest.mark.parametrize(("content", "said"), [
    ([], 'expected a trace, or an object with "declared_levers"'),
    ({"levers": []}, 'expected a trace, or an object with "declared_levers"'),
    ({"declared_levers": [{"name": "TOY"}]}, "declared_levers[0].name: does not match"),
    ({"declared_levers": [{"name": "MUSTER_TOY", "kinds": "bool"}]}, "there is no key 'kinds'; did you mean kind?"),
    ({"declared_levers": {}}, "declared_levers: expected a list"),
    ({"declared_levers": [], "extra": 1}, "there is no key 'extra'"),
    ({"version": "7.0", "declared_levers": []}, "this program reads 1.x"),
])  # fmt: skip
def test_levers_that_cannot_be_read_are_a_usage_error(cli: Any, content: Any, said: str) -> None:
    ran = cli("manifest", "lint", cli.manifest(), "--levers", lever_file(cli, content))
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.parametrize("command", [("models",), ("kernels",), ("plugins",), ("levers",), ("manifest", "lint")])
def test_file_that_cannot_be_written_is_refused_before_plugins_load(cli: Any, command: tuple[str, ...]) -> None:
    cli.install("raise SystemExit(print('it was imported'))\n", "loud")
    files = (cli.manifest(),) if command[0] == "manifest" else ()
    ran = cli(*command, *files, "--output", cli.folder / "none" / "out.txt")
    assert (ran.code, ran.out) == (2, "")
    assert "out.txt cannot be written: No such file or directory" in ran.err
    assert "it was imported" not in ran.err


def test_manifest_lint_of_what_cannot_be_read_exits_2(cli: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        ran = cli("manifest", "lint", path)
        assert (ran.code, ran.out) == (2, "")
    assert cli("manifest", "lint").code == 2


def test_manifest_schema_is_the_shipped_one(cli: Any, tmp_path: Path) -> None:
    ran = cli("manifest", "schema")
    assert (ran.code, ran.out) == (0, schema_text())
    file = tmp_path / "schema.json"
    assert cli("manifest", "schema", "--output", file).code == 0
    assert json.loads(file.read_text()) == ran.json


def test_lists_write_to_a_file(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    ran = cli("models", "--format", "json", "--output", file)
    assert (ran.code, ran.out) == (0, "")
    assert json.loads(file.read_text())["schema"] == "kernel-muster/models"
    assert cli("models", "--output", tmp_path).code == 2
