"""``muster ab``: equal arms are called equal, wrong kernels are caught and named, refusals keep their reports."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_muster.registry.findings import Finding

# A plugin that replaces tiers of the NVFP4 GEMV: right ones, with what a test does to them.
PLANTED = """
import numpy as np
import kernel_muster as km
from kernel_muster.plugins._reference import project
from kernel_muster.registry import nvfp4


def planted(x, w, out):
    out[...] = right = project(x, w)
    {what}


def otherwise(x, w):
    "The right result, rounded otherwise: moved a little first, by less than FP32 sums may be off."
    exact = x.astype(np.float64) @ nvfp4.dequantize(w).T
    return (exact * (1 + 2.0**-13 * (-1.0) ** np.arange(exact.shape[1]))).astype(x.dtype)


@km.hookimpl
def muster_kernels():
    return [
        km.KernelSpec(
            key=f"w4a16_gemv::{{name}}", contract=name, archs=("cpu",), backend=km.PythonKernel(planted),
            weight_layout="nvfp4_row_major", overrides="kernel-muster",
        )
        for name in {names!r}
    ]
"""
QUICK = ("--target", "cpu", "--tokens", "8", "--repeats", "1", "--drafts", "0")
#: Short prompts: a host reads rows one by one.
TEXTS = ("abc", "bde", "cfg", "dhi")
SHORT = tuple(part for text in TEXTS for part in ("--prompt", text))
TWO = ("w4a16_gemv_batch2",)
#: The reduced delta net's last projection: no case of the contract has its shape; one row and two take these tiers.
OUT = "if w.shape == (64, 64)"
#: The tiers that serve one row and two rows of a projection alone.
TIERS = ("w4a16_gemv", "w4a16_gemv_batch2")


@pytest.fixture
def ab(cli: Any) -> Callable[..., Any]:
    def run(*arguments: object, model: str = "qwen3.6-27b", sequences: str = "1,2") -> Any:
        counts = [int(part) for part in sequences.split(",")]
        prompts = () if "--prompt" in arguments else SHORT[: 2 * max(counts)]
        return cli("ab", model, *QUICK, *prompts, "--sequences", sequences, *arguments)

    return run


@pytest.fixture
def planted(cli: Any, ab: Callable[..., Any]) -> Callable[..., Any]:
    """Compare with an arm B whose GEMVs are replaced."""

    def run(what: str, *arguments: object, names: tuple[str, ...] = TWO, sequences: str = "2") -> Any:
        cli.install(PLANTED.format(what=what, names=names), "planted")
        ran = ab("--b-plugin", "planted", "--format", "json", *arguments, sequences=sequences)
        return ran, ran.json

    return run


def failed(found: Any) -> set[str]:
    return {check["name"] for model in found["models"] for check in model["checks"] if check["outcome"] == "failed"}


def test_equal_arms_are_called_equal(ab: Callable[..., Any]) -> None:
    ran = ab()
    assert ran.code == 0
    assert ran.err == ""
    first, *_, last = ran.out.rstrip().splitlines()
    assert first == last
    assert first.startswith(
        "EQUAL, but nothing differed: the arms are the same; on qwen3.6-27b (from one model, one run"
    )
    assert "nothing: the arms are the same" in ran.out
    assert "hidden_size 5120 -> 64" in ran.out
    assert ran.out.isascii()


def test_cache_that_keeps_nothing_informs_and_decides_nothing(ab: Callable[..., Any], unkept: Finding) -> None:
    ran = ab("--format", "json", sequences="1")
    assert (ran.code, ran.json["verdict"]) == (0, "equal")
    said = [(c["where"], c["outcome"], c["text"]) for c in ran.json["models"][0]["checks"] if c["name"] == "cache"]
    text = f"CACHE_NOT_KEPT: {unkept.subject}: {unkept.why}"
    assert said == [("boot of arm A", "informs", text), ("boot of arm B", "informs", text)]


def test_arms_of_levers_that_change_launches_alone_are_equal_and_say_what_differs(ab: Callable[..., Any]) -> None:
    ran = ab("--a", "MUSTER_QKV_ARM=tiled", "--b", "MUSTER_QKV_ARM=wide", "--format", "json", sequences="1,4")
    assert (ran.code, ran.json["verdict"]) == (0, "equal")
    (model,) = ran.json["models"]
    parts = {part["title"]: part["changes"] for part in model["difference"]["parts"]}
    assert list(parts) == ["levers"]
    (change,) = parts["levers"]
    assert ran.json["headline"].startswith("EQUAL: A and B give the same bits; on qwen3.6-27b")
    assert (change["name"], change["before"], change["after"]) == (
        "MUSTER_QKV_ARM", {"value": "tiled"}, {"value": "wide"},
    )  # fmt: skip
    one, four = model["rows"]
    assert one["kernels"]["differing"] == []
    assert {"w4a16::w4a16_gemm_t_p3", "w4a16_gemv::w4a16_gemv_qgkv_batch3"} <= {*four["kernels"]["differing"]}
    # ... and what a lever alone selects is held against its contract too.
    proven = {proof["key"]: proof for proof in model["proofs"]}
    assert {*four["kernels"]["differing"]} <= {*proven}
    assert all(proof["cases"] > 0 and not proof["problems"] for proof in proven.values())
    assert proven["w4a16::w4a16_gemm_t_p3"]["arm"] == "B"
    assert four["kernels"]["seconds_a"] > 0
    assert four["kernels"]["seconds_b"] > 0
    assert four["floor"]["worst"] > 0


def test_wrong_kernel_is_caught_and_named(planted: Callable[..., Any]) -> None:
    ran, found = planted("out[...] = (right.astype(np.float32) * 1.05).astype(right.dtype)")
    assert ran.code == 1
    assert found["verdict"] == "differ"
    assert found["headline"].startswith(
        "DIFFER: B cannot stand in for A: contract at w4a16_gemv::w4a16_gemv_batch2: "
        "w4a16_gemv::w4a16_gemv_batch2 of arm B by planted 1.0: NUMERICS_FAILED: case "
    )
    assert {"contract", "identity", "kl"} <= failed(found) <= {"contract", "identity", "kl", "largest", "parting"}


def test_wrong_kernel_that_its_contract_does_not_see_is_caught_by_kl(planted: Callable[..., Any]) -> None:
    what = f"{OUT}: out[...] = (right.astype(np.float32) * 1.1).astype(right.dtype)"
    ran, found = planted(what, names=TIERS, sequences="1,2")
    (model,) = found["models"]
    assert [proof["problems"] for proof in model["proofs"]] == [[]] * 2 * len(TIERS)
    assert {"kl"} <= failed(found) <= {"kl", "largest", "parting"}
    assert ran.code == 1
    assert all(row["distance"]["median"] > row["allowed"]["median"] > 0 for row in model["rows"])
    assert all(row["b"]["is_identical"] for row in model["rows"])  # it is wrong in the same way alone


def test_kernel_whose_rows_depend_on_their_number_is_caught_by_bits_of_one(planted: Callable[..., Any]) -> None:
    ran, found = planted("out[...] = otherwise(x, w)")
    assert ran.code == 1
    assert failed(found) == {"identity"}
    (row,) = found["models"][0]["rows"]
    assert row["a"]["is_identical"]
    assert row["b"]["broken"][0] == 0
    # ... and the layer where that began is named, with what ran there in company and not alone.
    (text,) = [check["text"] for check in found["models"][0]["checks"] if check["outcome"] == "failed"]
    assert re.search(r"first behind layers\.0\.gdn, where .*w4a16_gemv::w4a16_gemv_batch2.* ran$", text)
    assert row["distance"]["worst"] <= row["allowed"]["kl"]


@pytest.mark.parametrize(("identity", "code"), [("off", 0), ("reference", 1), ("always", 1)])
def test_identity_decides_as_asked(planted: Callable[..., Any], identity: str, code: int) -> None:
    ran, _ = planted("out[...] = otherwise(x, w)", "--identity", identity)
    assert ran.code == code


def test_kernels_that_round_otherwise_agree(planted: Callable[..., Any]) -> None:
    ran, found = planted(f"{OUT}: out[...] = otherwise(x, w)", names=TIERS, sequences="1,2")
    assert (ran.code, found["verdict"]) == (0, "agree")
    assert found["headline"].startswith("AGREE: B computes what A computes, up to rounding; on qwen3.6-27b")
    rows = found["models"][0]["rows"]
    assert all(0 < row["distance"]["worst"] <= row["allowed"]["kl"] for row in rows)
    code = {key: (one, other) for key, one, other in found["models"][0]["code"]}
    assert set(code) == {f"w4a16_gemv::{name}" for name in TIERS}
    assert all(a.startswith("kernel-muster ") and b.startswith("planted 1.0, ") for a, b in code.values())


def test_kl_that_is_given_decides_in_place_of_the_measured_one(planted: Callable[..., Any]) -> None:
    ran, found = planted(f"{OUT}: out[...] = otherwise(x, w)", "--max-kl", "0", names=TIERS)
    assert (ran.code, failed(found)) == (1, {"kl", "largest"})


def test_kernel_that_differs_from_run_to_run_is_caught(planted: Callable[..., Any], tmp_path: Any) -> None:
    state = "planted.calls = getattr(planted, 'calls', 0) + 1"
    ran, found = planted(f"{state}; out[...] = -right if planted.calls % 7 == 0 else right", names=TIERS)
    assert ran.code == 1
    assert {"contract", "repeats"} <= failed(found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, for arithmetic on what is no number
def test_arm_whose_kernel_gives_no_numbers_is_caught_and_named(planted: Callable[..., Any]) -> None:
    ran, found = planted("out[...] = np.nan")
    assert (ran.code, found["verdict"]) == (1, "differ")
    assert failed(found) == {"contract", "decode"}
    (stopped,) = [check for check in found["models"][0]["checks"] if check["name"] == "decode"]
    assert stopped["text"].startswith("arm B stopped: ContractError: argmax_bf16: NaN in row 0 of logits")
    assert found["headline"].startswith("DIFFER: B cannot stand in for A: contract at w4a16_gemv::w4a16_gemv_batch2")


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_rounding_that_cannot_be_measured_is_inconclusive(
    ab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    from kernel_muster.ab import nudging

    def fails(*arguments: object) -> None:
        raise error("full")

    monkeypatch.setattr(nudging, "nudged", fails)
    arms = ("--a", "MUSTER_QKV_ARM=tiled", "--b", "MUSTER_QKV_ARM=wide")
    ran = ab(*arms, "--format", "json", sequences="4")
    assert (ran.code, ran.json["verdict"], failed(ran.json)) == (1, "inconclusive", set())
    (check,) = [one for one in ran.json["models"][0]["checks"] if one["outcome"] == "inconclusive"]
    assert check["text"].startswith("arm A, booted again to measure rounding, stopped: ")
    assert "full" in check["text"]
    assert check["text"].endswith("; --max-kl judges without it")
    assert ab(*arms, "--max-kl", "0", sequences="4").code == 0


def test_kernel_that_raises_is_named(planted: Callable[..., Any]) -> None:
    _, found = planted(f"{OUT}: raise ValueError('boom')", names=TIERS, sequences="2")
    (stopped,) = [check for check in found["models"][0]["checks"] if check["name"] == "decode"]
    assert stopped["text"].startswith("arm B stopped: ValueError: boom (in w4a16_gemv::w4a16_gemv")


def test_advisory_prints_the_verdict_and_exits_0(planted: Callable[..., Any]) -> None:
    ran, found = planted("out[...] = 0", "--advisory")
    assert (ran.code, found["verdict"], found["advisory"]) == (0, "differ", True)


def test_wrong_kernel_in_the_text_report_comes_first(cli: Any, ab: Callable[..., Any]) -> None:
    cli.install(PLANTED.format(what="out[...] = 0", names=TWO), "planted")
    ran = ab("--b-plugin", "planted", sequences="2")
    assert ran.code == 1
    blocks = ran.out.split("\n\n")
    assert blocks[0].startswith("DIFFER: B cannot stand in for A")
    assert blocks[1].startswith("Decides against B: ")
    assert "w4a16_gemv::w4a16_gemv_batch2 of arm B by planted 1.0" in blocks[1]
    assert "code of w4a16_gemv::w4a16_gemv_batch2: kernel-muster " in ran.out


@pytest.mark.parametrize("model", ["qwen3.6-35b-a3b", "ornith-1.0-35b", "holo-3.1-35b-a3b"])
def test_every_kind_of_model_decodes_at_reduced_size(ab: Callable[..., Any], model: str) -> None:
    ran = ab("--b", "MUSTER_QKV_ARM=per_seq", "--format", "json", model=model, sequences="2")
    assert (ran.code, ran.json["verdict"]) == (0, "equal"), ran.json["headline"]


def test_several_models_are_one_comparison(cli: Any) -> None:
    more = ("--sequences", "1", *SHORT[:2], "--format", "json", "--repeats", "2")
    ran = cli("ab", "qwen3.6-27b", "qwen3.8-27b", *QUICK, *more)
    assert ran.code == 0
    assert [model["model"] for model in ran.json["models"]] == ["qwen3.6-27b", "qwen3.8-27b"]
    assert "one model" not in ran.json["headline"]
    assert "one run" not in ran.json["headline"]


def test_drafting_reports_its_verify_steps(cli: Any) -> None:
    common = ("ab", "qwen3.6-27b", "--target", "cpu", "--repeats", "1", "--sequences", "2", "--format", "json")
    ran = cli(*common, "--tokens", "12", "--drafts", "2")
    assert ran.code == 0
    (row,) = ran.json["models"][0]["rows"]
    spoken = row["a"]["speculation"]
    assert spoken["steps"] >= 16
    assert spoken["drafted"] == 2 * spoken["steps"]
    assert spoken["step_ms"] > 0
    assert spoken["same_tokens"]


def test_kernel_that_is_wrong_in_verify_passes_alone_is_caught_by_drafting(planted: Callable[..., Any]) -> None:
    # Three rows of one sequence are a verify pass of two drafts: plain decode takes no tier of three.
    three = ("w4a16_gemv_batch3",)
    ran, found = planted("out[...] = -right", "--drafts", "2", names=three, sequences="1")
    assert ran.code == 1
    assert "drafting" in failed(found)
    spoken = found["models"][0]["rows"][0]["b"]["speculation"]
    assert spoken["gap"] > spoken["allowed"] > 0
    assert found["models"][0]["rows"][0]["a"]["speculation"]["same_tokens"]


def test_drafting_that_hardly_ran_proves_nothing(cli: Any) -> None:
    common = ("ab", "qwen3.6-27b", "--target", "cpu", "--repeats", "1", "--sequences", "1", "--format", "json")
    ran = cli(*common, "--tokens", "6", "--drafts", "2", *SHORT[:2])
    assert (ran.code, failed(ran.json), ran.json["verdict"]) == (1, set(), "inconclusive")
    assert ran.json["headline"].startswith(
        "INCONCLUSIVE: nothing differs, but not everything was judged: verify at all: "
    )
    assert "that proves nothing about speculation" in ran.json["headline"]


def test_drafting_without_a_head_is_refused_with_the_report(ab: Callable[..., Any]) -> None:
    ran = ab("--drafts", "2", model="holo-3.1-35b-a3b")
    assert ran.code == 1
    assert ran.out.startswith("REFUSED: arm A of holo-3.1-35b-a3b; arm B of holo-3.1-35b-a3b did not boot")
    assert "REQUEST_NOT_HONORED MUSTER_MTP_GATE_FORCE" in ran.out


def test_arm_that_does_not_boot_is_refused_with_its_report(ab: Callable[..., Any]) -> None:
    ran = ab("--b", "MUSTER_W4A16_VARIANT=v3")
    assert ran.code == 1
    assert ran.out.startswith("REFUSED: arm B of qwen3.6-27b did not boot: nothing was compared")
    assert "Arm B of qwen3.6-27b: To act on: " in ran.out
    assert "REQUEST_NOT_HONORED" in ran.out
    assert ab("--b", "MUSTER_W4A16_VARIANT=v3", "--format", "json").json["models"][0]["refused"][0][0] == "B"


def test_plugin_that_is_not_there_is_refused(ab: Callable[..., Any]) -> None:
    ran = ab("--b-plugin", "nobody")
    assert ran.code == 1
    assert ran.out.startswith("REFUSED: arm B of qwen3.6-27b did not boot")
    assert "Arm B of qwen3.6-27b: To act on: 1 PLUGIN_NOT_FOUND" in ran.out
    assert "PLUGIN_NOT_FOUND nobody" in ran.out
    assert "--b-plugin names nobody, which is not installed" in ran.out
    assert "--no-plugin" not in ran.out
    assert "--plugin names nobody" in ab("--plugin", "nobody").out


@pytest.mark.parametrize(
    ("lever", "code"), [("MUSTER_QKV_ARM=tilde", "BAD_LEVER"), ("MUSTER_QVK_ARM=tiled", "UNKNOWN_LEVER")]
)
def test_bad_lever_of_an_arm_is_refused(
    ab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, lever: str, code: str
) -> None:
    ran = ab("--a", lever)
    assert ran.code == 1
    assert code in ran.out
    assert f"where   --a {lever}\n" in ran.out
    assert f"or drop --a {lever.partition('=')[0]}\n" in ran.out
    monkeypatch.setenv(*lever.split("="))
    both = ab().out
    assert f"Arms A and B of qwen3.6-27b: To act on: 1 {code}" in both
    assert "where   environment\n" in both
    assert "or unset it\n" in both


def test_levers_that_exclude_each_other_are_told_apart_by_where_they_stand(cli: Any, ab: Callable[..., Any]) -> None:
    levers = """
