"""``muster boot`` and ``muster ab`` with a model that decodes itself: it takes part, and its results are checked."""

import re
import sys
from typing import Any

import pytest

# A model that counts on from the last token of a prompt, with a change of the result by each test.
COUNTS = """
import itertools
import sys

import numpy as np
import kernel_muster as km


def double(x, out):
    out[...] = x * {factor}


@km.hookimpl
def muster_contracts():
    signature = km.Signature((km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out")))
    return [km.Contract(
        name="acme_double", summary="out = 2 * x", signature=signature,
        reference=lambda arguments, dims: {{"out": arguments["x"].astype("f8") * 2}},
        cases=(km.Case("one", {{"M": 1}}),), tolerance=km.Tolerance(0, 0, "exact"),
    )]


@km.hookimpl
def muster_kernels():
    return [km.KernelSpec(key="acme::double", contract="acme_double", archs=("cpu",), backend=km.PythonKernel(double))]


class Counts:
    def __init__(self, kernels, weights):
        {built}
        self.kernels = kernels
        self.double = kernels.for_layer("head").kernel("acme", "double")
        self.heights = weights and weights.find(km.WeightSpec("heights", (16,), "array"))
        {after}

    def decode_greedily(self, prompts, new_tokens):
        tokens = [[(prompt[-1] + 1 + at) % 16 for at in range(new_tokens)] for prompt in prompts]
        logits = [[self.row(token) for token in row] for row in tokens]
        {what}
        return tokens, logits

    def row(self, token):
        out = np.empty(16, np.float32)
        self.double(x=self.heights.astype(np.float32), out=out)
        out[token] = 9
        return out


@km.hookimpl
def muster_models():
    return [km.ModelBuilder("acme", ("acme_type",), "production", lambda manifest, kernels, weights=None: Counts(kernels, weights))]
"""  # noqa: E501
CPU = ("--target", "cpu", "--tokens", "4")


@pytest.fixture
def counts(cli: Any) -> Any:
    """Install the model, and return a command that decodes with it."""

    installed = set[str]()

    def run(
        command: str,
        *arguments: object,
        what: str = "",
        factor: int = 2,
        vocab: str = "vocab_size = 16",
        built: str = "pass",
        after: str = "pass",
    ) -> Any:
        source = COUNTS.format(what=what, factor=factor, built=built, after=after)
        if source not in installed:
            installed.add(source)
            cli.install(source)
        folder = cli.manifest(f"hidden_size = 16\nnum_layers = 2\n{vocab}").parent.parent
        return cli(command, "tiny", "--manifests", folder, *CPU, *arguments)

    return run


def test_model_that_decodes_itself_boots(counts: Any) -> None:
    ran = counts("boot", "--prompt", "\x02\x03", "--prompt", "\x0e", "--format", "json")
    assert ran.code == 0
    assert ran.json["decode"]["tokens"] == [[4, 5, 6, 7], [15, 0, 1, 2]]
    assert ran.json["decode"]["prefill_ms"] == 0
    assert ran.json["decode"]["step_ms"] > 0


