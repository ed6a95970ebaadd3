"""``muster models``, ``kernels``, ``plugins``, ``levers``, ``explain`` and ``manifest``."""

import json
import re
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
from kernel_muster.cli import explain
from kernel_muster.MODEL_toml.generate import schema_text
from kernel_muster.registry import selection

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
    assert "measured on GB10 (sm_121a, 48 SMs), not on sm_90a: measure again" in out
    assert "not on" not in cli("levers").out


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
    assert "MUSTER_QKV_ARM" not in nobody.out  # what the defaults of a model make of it nobody knows
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


def test_explain_shows_who_serves_and_why_others_do_not(cli: Any) -> None:
    cli.acme(kernels=(("acme::double", ("cpu",), {}), ("acme::double", ("cpu", "sm_90a"), {"tier": "reference"})))
    ran = cli("explain", "acme::double", "--target", "cpu")
    assert ran.code == 0
    assert ran.out.startswith("acme 1.0 serves acme::double on cpu\n")
    assert "ACCEPTED acme 1.0" in ran.out
    assert "REJECTED acme 1.0" in ran.out
    assert "rule          tier" in ran.out
    assert "reason        tier reference; a fast kernel serves" in ran.out
    assert "to change it  declare it tier fast, if it is, or remove the fast kernel" in ran.out
    assert "Contract acme_double\n  out = 2 * x" in ran.out


def test_explain_shows_the_whole_contract(cli: Any) -> None:
    ran = cli("explain", "w4a16_gemv::w4a16_gemv_batch2", "--target", "cpu")
    contract = ran.out[ran.out.index("Contract ") :]
    for part in (
        "M is at most 2",
        "K is a multiple of 16",
        "tolerance: |y - ref| <= ",
        "cases: ",
        "PARAMETER",
        "(M, N)",
    ):
        assert part in contract
    assert re.search(r"^  w +nvfp4 +\(N, K\) +in +weight", contract, re.MULTILINE)
    assert re.search(r"^  out +bf16 +\(M, N\) +out", contract, re.MULTILINE)
    assert "case " not in contract
    assert "deterministic" not in ran.out


def test_explain_verbose_adds_the_cases_and_the_rest_of_the_spec(cli: Any) -> None:
    ran = cli("explain", "w4a16_gemv::w4a16_gemv_batch2", "--target", "cpu", "--verbose")
    assert re.search(r"^  case \w+: M=\d, N=\d+, K=\d+", ran.out, re.MULTILINE)
    assert "weights in     nvfp4_row_major" in ran.out
    assert "deterministic  yes" in ran.out


def test_levers_json_names_the_keys_that_each_decides_about(cli: Any) -> None:
    keys = {row["name"]: row["keys"] for row in cli("levers", "--format", "json").json["levers"]}
    assert keys["MUSTER_NO_PREFILL_MMA"] == ["prefill_paged::prefill_paged_attn_mma"]
    assert keys["MUSTER_CACHE_DIR"] == []


def test_explain_names_the_levers_that_drop_the_key_or_choose_another(cli: Any) -> None:
    cli.monkeypatch.setenv("MUSTER_NO_K64_N64", "1")
    ran = cli("explain", "w4a16::w4a16_gemm_t_k64_n64_p3", "--target", "cpu")
    section = ran.out[ran.out.index("Levers that switch it off, or choose another kernel") :]
    assert "  MUSTER_NO_K64_N64=1 (environment) -> w4a16::w4a16_gemm_t_k64_n64_p3 dropped, never looked up\n" in section
    assert "    MUSTER_NO_K64_N64=0 -> kernel kept\n" in section
    assert "  MUSTER_W4A16_NARROW_BLOCKS=" in section
    assert "MUSTER_DISABLE=w4a16::w4a16_gemm_t_k64_n64_p3 -> absent" in section
    assert "MOE" not in section


def test_explain_of_a_module_in_the_place_of_a_function_names_its_keys(cli: Any) -> None:
    ran = cli("explain", "moe::moe_fused_shared", "--target", "cpu")
    assert ran.code == 1
    assert (
        "did you mean moe_fused_shared::moe_fused_shared_down or moe_fused_shared::moe_fused_shared_gate_up?" in ran.out
    )


def test_explain_json_has_the_levers_with_what_each_value_does(cli: Any) -> None:
    found = cli("explain", "prefill_paged::prefill_paged_attn_mma", "--target", "cpu", "--format", "json").json[
        "levers"
    ]
    assert [(lever["name"], lever["value"], lever["origin"]) for lever in found] == [
        ("MUSTER_NO_PREFILL_MMA", False, "built-in")
    ]
    assert found[0]["effects"]["1"] == "prefill_paged::prefill_paged_attn_mma dropped, never looked up"