import kernel_muster as km

@km.hookimpl
def muster_levers():
    return [
        km.Lever(name="MUSTER_COLD", kind="bool", default=False, doc="Cool."),
        km.Lever(name="MUSTER_HOT", kind="bool", default=False, doc="Heat.", conflicts=("MUSTER_COLD",)),
    ]
"""
    cli.install(levers, "heater")
    cli.monkeypatch.setenv("MUSTER_COLD", "1")
    out = ab("--b", "MUSTER_HOT=1").out
    assert "Arm B of qwen3.6-27b: To act on: 1 LEVER_CONFLICT" in out
    assert "where   --b MUSTER_HOT=1\n             environment\n" in out
    assert "remedy  drop --b MUSTER_HOT or MUSTER_COLD\n" in out


def test_unknown_model_is_refused(ab: Callable[..., Any]) -> None:
    ran = ab(model="qwen3.6-28b")
    assert ran.code == 1
    assert "UNKNOWN_MODEL" in ran.out


def test_model_that_nobody_knows_is_refused_before_another_has_run(cli: Any) -> None:
    ran = cli("ab", "qwen3.6-27b", "qwen3.6-28b", *QUICK, "--format", "json")
    assert (ran.code, ran.json["verdict"]) == (1, "refused")
    assert [(model["model"], model["rows"]) for model in ran.json["models"]] == [("qwen3.6-28b", [])]
    assert ran.json["headline"].endswith("did not boot: nothing was compared")


def test_what_a_later_model_cannot_be_is_a_usage_error_before_another_has_run(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernel_muster.ab import running

    monkeypatch.setattr(running, "compare_model", lambda *given: pytest.fail("it ran"))
    for more, said in (
        (("--full", "--layers", "44"), "qwen3.6-35b-a3b with 44 layers: expected a multiple of 4 up to 40"),
        (("--prompt", cli.folder / "ids.json"), "ids.json[0]: expected text, or ids from 0 to 255"),
    ):
        (cli.folder / "ids.json").write_text("[[300]]")
        ran = cli("ab", "qwen3.6-27b", "qwen3.6-35b-a3b", *QUICK, *more)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err


def test_model_that_boots_beside_one_that_does_not_is_named(cli: Any) -> None:
    arms = ("--b", "MUSTER_MOE_GROUPED_DECODE=1")  # the first has no experts
    ran = cli(
        "ab", "qwen3.6-27b", "qwen3.6-35b-a3b", *QUICK, *arms, "--sequences", "1", *SHORT[:2], "--stage", "loaded"
    )
    assert ran.code == 1
    first = ran.out.splitlines()[0]
    assert first == "REFUSED: arm B of qwen3.6-27b did not boot: compared were only qwen3.6-35b-a3b, below"


def test_what_refuses_both_arms_is_told_once(ab: Callable[..., Any]) -> None:
    out = ab("--plugin", "nobody").out
    assert out.count("PLUGIN_NOT_FOUND nobody") == 1
    assert "Arms A and B of qwen3.6-27b: To act on: 1 PLUGIN_NOT_FOUND" in out


def test_drafter_is_refused_for_it_decodes_nothing_by_itself(ab: Callable[..., Any]) -> None:
    ran = ab(model="qwen3.6-35b-a3b-dflash")
    assert ran.code == 1
    assert ran.out.startswith("REFUSED: arm A of qwen3.6-35b-a3b-dflash")
    assert "qwen3.6-35b-a3b-dflash drafts for another model: it decodes nothing by itself" in ran.out


def test_model_whose_builder_fails_is_refused(cli: Any) -> None:
    cli.acme("acme::double", after="raise RuntimeError('no layer of this kind')")
    manifest = cli.manifest()
    ran = cli("ab", "tiny", *QUICK, "--manifests", manifest.parent.parent)
    assert ran.code == 1
    assert "the model's builder failed: RuntimeError: no layer of this kind" in ran.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--a", "QKV_ARM=tiled"), "--a 'QKV_ARM=tiled': expected MUSTER_NAME=VALUE"),
        (("--b", "MUSTER_QKV_ARM="), "--b 'MUSTER_QKV_ARM=': the value is empty"),
        (("--a", "MUSTER_QKV_ARM"), "expected MUSTER_NAME=VALUE"),
        (("--a", "MUSTER_QKV_ARM=tiled", "--a", "MUSTER_QKV_ARM=wide"), "MUSTER_QKV_ARM is set twice"),
        (("--b", "MUSTER_MTP_GATE_FORCE=0"), "is pinned in both arms"),
        (("--a-plugin", "x", "--b-plugin", "x"), "plugin x is to be in A alone and in B alone"),
        (("--b-without", "silu_mul"), "--b-without: 'silu_mul' is not a key: expected module::func"),
        (
            ("--a-without", "silu::silu_mul", "--b-without", "silu::silu_mul"),
            "both arms are to do without silu::silu_mul",
        ),
        (
            ("--b-without", "silu::silu_mul"),
            "--b-without silu::silu_mul: qwen3.6-27b requires it, in layers.0.ffn, layers.1.ffn, layers.2.ffn and",
        ),
        (
            ("--a-without", "moe_shared::moe_unpermute_shared_add"),
            "qwen3.6-27b asks for no moe_shared::moe_unpermute_shared_add, so that no arm has it",
        ),
        (
            ("--b-without", "moe::moe_fused_shared"),
            "--b-without moe::moe_fused_shared: no plugin of arm B registers such a key; did you mean "
            "moe_fused_shared::moe_fused_shared_down or moe_fused_shared::moe_fused_shared_gate_up?",
        ),
        (
            ("--a-without", "silu::silu_null"),
            "--a-without silu::silu_null: no plugin of arm A registers such a key; did you mean silu::silu_mul?",
        ),
        (("--b-without", "zeta::leap"), "no plugin of arm B registers such a key; muster kernels lists all"),
        (
            ("--b-without", "w4a4::w4a4_gemm_mfast"),
            "--b-without w4a4::w4a4_gemm_mfast: on cpu arm B lacks it as it is: no plugin registers",
        ),
        (
            ("--b-without", "w4a16::w4a16_gemm_t"),
            "--b-without w4a16::w4a16_gemm_t: qwen3.6-27b never comes to it: w4a16::w4a16_gemm_t_p3 stands before it",
        ),
        (("--sequences", "1,x"), "expected numbers from 1 to 128, with commas"),
        (("--sequences", "0"), "expected numbers from 1 to 128, with commas"),
        (("--sequences", "1_0"), "expected numbers from 1 to 128, with commas"),
        (("--sequences", "9" * 5000), "expected numbers from 1 to 128, with commas"),
        (("--drafter", ""), "--drafter: an item is empty"),
        (("--b-plugin", " "), "--b-plugin: an item is empty"),
        (("--no-plugin", ""), "--no-plugin: an item is empty"),
        (("--identity", "never"), "expected reference, always or off"),
        (("--prompt", ""), "a prompt is empty"),
        (("--weights", "/nowhere"), "--weights: /nowhere is no folder"),
        (("--layers", "5"), "qwen3.6-27b with 5 layers: expected a multiple of 4 up to 64"),
        (("--target", "sm_90a"), "nothing decodes on an architecture alone; muster audit takes it"),
        (("--target", "gpu"), "'gpu' is no target"),
        (("--tokens", "1"), "greater than or equal to 2"),
        (("--max-kl", "inf"), "--max-kl inf: expected a finite number"),
        (("--least-speed", "inf"), "--least-speed inf: expected a finite number"),
    ],
)
def test_bad_option_is_a_usage_error(ab: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    ran = ab(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.split())


def test_gate_of_the_environment_is_said_as_it_is_used(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_MTP_GATE_FORCE", "0")
    common = ("ab", "qwen3.6-27b", "--target", "cpu", "--repeats", "1", "--sequences", "1", *SHORT[:2], "--tokens", "3")
    both = [line.strip() for line in cli(*common, "--drafts", "1").out.splitlines() if "both: " in line]
    assert both == ["both: the speculation gate is pinned open, over MUSTER_MTP_GATE_FORCE=0 of the environment"]
    both = [line.strip() for line in cli(*common, "--drafts", "0").out.splitlines() if "both: " in line]
    assert both == ["both: MUSTER_MTP_GATE_FORCE=0"]


def test_interrupt_is_130(ab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_muster.ab import comparing

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "distance", interrupted)
    ran = ab()
    assert (ran.code, ran.out, ran.err) == (130, "", "muster: interrupted\n")


def test_prompts_come_from_text_and_files(ab: Callable[..., Any], cli: Any) -> None:
    lines, ids = cli.folder / "prompts.txt", cli.folder / "ids.json"
    lines.write_text("hello, host\n\nand again\n")
    ids.write_text(json.dumps(["as text", [1, 2, 3]]))
    ran = ab("--prompt", lines, "--prompt", ids, "--prompt", "hello, host", "--format", "json", sequences="2,5")
    assert ran.code == 0
    (model,) = ran.json["models"]
    assert model["prompts"] == "4 given, 3 to 11 tokens"
    assert [row["prompts"] for row in model["rows"]] == [2, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompts/none", "there is no such file"),
        ("none.txt", "there is no such file"),
        ("none.json", "there is no such file"),
        (".", "it is no file"),
        ("/dev/null", "it is no file"),
        ("a\udcff", "no UTF-8 at character 1 of a prompt"),
    ],
)
def test_prompt_that_is_no_text_and_no_file_is_a_usage_error(ab: Callable[..., Any], text: str, said: str) -> None:
    ran = ab("--prompt", text)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_text_with_a_slash_among_words_is_a_text(ab: Callable[..., Any]) -> None:
    assert ab("--prompt", "and/or this", sequences="1").code == 0


def test_more_prompts_than_sequences_are_a_usage_error(ab: Callable[..., Any]) -> None:
    ran = ab("--prompt", "one", "--prompt", "two", sequences="1")
    assert (ran.code, ran.out) == (2, "")
    assert "--prompt: 2 prompts for 1 sequences: raise --sequences, or drop prompts" in ran.err


def test_one_prompt_is_said_in_the_first_line(ab: Callable[..., Any]) -> None:
    ran = ab("--prompt", "x" * 20, sequences="2")
    assert "(from one model, one prompt, one run, reduced size, random weights: " in ran.out.splitlines()[0]
    assert "1 prompts for 2 sequences: equal ones ask for equal experts" in ran.out


@pytest.mark.parametrize("text", ['["\\ud800"]', "{}", "[[]]", "[[999]]", "[[true]]", "[1.5]", "[", '[""]'])
def test_prompt_file_that_makes_no_sense_is_a_usage_error(ab: Callable[..., Any], cli: Any, text: str) -> None:
    file = cli.folder / "ids.json"
    file.write_text(text)
    ran = ab("--prompt", file)
    assert (ran.code, ran.out) == (2, "")
    assert ("--full" in ran.err) is (text in ("[[]]", "[[999]]", "[[true]]", "[1.5]"))


def test_speed_decides_only_when_asked(ab: Callable[..., Any]) -> None:
    ran = ab("--least-speed", "100", "--format", "json", sequences="1")
    assert (ran.code, failed(ran.json)) == (1, {"speed"})


def test_output_and_markdown_say_the_same(ab: Callable[..., Any], cli: Any) -> None:
    file = cli.folder / "ab.md"
    ran = ab("--format", "markdown", "--output", file, sequences="1")
    text = file.read_text()
    assert ran.code == 0
    assert text.startswith("## EQUAL, but nothing differed: the arms are the same; on qwen3.6-27b")
    assert "| C | A tok/s | B tok/s |" in text
    assert ran.out.startswith("EQUAL, ")


def test_levers_that_choose_the_same_kernels_say_that_nothing_differed(ab: Callable[..., Any]) -> None:
    ran = ab("--a", "MUSTER_QKV_ARM=tiled", "--b", "MUSTER_QKV_ARM=wide", sequences="1")
    assert ran.code == 0
    assert ran.out.startswith(
        "EQUAL, but nothing differed: no kernel that ran and no launch is another: what is set chose"
    )


def test_arm_without_a_fused_kernel_takes_its_parts(ab: Callable[..., Any]) -> None:
    fused = "paged_decode::paged_decode_attn_fresh"
    ran = ab("--b-without", fused, "--format", "json", sequences="1")
    assert (ran.code, ran.json["verdict"], ran.json["b"]) == (0, "equal", f"without {fused}")
    (model,) = ran.json["models"]
    parts = {part["title"]: part["changes"] for part in model["difference"]["parts"]}
    assert [(c["name"], c["after"]["value"]) for c in parts["levers"]] == [("MUSTER_DISABLE", fused)]
    assert [c["name"] for c in parts["kernels"]] == [fused]
    (row,) = model["rows"]
    assert {fused, "rope::qk_norm_rope_append"} <= {*row["kernels"]["differing"]}
    assert {proof["arm"] for proof in model["proofs"] if proof["key"] == fused} == {"A"}


def test_arm_without_a_key_goes_on_from_what_the_environment_switches_off(
    ab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_DISABLE", "sampling::verify_greedy")
    ran = ab("--a-without", "sampling::sample_top_k_top_p", "--format", "json", sequences="1")
    assert (ran.code, ran.json["verdict"]) == (1, "refused")  # what the environment switches off still refuses
    (model,) = ran.json["models"]
    subjects = [[finding["subject"] for finding in report["findings"]] for _, report, _ in model["refused"]]
    assert subjects == [["sampling::verify_greedy"]] * 2


# A plugin whose attention at decode, whichever form serves, is right until contexts are so long.
LATE = """
import numpy as np
import kernel_muster as km
from kernel_muster.plugins import paged_decode