def test_boot_says_that_the_time_has_the_prompts_in_it(counts: Any) -> None:
    out = counts("boot").out
    assert "; decoded 2 x 4 tokens\n" in out
    assert " ms a step, prompts included\n" in out


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("return tokens", "decode_greedily returned a list, expected a tuple (tokens, logits)"),
        ("return tokens, None", "tokens or logits are no sequences for each prompt: "),
        ("tokens.pop()", "decode_greedily: tokens of lengths [4], expected 2 of 4"),
        ("logits[1].pop()", "decode_greedily: logits of lengths [4, 3], expected 2 of 4"),
        ("tokens[1][2] = 0", "decode_greedily: sequence 1, token 2: 0 is not the likeliest, which is "),
        ("tokens[0][0] = 16", "sequence 0, token 0: 16 is no token from 0 to 15"),
        ("tokens[0][0] = True", "sequence 0, token 0: True is no token from 0 to 15"),
        ("tokens[0][0] = 1.0", "sequence 0, token 0: 1.0 is no token from 0 to 15"),
        ("logits[0][1] = list(range(16))", "token 1: logits are list, expected a NumPy array (V,) of floats"),
        ("logits[0][1] = logits[0][1][None]", "logits are float32 (1, 16), expected a NumPy array (V,) of floats"),
        ("logits[0][1] = np.empty(0)", "logits are float64 (0,), expected"),
        ("logits[0][1] = logits[0][1].astype('U')", "expected a NumPy array (V,) of floats"),
        ("logits[0][1][3] = np.nan", "logits are not finite: this model computes nothing"),
        ("logits = [[0 * row for row in rows] for rows in logits]", "all logits of a row are equal, at every token"),
        ("raise SystemError('in here')", "decoding stopped: SystemError: in here (at "),
        ("logits[0][1] = logits[0][1].astype(bool)", "logits are bool (16,), expected a NumPy array (V,) of floats"),
        ("logits[0][1] = logits[0][1].astype(np.int8)", "logits are int8 (16,), expected a NumPy array (V,) of floats"),
        ("logits[0][1] = np.ma.array(logits[0][1])", "logits are MaskedArray, expected a NumPy array (V,) of floats"),
        ("logits[0][1] = logits[0][1].astype(complex)", "logits are complex128 (16,), expected a NumPy array"),
        ("logits[0] = itertools.repeat(logits[0][0])", "logits of lengths [5, 4], expected 2 of 4"),
        ("tokens = itertools.repeat([1, 2, 3, 4])", "tokens of lengths [4, 4, 4], expected 2 of 4"),
        ("logits[0][1] = np.append(logits[0][1], 0.0)", "17 logits, expected 16: the manifest's vocab_size"),
        ("raise km.UsageError('boom')", "decoding stopped: UsageError: boom"),
        ("raise ValueError('boom')", "decoding stopped: ValueError: boom"),
    ],
)
def test_what_a_model_returns_is_checked(counts: Any, what: str, said: str) -> None:
    ran = counts("boot", what=what)
    assert ran.code == 1
    assert said in ran.out


LATE = """
        try:
            self.kernels.try_kernel("acme", "{name}")
        except km.MusterError:
            pass
"""


def test_kernel_that_is_missing_while_a_model_decodes_refuses_though_the_model_goes_on(counts: Any) -> None:
    ran = counts("boot", what=LATE.format(name="triple"))
    assert ran.code == 1
    first = ran.out.splitlines()[0]
    assert first.startswith("REFUSED: tiny on cpu: a kernel was missing while it decoded; its audit passed: ")
    assert "LATE_MISS acme::triple" in ran.out
    booted = counts("boot", "--format", "json", what=LATE.format(name="triple")).json["decode"]
    assert (booted["report"]["verdict"], booted["report"]["counts"]["refusing"]) == ("refused", 1)
    compared = counts("ab", "--sequences", "1", "--format", "json", what=LATE.format(name="triple"))
    assert (compared.code, compared.json["verdict"]) == (1, "differ")
    failed = [check for check in compared.json["models"][0]["checks"] if check["outcome"] == "failed"]
    assert [(check["name"], check["where"]) for check in failed] == [
        ("late", "decode of arm A"), ("late", "decode of arm B"),
    ]  # fmt: skip
    assert failed[0]["text"].startswith("LATE_MISS: acme::triple: asked for ")


def test_boot_with_weights_is_judged_as_of_the_day_of_its_audit(counts: Any) -> None:
    waiver = 'vocab_size = 16\n[expected_absent.acme.gone]\nreason = "not yet"\nuntil = 2020-06-30'
    asks = "kernels.try_kernel('acme', 'gone')"
    for profile in ("serve", "qualify"):
        options = ("--profile", profile, "--format", "json")
        assert counts("boot", "--as-of", "2020-06-01", *options, vocab=waiver, after=asks).code == 0
    assert counts("boot", *options, vocab=waiver, after=asks).code == 1


