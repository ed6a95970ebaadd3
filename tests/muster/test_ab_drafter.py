"""``muster ab --drafter``: a block-diffusion drafter drafts in both arms, and its kernels are compared too."""

from collections.abc import Callable
from typing import Any

import kernel_muster as km
import pytest
from kernel_muster.ab.decoding.sizes import HOST, fitted_drafter, sizing
from kernel_muster.ab.drafting import TARGET_LEVERS
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.models.drafter import drafter_from_dims
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.registry.discovery.discover import discover

TARGET, DRAFTER = "qwen3.6-35b-a3b", "qwen3.6-35b-a3b-dflash"
QUICK = ("--target", "cpu", "--repeats", "1", "--tokens", "10", "--sequences", "2", "--prompt", "abc", "--prompt", "bd")
# A plugin with wrong rotary positions for the drafter. Its target uses others.
YARN = """
import kernel_muster as km
from kernel_muster.plugins.rope.cpu import rope_yarn


def planted(**arguments):
    rope_yarn(**(arguments | {"theta": 2 * arguments["theta"]}))


@km.hookimpl
def muster_kernels():
    return [
        km.KernelSpec(
            key="rope::rope_yarn", contract="rope_yarn", archs=("cpu",), backend=km.PythonKernel(planted),
            overrides="kernel-muster",
        )
    ]
"""


@pytest.fixture
def ab(cli: Any) -> Callable[..., Any]:
    def run(*arguments: object, model: str = TARGET, drafter: str = DRAFTER) -> Any:
        return cli("ab", model, *QUICK, "--drafter", drafter, *arguments)

    return run


def test_drafter_drafts_in_both_arms_and_changes_no_token(ab: Callable[..., Any]) -> None:
    ran = ab("--format", "json")
    assert (ran.code, ran.json["verdict"]) == (0, "equal"), ran.err
    (model,) = ran.json["models"]
    (row,) = model["rows"]
    for side in (row["a"], row["b"]):
        spoken = side["speculation"]
        assert (spoken["proposer"], spoken["drafts"], spoken["same_tokens"]) == ("dflash", 4, True)
        assert spoken["steps"] >= 16
        assert spoken["drafted"] == 4 * spoken["steps"]
    drafter = model["drafter"]
    assert (drafter["name"], drafter["drafts"], drafter["weights"]) == (DRAFTER, 4, "random from seed 1")
    assert drafter["set_hashes"][0] == drafter["set_hashes"][1] != model["set_hashes"][0]
    assert drafter["difference"]["equal"]
    assert "hidden_size 2048 -> 64" in drafter["size"]


def test_text_report_names_the_drafter_and_what_differs_between_its_boots(ab: Callable[..., Any]) -> None:
    ran = ab("--b", "MUSTER_DFLASH_COMMIT_CTX=0")
    assert ran.code == 0
    assert ran.out.startswith("EQUAL: A and B give the same bits; the drafter's boots differ: see Drafting; on ")
    assert f"drafter {DRAFTER}, weights: random from seed 1; REDUCED SIZE: " in ran.out
    assert "Drafting by the block-diffusion drafter, 4 drafts a step" in ran.out
    both = ran.out.split(f"the boots of the drafter {DRAFTER}")[1].split("\n\n")[0]
    assert "MUSTER_DFLASH_COMMIT_CTX: value 1 -> 0" in both


