"""``muster ab``: its options, prompts, and the place of the result."""

import json
from collections.abc import Callable
from typing import Any

import pytest


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
            ("--b-without", "w4a16_gemv::w4a16_gemv_qg"),
            "--b-without w4a16_gemv::w4a16_gemv_qg: qwen3.6-27b never comes to it: w4a16_gemv::w4a16_gemv_qgkv stands",
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


def test_gate_of_the_environment_is_said_as_it_is_used(ab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_MTP_GATE_FORCE", "0")
    both = [line.strip() for line in ab("--drafts", "1", sequences="1").out.splitlines() if "both: " in line]
    assert both == ["both: the speculation gate is pinned open, over MUSTER_MTP_GATE_FORCE=0 of the environment"]
    both = [line.strip() for line in ab("--drafts", "0", sequences="1").out.splitlines() if "both: " in line]
    assert both == ["both: MUSTER_MTP_GATE_FORCE=0"]


def test_interrupt_is_130(ab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_muster.ab import comparison

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "distance", interrupted)
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
    assert ("--full" in ran.err) is (text == "[[999]]")


def test_output_and_markdown_say_the_same(ab: Callable[..., Any], cli: Any) -> None:
    file = cli.folder / "ab.md"
    ran = ab("--format", "markdown", "--output", file, sequences="1")
    text = file.read_text()
    assert ran.code == 0
    assert text.startswith("## EQUAL, but nothing differed: the arms are the same; on qwen3.6-27b")
    assert "| C | A tok/s | B tok/s |" in text
    assert ran.out.startswith("EQUAL, ")