def test_kernel_that_is_found_while_a_model_decodes_is_noted_and_refuses_nothing(counts: Any) -> None:
    ran = counts("boot", what=LATE.format(name="double"))
    assert ran.code == 0
    assert "Notes: 1 LATE_HIT" in ran.out
    qualified = counts("boot", "--profile", "qualify", what=LATE.format(name="double")).out
    assert "Warnings: 1 LATE_HIT" in qualified
    assert "; 1 warning, 0 notes; decoded" in qualified.splitlines()[0]
    compared = counts("ab", "--sequences", "1", "--format", "json", what=LATE.format(name="double"))
    assert (compared.code, compared.json["verdict"]) == (0, "equal")
    informs = [check["text"] for check in compared.json["models"][0]["checks"] if check["name"] == "late"]
    assert len(informs) == 2
    assert informs[0].startswith("LATE_HIT: acme::double: asked for ")


def test_what_decoding_adds_is_counted_and_numbered_with_the_audits_findings(counts: Any) -> None:
    vocab = 'vocab_size = 16\n[expected_absent.acme]\ngone = "no layer of it asks"'
    ran = counts("boot", what=LATE.format(name="triple"), vocab=vocab)
    assert "; 1 warning, 0 notes" in ran.out.splitlines()[0]
    assert "  1. LATE_MISS acme::triple" in ran.out
    assert "  2. UNUSED_WAIVER acme::gone" in ran.out
    asks = LATE.format(name="double")
    ran = counts("boot", "--profile", "qualify", what=asks, vocab=vocab)  # the audit's own refusal: no decode runs
    assert (ran.code, "LATE_HIT" in ran.out) == (1, False)


@pytest.mark.parametrize(("what", "code"), [
    ("logits[0] = [0 * row for row in logits[0]]", 0),
    ("logits = [[0 * row for row in rows] for rows in logits]", 1),
])  # fmt: skip
def test_one_row_of_logits_that_says_something_is_enough(counts: Any, what: str, code: int) -> None:
    ran = counts("boot", "--format", "json", what=what)
    assert (ran.code, ran.json["decode"]["is_flat"]) == (code, bool(code))


def test_traceback_of_what_a_model_raises_while_it_decodes_is_shown_on_demand(counts: Any) -> None:
    raises = "raise SystemError('in here')"
    assert counts("boot", what=raises).err == ""
    shown = counts("boot", "--verbose", what=raises)
    assert "muster: Traceback (most recent call last):\n" in shown.err
    assert "SystemError: in here" in shown.err


def test_context_of_a_manifest_ends_every_models_sequences(counts: Any) -> None:
    def boot(context: int, *arguments: object) -> Any:
        return counts("boot", "--prompt", "abc", *arguments, vocab=f"vocab_size = 16\ncontext_length = {context}")

    assert boot(6).code == 0
    ran = boot(5)
    said = "a sequence grows to 6 tokens that are read, tiny has a context_length of 5: fewer --tokens, shorter prompts"
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert boot(71).code == 0
    ran = counts("ab", "--sequences", "1", vocab="vocab_size = 16\ncontext_length = 74")
    assert (ran.code, "a sequence grows to 75 tokens" in ran.err) == (2, True)


