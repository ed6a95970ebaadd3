"""``muster ab``: equal arms are called equal, wrong kernels are caught and named, refusals keep their reports."""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_muster.audit.proof import proofs
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware import stuck

# A plugin that replaces tiers of the NVFP4 GEMV: right ones, with a change by each test.
PLANTED = """
import numpy as np
import kernel_muster as km
from kernel_muster.plugins._reference import project
from kernel_muster.registry.contract import nvfp4


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
TWO = ("w4a16_gemv_batch2",)
#: The reduced delta net's last projection: no case of the contract has its shape; these tiers serve one row and two.
OUT = "if w.shape == (64, 64)"
#: The tiers for one row and two rows of a projection alone.
TIERS = ("w4a16_gemv", "w4a16_gemv_batch2")


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
    # ... and a kernel selected by a lever alone is checked against its contract too.
    proven = {proof["key"]: proof for proof in model["proofs"]}
    assert {*four["kernels"]["differing"]} <= {*proven}
    assert all(proof["cases"] > 0 and not proof["problems"] for proof in proven.values())
    assert proven["w4a16::w4a16_gemm_t_p3"]["arm"] == "B"
    assert four["kernels"]["seconds_a"] > 0
    assert four["kernels"]["seconds_b"] > 0
    assert four["floor"]["worst"] > 0


def test_proof_that_does_not_end_on_a_device_leaves_a_verdict(
    ab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    memory = replace(proofs.host_memory(), wait=is_over.wait, device=3)
    monkeypatch.setattr(proofs, "host_memory", lambda: memory)
    monkeypatch.setattr("kernel_muster.audit.checking.CASE_S", 0.3)
    monkeypatch.setattr(stuck, "_STUCK", {})
    monkeypatch.setattr(stuck, "_KEPT", [])
    try:
        ran = ab("--a", "MUSTER_QKV_ARM=tiled", "--b", "MUSTER_QKV_ARM=wide", "--format", "json", sequences="4")
    finally:
        is_over.set()
    assert (ran.code, ran.json["verdict"]) == (1, "differ")
    first, *rest = [proof["problems"] for proof in ran.json["models"][0]["proofs"]]
    assert [problem.partition(" ")[0] for problem in first] == ["NUMERICS_FAILED:"]
    assert rest
    assert {problem.partition(" ")[0] for problems in rest for problem in problems} == {"UNCHECKED:"}


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
    # ... and the finding names the layer where that began, with the kernels that ran only in company.
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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from NumPy, for arithmetic on NaN
def test_arm_whose_kernel_gives_no_numbers_is_caught_and_named(planted: Callable[..., Any]) -> None:
    ran, found = planted("out[...] = np.nan")
    assert (ran.code, found["verdict"]) == (1, "differ")
    assert failed(found) == {"contract", "decode"}
    (stopped,) = [check for check in found["models"][0]["checks"] if check["name"] == "decode"]
    assert stopped["text"].startswith("arm B stopped: ContractError: argmax_bf16: NaN in row 0 of logits")
    assert found["headline"].startswith("DIFFER: B cannot stand in for A: contract at w4a16_gemv::w4a16_gemv_batch2")


def test_logits_of_the_engine_that_are_no_numbers_in_both_arms_are_not_called_equal(cli: Any, ab: Any) -> None:
    what = "if w.shape == (256, 64): out[..., 3] = -np.inf"  # the LM head of the reduced model
    cli.install(PLANTED.format(what=what, names=TIERS), "planted")
    found = ab("--format", "json", sequences="1").json
    assert (found["verdict"], failed(found)) == ("differ", {"decode"})
    (stopped,) = [check for check in found["models"][0]["checks"] if check["name"] == "decode"]
    assert stopped["text"].startswith("arm A stopped: MusterError: sequence 0, token 0: 1 of 256 logits are no finite ")


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_rounding_that_cannot_be_measured_is_inconclusive(
    ab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    from kernel_muster.ab.nudge import nudging

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


def test_several_models_are_one_comparison(ab: Any) -> None:
    ran = ab("qwen3.8-27b", "--format", "json", "--repeats", "2", sequences="1")
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


def test_drafting_that_hardly_ran_proves_nothing(cli: Any, ab: Any) -> None:
    common = ("ab", "qwen3.6-27b", "--target", "cpu", "--repeats", "1", "--sequences", "1", "--format", "json")
    ran = cli(*common, "--tokens", "6", "--drafts", "2", *ab.prompts(1))
    assert (ran.code, failed(ran.json), ran.json["verdict"]) == (1, set(), "inconclusive")
    assert ran.json["headline"].startswith(
        "INCONCLUSIVE: nothing differs, but not everything was judged: verify at all: "
    )
    assert "that proves nothing about speculation" in ran.json["headline"]


def test_speed_decides_only_when_asked(ab: Callable[..., Any]) -> None:
    ran = ab("--least-speed", "100", "--format", "json", sequences="1")
    assert (ran.code, failed(ran.json)) == (1, {"speed"})


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
    chain = [fused, *(f"paged_decode::paged_decode_attn{form}" for form in ("_gated", ""))]
    assert [c["name"] for c in parts["kernels"]] == [" > ".join(chain)]
    (row,) = model["rows"]
    assert {fused, "rope::qk_norm_rope_append"} <= {*row["kernels"]["differing"]}
    assert {proof["arm"] for proof in model["proofs"] if proof["key"] == fused} == {"A"}


# A plugin whose attention at decode is right, in any variant, up to this context length.
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
        assert row["distance"]["worst"] <= row["allowed"]["kl"]  # medians do not show it
        assert row["distance"]["largest_at"][1] in (9, 10, 11)  # the prompt has 20 tokens
