"""``muster explain``: of a key, and of a line of model code."""

import re
from inspect import getsource
from typing import Any

import pytest
from kernel_muster.cli.commands import explain
from kernel_muster.registry.selection import select as selection


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
    assert found.code == 1  # no kernel for that target
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


# A plugin whose builder makes one lookup, on its first line, and fails.
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
    ran = cli("explain", "zzz", "--target", "cpu")
    said = "is not a key: expected module::func, or a line of model code such as layers/attention.py:29"
    assert (ran.code, ran.err) == (2, f"muster: error: 'zzz' {said}\n")
    for text in ("silu_mul", "silu.silu_mul", "silu_mull"):
        assert f"{said}; did you mean silu::silu_mul?" in cli("explain", text, "--target", "cpu").err
    assert cli("explain").code == 2
    ran = cli("explain", "acme::double", "--target", "cuda:99")
    assert ran.code == 1
    assert "NO_DEVICE" in ran.out


def test_explain_knows_every_rule_of_selection() -> None:
    """A rule without an explanation raises: this finds the rules in the code that makes them."""
    source = getsource(selection)
    rules = set(re.findall(r'Candidate\([^()]*?, "(\w+)"', source)) | set(
        re.findall(r'return "(\w+)", message', source)
    )
    rules |= {"host", "arch"}
    assert {"disabled", "replaced", "overridden", "tier", "specificity", "preferred", "duplicate"} <= rules
    known = set(re.findall(r'^        "(\w*)": ', getsource(explain._change), re.MULTILINE))
    assert rules <= known


def test_explain_names_the_models_that_ask_and_what_reaches_the_kernel(cli: Any) -> None:
    ran = cli("explain", "w4a16_gemv::w4a16_gemv_qg", "--target", "cpu")
    section = ran.out[ran.out.index("Asked for by models") : ran.out.index("Levers that switch it off")]
    assert "required, by 6 models: holo-3.1-35b-a3b, ornith-1.0-35b, qwen3.6-27b, " in section
    chain = "w4a16_gemv::w4a16_gemv_qgkv > w4a16_gemv::w4a16_gemv_qg (an earlier member serves)"
    assert f"      in the chain {chain}\n" in section
    assert "      reached by: qkv_arm: 1 row, or a tile of that\n" in section


def test_explain_shows_that_a_later_member_is_tried_where_the_first_is_absent(cli: Any) -> None:
    cli.monkeypatch.setenv("MUSTER_DISABLE", "w4a16_gemv::w4a16_gemv_qgkv")
    ran = cli("explain", "w4a16_gemv::w4a16_gemv_qg", "--target", "cpu", "--format", "json")
    assert (ran.json["schema"], ran.json["version"]) == ("kernel-muster/explanation", "1.2")
    (asked,) = ran.json["asked"]
    assert asked["tried"] is True
    assert asked["chain"] == ["w4a16_gemv::w4a16_gemv_qgkv", "w4a16_gemv::w4a16_gemv_qg"]
    assert (asked["kind"], asked["requested_by"], len(asked["models"])) == ("required", "", 6)


@pytest.mark.parametrize(
    ("value", "says"), [("auto", "No model asks for it on cpu"), ("atomic_c4", "reached by: MUSTER_FFN_ARM")]
)
def test_explain_of_what_one_lever_asks_for_follows_that_lever(cli: Any, value: str, says: str) -> None:
    cli.monkeypatch.setenv("MUSTER_FFN_ARM", value)
    ran = cli("explain", "moe_w4a16::moe_w4a16_grouped_down_atomic_c4", "--target", "cpu")
    assert ran.code == 0
    assert says in ran.out


def test_explain_of_an_open_key_shows_the_contract_that_opens_it(cli: Any) -> None:
    ran = cli("explain", "w4a4::w4a4_gemm_mfast", "--target", "cpu")
    assert ran.code == 1
    assert "or write one: anybody may, under contract w4a4_gemm" in ran.out
    assert "optional, by 7 models" in ran.out
    assert "Contract w4a4_gemm\n  out = q(x) w^T" in ran.out
    found = cli("explain", "w4a4::w4a4_gemm_mfast", "--target", "cpu", "--format", "json").json
    assert [contract["name"] for contract in found["contracts"]] == ["w4a4_gemm"]
