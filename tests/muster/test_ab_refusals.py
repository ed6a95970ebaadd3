"""``muster ab`` with an arm that does not boot: the arm, the reason, the remedy, and no comparison."""

from collections.abc import Callable
from typing import Any

import pytest


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


def test_model_that_nobody_knows_is_refused_before_another_has_run(ab: Callable[..., Any]) -> None:
    ran = ab("qwen3.6-28b", "--format", "json")
    assert (ran.code, ran.json["verdict"]) == (1, "refused")
    assert [(model["model"], model["rows"]) for model in ran.json["models"]] == [("qwen3.6-28b", [])]
    assert ran.json["headline"].endswith("did not boot: nothing was compared")


def test_what_a_later_model_cannot_be_is_a_usage_error_before_another_has_run(
    cli: Any, ab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernel_muster.ab import running

    monkeypatch.setattr(running, "compare_model", lambda *given: pytest.fail("it ran"))
    for more, said in (
        (("--full", "--layers", "44"), "qwen3.6-35b-a3b with 44 layers: expected a multiple of 4 up to 40"),
        (("--prompt", cli.folder / "ids.json"), "ids.json[0]: expected text, or ids from 0 to 255"),
    ):
        (cli.folder / "ids.json").write_text("[[300]]")
        ran = cli("ab", "qwen3.6-27b", "qwen3.6-35b-a3b", *ab.quick, *more)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err


def test_model_that_boots_beside_one_that_does_not_is_named(ab: Callable[..., Any]) -> None:
    arms = ("--b", "MUSTER_MOE_GROUPED_DECODE=1")  # the first has no experts
    ran = ab("qwen3.6-35b-a3b", *arms, "--stage", "loaded", sequences="1")
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


@pytest.fixture
def built(cli: Any, ab: Any) -> Callable[..., Any]:
    """Compare on a plugin's model, whose builder ends as a test says."""

    def run(after: str, *arguments: object, asked: str = "acme::double") -> Any:
        cli.acme(asked, after=after)
        return cli("ab", "tiny", *ab.quick, "--manifests", cli.manifest().parent.parent, *arguments)

    return run


SPEECHLESS = "raise type('Speechless', (Exception,), {'__str__': lambda self: 1 / 0})"


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("raise RuntimeError('no layer\\nof this kind')", "RuntimeError: no layer of this kind"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise km.MusterError('no')", "MusterError: no"),
        (SPEECHLESS, "Speechless: (its text cannot be shown)"),
    ],
)
def test_builder_that_fails_is_an_internal_error_and_is_told_where(
    built: Callable[..., Any], after: str, said: str
) -> None:
    ran = built(after)
    assert ran.code == 3
    first = "INCOMPLETE: the model's builder failed in arm A of tiny and arm B of tiny: nothing was compared"
    assert ran.out.splitlines()[0] == first
    assert f"Arms A and B of tiny: not built\n  the model's builder failed: {said} (at " in ran.out
    assert "; --verbose shows its traceback\n" in ran.out
    errors = [line for line in ran.err.splitlines() if line.startswith("muster: ")]
    assert [line.partition(" (at ")[0] for line in errors] == [f"muster: the model's builder failed: {said}"]


def test_builder_that_fails_is_no_verdict_for_a_reader_of_json_and_for_advisory(built: Callable[..., Any]) -> None:
    ran = built("raise RuntimeError('no layer')", "--format", "json", "--verbose", "--advisory")
    assert (ran.code, ran.json["verdict"], ran.json["passed"]) == (3, "incomplete", False)
    assert ran.json["models"][0]["failed"] == ["A", "B"]
    assert "muster: Traceback (most recent call last):\n" in ran.err


def test_builder_that_fails_in_an_arm_that_is_refused_is_a_refusal(built: Callable[..., Any]) -> None:
    ran = built("raise RuntimeError('no layer')", "--format", "json", asked="acme::gone")
    assert (ran.code, ran.json["verdict"], ran.json["models"][0]["failed"]) == (1, "refused", [])


@pytest.mark.parametrize("after", ["return []", "return [] if weights is None else weights.get('embedding')"])
def test_model_of_another_kind_is_refused_whatever_it_does_with_weights(built: Callable[..., Any], after: str) -> None:
    ran = built(after)
    assert ran.code == 1
    assert ran.out.startswith("REFUSED: arm A of tiny; arm B of tiny did not boot: nothing was compared\n")
    assert "the builder made a list, which decodes nothing by itself" in ran.out


def test_arm_without_a_key_goes_on_from_what_the_environment_switches_off(
    ab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_DISABLE", "sampling::verify_greedy")
    ran = ab("--a-without", "sampling::sample_top_k_top_p", "--format", "json", sequences="1")
    assert (ran.code, ran.json["verdict"]) == (1, "refused")  # a kernel disabled by the environment still refuses
    (model,) = ran.json["models"]
    subjects = [[finding["subject"] for finding in report["findings"]] for _, report, _ in model["refused"]]
    assert subjects == [["sampling::verify_greedy"]] * 2


@pytest.mark.parametrize(("label", "said"), [
    ('for_layer("head").', "tiny requires it, in head: there is nothing in its place"),
    ("", "tiny requires it: there is nothing in its place"),
])  # fmt: skip
def test_arm_without_what_a_model_requires_is_a_usage_error_that_names_the_layers(
    built: Callable[..., Any], label: str, said: str
) -> None:
    ran = built(f'kernels.{label}kernel("acme", "twice"); return None', "--b-without", "acme::twice")
    assert (ran.code, ran.out) == (2, "")
    assert f"--b-without acme::twice: {said}\n" in ran.err