def test_explain_of_a_site_says_what_is_asked_there_by_whom_and_which_levers_matter(cli: Any) -> None:
    (site,) = {
        site.partition(" ")[0]
        for row in cli("audit", "qwen3.6-27b", "--target", "cpu", "--format", "json").json["kernels"]
        for site in row["sites"]
        if row["key"] == "prefill_paged::prefill_paged_attn_mma"
    }
    ran = cli("explain", site.partition("/")[2], "--target", "cpu")
    assert ran.code == 0
    assert ran.out.startswith(f"{site} in Attention.__init__\n  key, optional\n")
    assert "      prefill_paged::prefill_paged_attn_mma: kernel-muster " in ran.out
    assert "asked for when heads have 128 or 256 values" in ran.out
    assert "qwen3.6-27b" in ran.out
    assert "MUSTER_NO_PREFILL_MMA=0 (built-in) -> kernel kept" in ran.out
    assert "  MUSTER_DISABLE=prefill_paged::prefill_paged_attn_mma -> absent, which refuses" in ran.out
    found = cli("explain", site, "--target", "sm_75", "--format", "json")
    assert found.code == 1  # no kernel of that target
    (question,) = found.json["questions"]
    assert (question["keys"], question["kind"]) == (["prefill_paged::prefill_paged_attn_mma"], "optional")
    assert (question["served_by"], question["levers"]) == ([""], ["MUSTER_NO_PREFILL_MMA"])


def test_explain_of_a_site_without_a_lever_of_its_own_says_what_takes_its_kernels_away(cli: Any) -> None:
    (site,) = {
        site.partition(" ")[0]
        for row in cli("audit", "qwen3.6-27b", "--target", "cpu", "--format", "json").json["kernels"]
        for site in row["sites"]
        if row["key"] == "norm::rms_norm" and "attention.py" in site
    }
    out = cli("explain", site, "--target", "cpu").out
    assert out.endswith(
        "  MUSTER_DISABLE=norm::rms_norm -> absent, which refuses a boot that asks for it [not for serving]\n"
    )


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            "layers/attention.py:1",
            "no model asks for a kernel at layers/attention.py:1; lines of that file that do: models/",
        ),
        ("nowhere.py:7", "no model asks for a kernel at nowhere.py:7; no line of nowhere.py does"),
        ("attention.py", "is not a key: expected module::func, or a line of model code"),
    ],
)
def test_explain_of_a_line_that_asks_for_nothing_is_a_usage_error(cli: Any, place: str, said: str) -> None:
    ran = cli("explain", place, "--target", "cpu")
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.split())


def test_explain_of_a_site_knows_what_a_lever_takes_away(cli: Any) -> None:
    cli.monkeypatch.setenv("MUSTER_NO_PREFILL_MMA", "1")
    lines = cli("explain", "attention.py:1", "--target", "cpu").err
    cli.monkeypatch.delenv("MUSTER_NO_PREFILL_MMA")
    assert lines.count(":") < cli("explain", "attention.py:1", "--target", "cpu").err.count(":")


# A plugin whose builder asks for one kernel, on its first line, and fails.
FAILS = """def build(manifest, kernels, weights=None): kernels.kernel("silu", "silu_mul"); raise OSError("no layer")


import pathlib
import kernel_muster as km


@km.hookimpl
def muster_models():
    return [km.ModelBuilder("acme", ("acme_type",), "production", build)]


@km.hookimpl
def muster_manifests():
    return [pathlib.Path({folder!r})]
"""


def test_explain_of_a_site_goes_on_behind_a_builder_that_fails_and_says_so(cli: Any) -> None:
    module = cli.install(FAILS.format(folder=str(cli.manifest().parent.parent)))
    said = "muster: what tiny asks is not all here: its builder failed: OSError: no layer (at "
    ran = cli("explain", f"{module}.py:1", "--target", "cpu", "--format", "json")
    assert (ran.code, ran.err.count(said)) == (0, 1)
    assert [question["models"] for question in ran.json["questions"]] == [["tiny"]]
    ran = cli("explain", f"{module}.py:2", "--target", "cpu")
    assert (ran.code, ran.err.count(said)) == (2, 1)


def test_explain_json_holds_the_contract(cli: Any) -> None:
    cli.acme()
    (contract,) = cli("explain", "acme::double", "--target", "cpu", "--format", "json").json["contracts"]
    assert contract["parameters"][1] == {"name": "out", "dtype": "f32", "shape": "(M,)", "role": "out", "notes": ""}
    assert contract["tolerance"] == {"relative": 0, "absolute": 0, "derivation": "exact"}
    assert contract["cases"] == [{"name": "one", "dims": {"M": 1}, "scalars": {}, "tolerance": None}]