def test_wrong_kernel_that_only_the_drafter_asks_for_is_named(ab: Callable[..., Any], cli: Any) -> None:
    cli.install(YARN, "yarn")
    ran = ab("--b-plugin", "yarn", "--format", "json")
    assert (ran.code, ran.json["verdict"]) == (1, "differ")
    assert ran.json["headline"].startswith(
        "DIFFER: B cannot stand in for A: contract at rope::rope_yarn: rope::rope_yarn of arm B by yarn 1.0: "
        "NUMERICS_FAILED: case "
    )
    (model,) = ran.json["models"]
    assert [key for key, _, _ in model["code"]] == ["rope::rope_yarn"]
    assert {proof["arm"]: bool(proof["problems"]) for proof in model["proofs"]} == {"A": False, "B": True}
    # A draft is only a guess: a wrong drafter changes no token.
    assert all(row[side]["speculation"]["same_tokens"] for row in model["rows"] for side in "ab")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--drafts", "2"), "--drafts is of the MTP head, and a drafter fills blocks of its own: leave one out"),
        (("--weights", "/nowhere"), "--weights and --drafter-weights go together"),
        (("--drafter-weights", "/nowhere"), "--weights and --drafter-weights go together"),
        (("qwen3.6-27b",), f"--drafter {DRAFTER} drafts for one model: compare 2 one by one"),
    ],
)
def test_options_that_contradict_a_drafter_are_usage_errors(
    ab: Callable[..., Any], arguments: tuple[str, ...], said: str
) -> None:
    ran = ab(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_weights_of_a_drafter_need_a_drafter(cli: Any) -> None:
    ran = cli("ab", TARGET, *QUICK, "--drafter-weights", "/nowhere")
    assert (ran.code, ran.out) == (2, "")
    assert "--drafter-weights: name the drafter too, with --drafter" in ran.err


def test_drafter_of_another_model_is_a_usage_error(ab: Callable[..., Any]) -> None:
    ran = ab(model="qwen3.6-27b")
    assert (ran.code, ran.out) == (2, "")
    assert f"--drafter {DRAFTER}: it drafts for {TARGET}, not for qwen3.6-27b" in ran.err


def test_model_that_is_no_drafter_is_a_usage_error(ab: Callable[..., Any]) -> None:
    ran = ab(drafter="qwen3.6-27b")
    assert (ran.code, ran.out) == (2, "")
    assert "--drafter qwen3.6-27b: qwen3.6-27b is no drafter: its manifest has no [dflash] table" in ran.err


def test_drafter_that_nobody_knows_is_refused_with_its_report(ab: Callable[..., Any]) -> None:
    ran = ab(drafter="qwen3.6-35b-a3b-dflesh")
    assert ran.code == 1
    assert ran.out.startswith("REFUSED: ")
    assert "UNKNOWN_MODEL" in ran.out
    assert "did you mean" in ran.out or DRAFTER in ran.out


def test_levers_that_a_drafter_cannot_have_are_set_for_its_target_alone(ab: Callable[..., Any]) -> None:
    ran = ab("--b", "MUSTER_MOE_GROUPED_DECODE=1", "--identity", "off", "--format", "json")
    assert ran.json["verdict"] in ("equal", "agree"), ran.json["headline"]
    assert ran.json["models"][0]["drafter"]["difference"]["equal"]


def _is_refused(levers: dict[str, str]) -> bool:
    try:
        with km.boot(DRAFTER, target="cpu", levers=levers) as boot:
            drafter_from_dims(model_dims(boot.manifest), boot.kernels)  # as beside a target
    except km.BootRefused as refused:
        return "REQUEST_NOT_HONORED" in {row.code for row in refused.report.findings}
    return False


def test_levers_of_the_target_alone_are_those_that_refuse_a_drafter() -> None:
    switches = [lever.name for lever in discover().levers if lever.kind == "bool"]
    found = {name for name in switches if any(_is_refused({name: value}) for value in "01")}
    assert found == {*TARGET_LEVERS}


def test_fitted_drafter_reads_layers_that_its_target_has() -> None:
    manifests = Catalogue.from_folders([manifest_folder()])
    target, drafter = (manifests.resolve(name).manifest for name in (TARGET, DRAFTER))
    assert target is not None
    assert drafter is not None
    assert fitted_drafter(drafter, target, target, None).dflash == drafter.dflash
    fewer = sizing(is_reduced=False, layers=8)(target)
    assert fitted_drafter(drafter, target, fewer, None).dflash["target_layer_ids"] == [0, 2, 3, 5, 7]
    small = sizing(is_reduced=True, layers=None)(target)
    dims = model_dims(fitted_drafter(drafter, target, small, HOST))
    assert dims.drafter is not None
    assert (dims.hidden, dims.vocab) == (small.model.hidden_size, small.model.vocab_size)
    assert dims.drafter.target_layers == (0, 1, 2, 3)
    assert (dims.drafter.gamma, dims.drafter.window, dims.drafter.mask_id) == (4, 32, dims.vocab - 1)