def late(function):
    def kernel(context_lens, out, **more):
        function(context_lens=context_lens, out=out, **more)
        for row, length in enumerate(context_lens):
            if length in (29, 30, 31):
                out[row] = np.random.default_rng(0).standard_normal(out[row].shape) * 3
    return kernel


@km.hookimpl
def muster_kernels():
    return [
        km.KernelSpec(
            key=spec.key, contract=spec.contract, archs=("cpu",),
            backend=km.PythonKernel(late(spec.backend.function)), overrides="kernel-muster",
        )
        for spec in paged_decode.muster_kernels() if spec.archs == ("cpu",)
    ]
"""


@pytest.mark.parametrize("model", ["qwen3.6-35b-a3b", "qwen3.6-27b"])
def test_kernel_that_computes_garbage_from_some_token_on_is_caught(cli: Any, model: str) -> None:
    cli.install(LATE, "late")
    prompts = cli.folder / "ids.json"
    prompts.write_text(json.dumps(np.random.default_rng(0).integers(0, 256, (4, 20)).tolist()))
    common = ("--target", "cpu", "--repeats", "1", "--drafts", "0", "--sequences", "1,4", "--tokens", "16")
    ran = cli("ab", model, "--b-plugin", "late", "--prompt", prompts, *common, "--format", "json")
    assert (ran.code, ran.json["verdict"]) == (1, "differ")
    assert {"largest"} <= failed(ran.json) <= {"largest", "parting", "contract"}  # the last by luck of its lengths
    for row in ran.json["models"][0]["rows"]:
        assert row["distance"]["worst"] <= row["allowed"]["kl"]  # medians say nothing of it
        assert row["distance"]["largest_at"][1] in (9, 10, 11)  # the prompt has 20 tokens