@pytest.mark.parametrize(
    ("key", "target", "title", "part"),
    [
        ("acme::doubel", "cpu", "MISSING: nothing serves acme::doubel on cpu", "correct the key (acme::double"),
        ("acme::hopper", "sm_100a", "WRONG_ARCH: nothing serves acme::hopper on sm_100a", "build it for sm_100a"),
        ("acme::double", "sm_90a", "MISSING: nothing serves acme::double on sm_90a", "sm_90a needs a device kernel"),
    ],
)
def test_explain_of_a_miss_exits_1_and_says_what_would_change_it(
    cli: Any, key: str, target: str, title: str, part: str
) -> None:
    cli.acme()
    ran = cli("explain", key, "--target", target)
    assert ran.code == 1
    assert ran.out.startswith(title)
    assert part in ran.out


def test_explain_of_a_key_of_a_blocked_plugin_names_it(cli: Any) -> None:
    cli.acme()
    ran = cli("explain", "acme::double", "--target", "cpu", "--no-plugin", "acme")
    assert ran.code == 1
    assert "plugin acme of acme would provide it, but is blocked" in ran.out


def test_explain_follows_an_alias_a_preference_and_a_switch(cli: Any) -> None:
    cli.acme()
    assert "acme::old_twice (now called acme::twice)" in cli("explain", "acme::old_twice", "--target", "cpu").out
    cli.monkeypatch.setenv("MUSTER_DISABLE", "acme::double")
    ran = cli("explain", "acme::double", "--target", "cpu", "--format", "json")
    assert (ran.code, ran.json["cause"], ran.json["candidates"][0]["rule"]) == (1, "DISABLED", "disabled")
    assert ran.json["candidates"][0]["change"] == "take acme::double out of MUSTER_DISABLE"


def test_explain_of_equal_kernels_exits_1_and_says_how_to_decide(cli: Any) -> None:
    cli.acme(kernels=(("acme::double", ("cpu",), {}), ("acme::double", ("cpu",), {})))
    ran = cli("explain", "acme::double", "--target", "cpu")
    assert ran.code == 1
    assert ran.out.startswith("DUPLICATE_KERNEL: equal kernels compete for acme::double on cpu\n")
    assert "MUSTER_PREFER=acme::double=acme" in ran.out


CIRCLE = """
import kernel_muster as km

def run(gate, up, out):
    pass

@km.hookimpl
def muster_kernels():
    options = {"archs": ("cpu",), "backend": km.PythonKernel(run), "overrides": "OTHER"}
    return [km.KernelSpec(key="silu::silu_mul", contract="silu_mul", **options)]
"""


def test_explain_of_kernels_that_override_each_other_exits_1(cli: Any) -> None:
    for name, other in (("one", "two"), ("two", "one")):
        cli.install(CIRCLE.replace("OTHER", other), name)
    ran = cli("explain", "silu::silu_mul", "--target", "cpu", "--format", "json")
    assert (ran.code, ran.json["cause"]) == (1, "BAD_OVERRIDE")
    text = cli("explain", "silu::silu_mul", "--target", "cpu").out
    assert text.startswith("BAD_OVERRIDE: kernels of silu::silu_mul override each other in a circle")


def test_explain_usage(cli: Any) -> None:
    ran = cli("explain", "gemm", "--target", "cpu")
    assert (ran.code, ran.err) == (
        2,
        "muster: error: 'gemm' is not a key: expected module::func, or a line of model code such as "
        "layers/attention.py:29\n",
    )
    assert cli("explain").code == 2
    ran = cli("explain", "acme::double", "--target", "cuda:99")
    assert ran.code == 1
    assert "NO_DEVICE" in ran.out


def test_explain_knows_every_rule_of_selection() -> None:
    """A rule without an explanation raises: this finds the rules in the code that makes them."""
    source = getsource(selection)
    rules = set(re.findall(r'Candidate\([^()]*?, "(\w+)"', source)) | set(re.findall(r'return "(\w+)", f?"', source))
    rules |= {"host", "arch"}
    assert {"disabled", "replaced", "overridden", "tier", "specificity", "preferred", "duplicate"} <= rules
    known = set(re.findall(r'^        "(\w*)": ', getsource(explain._change), re.MULTILINE))
    assert rules <= known


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


def test_audit_names_the_line_of_a_default_that_is_wrong(cli: Any) -> None:
    cli.acme()
    bad = cli.manifest("[defaults]\nMUSTER_NO_ACNE = true")
    ran = cli("audit", "--manifest", bad, "--target", "cpu", "--format", "json")
    assert [(f["code"], f["where"]) for f in ran.json["findings"]] == [("UNKNOWN_LEVER", [f"{bad}:6"])]


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