def test_rows_that_a_model_overwrites_later_are_compared_as_they_were_returned(counts: Any) -> None:
    one_memory = """
        sys.modules.setdefault("shared rows", [np.empty((8, 8, 16), np.float32)])
        shared = sys.modules["shared rows"][0]
        for sequence, rows in enumerate(logits):
            for at, row in enumerate(rows):
                shared[sequence, at] = row * (2 if self.kernels.levers.flag("MUSTER_NO_K64_N64") else 1)
        logits = [[shared[sequence, at] for at in range(new_tokens)] for sequence in range(len(prompts))]
"""
    try:
        ran = counts("ab", "--b", "MUSTER_NO_K64_N64=1", "--sequences", "1", "--format", "json", what=one_memory)
    finally:
        sys.modules.pop("shared rows", None)
    assert (ran.code, ran.json["verdict"]) == (1, "differ")


@pytest.mark.parametrize("kind", ["np.float16", "np.float64", "ml_dtypes.bfloat16"])
def test_logits_may_be_floats_of_any_kind(counts: Any, kind: str) -> None:
    what = f"import ml_dtypes; logits = [[row.astype({kind}) for row in rows] for rows in logits]"
    assert counts("ab", "--sequences", "1", what=what).code == 0


NO = "if self.heights is not None: raise km.UsageError('no')"


def test_usage_error_of_a_builder_is_its_failure_and_not_the_callers(counts: Any) -> None:
    audited = counts("boot", after="raise km.UsageError('no')")
    assert audited.code == 3
    assert audited.out.startswith("INCOMPLETE: tiny on cpu: the model was not built to its end")
    assert "muster: the model's builder failed: UsageError: no (at " in audited.err


def test_usage_error_of_a_builder_with_weights_is_its_failure_and_not_the_callers(counts: Any) -> None:
    booted, compared = counts("boot", after=NO), counts("ab", after=NO)
    assert (booted.code, compared.code) == (3, 3)
    assert booted.out.startswith("INCOMPLETE: tiny on cpu: the model was not built with weights; its audit passed")
    assert compared.out.startswith("INCOMPLETE: the model's builder failed in arm A of tiny and arm B of tiny")
    for ran in (booted, compared):
        assert "muster: the model's builder failed: UsageError: no (at " in ran.err


def test_weights_that_a_builder_cannot_read_are_the_callers(cli: Any, counts: Any) -> None:
    for command in ("boot", "ab"):
        ran = counts(command, "--weights", cli.folder / "nowhere")
        assert (ran.code, ran.out) == (2, "")
        assert "--weights: " in ran.err


def test_arms_of_a_model_that_decodes_itself_are_compared(counts: Any) -> None:
    ran = counts("ab", "--sequences", "1,3", "--repeats", "2", "--format", "json")
    assert (ran.code, ran.json["verdict"]) == (0, "equal")
    (model,) = ran.json["models"]
    assert (model["layers"], [row["sequences"] for row in model["rows"]]) == (2, [1, 3])
    for row in model["rows"]:
        assert row["a"]["is_identical"]
        assert row["a"]["speed"]["per_sequence"] > 0
        assert row["a"]["speed"]["prefill_s"] == 0


@pytest.mark.parametrize("row", ["np.full(16, np.nan, np.float32)", "np.where(np.arange(16) == 3, -np.inf, row)"])
def test_logits_that_are_no_numbers_in_both_arms_are_not_called_equal(counts: Any, row: str) -> None:
    what = f"logits = [[{row} for row in rows] for rows in logits]"
    ran = counts("ab", "--sequences", "2", "--format", "json", what=what)
    assert (ran.code, ran.json["verdict"]) == (1, "differ")
    (stopped,) = [check for check in ran.json["models"][0]["checks"] if check["outcome"] == "failed"]
    assert (stopped["name"], stopped["where"]) == ("decode", "C=2")
    assert re.search(
        r"arm A stopped: .*sequence 0, token 0: (1|16) of 16 logits are no finite numbers", stopped["text"]
    )


@pytest.mark.parametrize(("vocab", "said"), [
    ("vocab_size = 16", "token 0: 17 logits, expected 16: the manifest's vocab_size"),
    ("", "sequence 0, token 0: 17 logits, in arm A 16"),
])  # fmt: skip
def test_logits_of_another_length_in_one_arm_stop_it(counts: Any, vocab: str, said: str) -> None:
    what = "logits = [[np.append(row, 0.0) if self.kernels.levers.flag('MUSTER_NO_K64_N64') else row for row in rows] "
    what += "for rows in logits]"
    ran = counts("ab", "--b", "MUSTER_NO_K64_N64=1", "--sequences", "1", "--format", "json", what=what, vocab=vocab)
    assert (ran.code, ran.json["verdict"]) == (1, "differ")
    (stopped,) = [check for check in ran.json["models"][0]["checks"] if check["outcome"] == "failed"]
    assert stopped["text"].startswith("arm B stopped: MusterError: ")
    assert said in stopped["text"]


def test_logits_that_say_nothing_in_both_arms_are_not_called_equal(counts: Any) -> None:
    what = "logits = [[0 * row for row in rows] for rows in logits]"
    ran = counts("ab", "--sequences", "1", "--format", "json", what=what)
    assert (ran.code, ran.json["verdict"]) == (1, "differ")
    assert "arm A stopped: MusterError: all logits of a row are equal, at every token" in ran.out


def test_rows_that_depend_on_their_number_are_caught(counts: Any) -> None:
    ran = counts("ab", "--sequences", "2", "--format", "json", what="logits[0][1][3] += len(prompts)")
    checks = {check["name"]: check["outcome"] for check in ran.json["models"][0]["checks"]}
    assert checks["identity"] == "informs"  # in both arms: A does not keep them either
    assert not ran.json["models"][0]["rows"][0]["b"]["is_identical"]
    assert ran.json["models"][0]["rows"][0]["b"]["place"] == ""


def test_kernel_that_differs_between_the_arms_is_held_against_its_contract(cli: Any, counts: Any) -> None:
    wrong = """
import kernel_muster as km


def triple(x, out):
    out[...] = x * 3


@km.hookimpl
def muster_kernels():
    return [km.KernelSpec(
        key="acme::double", contract="acme_double", archs=("cpu",), backend=km.PythonKernel(triple), overrides="acme",
    )]
"""
    cli.install(wrong, "wrong")
    ran = counts("ab", "--b-plugin", "wrong", "--sequences", "1", "--format", "json")
    assert (ran.code, ran.json["verdict"]) == (1, "differ")
    failed = {c["name"] for c in ran.json["models"][0]["checks"] if c["outcome"] == "failed"}
    assert {"contract", "kl"} <= failed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--drafts", "2"), "--drafts: this model decodes itself, and nothing drafts for it"),
        (("--drafter", "qwen3.6-35b-a3b-dflash"), "tiny decodes itself, and nothing drafts for it"),
    ],
)
def test_nothing_drafts_for_a_model_that_decodes_itself(counts: Any, arguments: tuple[str, ...], said: str) -> None:
    ran = counts("ab", *arguments, "--sequences", "1")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.parametrize("more", [
    "self.mtp = object()", "self.maturity = 'odd'", "Counts.mtp = property(lambda self: {}[0])",
    "Counts.maturity = property(lambda self: 1 / 0)",
])  # fmt: skip
def test_model_of_another_kind_is_asked_for_nothing_but_its_method(counts: Any, more: str) -> None:
    assert counts("ab", "--sequences", "1", "--format", "json", built=more).json["verdict"] == "equal"
    assert counts("boot", "--format", "json", built=more).json["decode"]["maturity"] == ""


@pytest.mark.parametrize("error", ["{}[0]", "sys.exit(0)", "{}.decode"])
def test_model_whose_attributes_raise_is_refused_as_one_without_the_method(counts: Any, error: str) -> None:
    more = f"Counts.decode_greedily = property(lambda self: {error})"
    for command in ("ab", "boot"):
        ran = counts(command, built=more)
        assert ran.code == 1
        assert "the builder made a Counts, which decodes nothing by itself" in ran.out
