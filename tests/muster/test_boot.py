"""``muster boot``: the audit, then a short decode with the size of its model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.models.build import maturity_on
from kernel_muster.registry.findings import Finding
from safetensors.numpy import load_file, save_file

CPU = ("--target", "cpu")


@pytest.fixture
def boot(cli: Any) -> Callable[..., Any]:
    def run(*arguments: object, model: str = "qwen3.6-27b") -> Any:
        return cli("boot", model, *CPU, *arguments)

    return run


def test_boot_audits_and_decodes_at_reduced_size_and_says_so(boot: Callable[..., Any]) -> None:
    ran = boot()
    assert ran.code == 0
    first, *_, last = ran.out.rstrip().splitlines()
    assert first == last
    assert first.startswith("PASSED: qwen3.6-27b on cpu: ")
    assert first.endswith("; decoded 2 x 8 tokens at reduced size")
    assert "REDUCED SIZE, it says nothing about speed or quality: hidden_size 5120 -> 64, num_layers 64 -> 4" in ran.out
    assert "sequence 1: " in ran.out
    said = f"the builder calls itself {maturity_on('cpu')}: nothing that serves may use it"
    assert (said in ran.out) is (maturity_on("cpu") != "production")
    assert "Kernels: " in ran.out
    assert ran.err == ""


def test_audit_of_a_boot_is_that_of_the_whole_model(boot: Callable[..., Any], cli: Any) -> None:
    booted = boot("--format", "json").json
    audited = cli("audit", "qwen3.6-27b", *CPU, "--format", "json").json
    assert booted["schema"] == "kernel-muster/boot"
    assert booted["report"] == audited


def test_decode_is_the_same_each_time_and_follows_seed_and_prompt(boot: Callable[..., Any]) -> None:
    def tokens(*arguments: object) -> Any:
        return boot("--format", "json", "--tokens", "4", *arguments).json["decode"]["tokens"]

    first = tokens()
    assert [len(row) for row in first] == [4, 4]
    assert first == tokens()
    assert first != tokens("--seed", "1")
    one, other = tokens("--prompt", "a prompt", "--prompt", "another")
    assert [one] == tokens("--prompt", "a prompt", "--sequences", "1")
    assert one != other


def test_sequences_decode_as_they_do_alone(boot: Callable[..., Any]) -> None:
    together = boot("--format", "json", "--sequences", "5").json["decode"]
    assert together["sequences"] == 5
    assert len({tuple(row) for row in together["tokens"]}) == 5


def test_boot_says_that_the_cache_keeps_nothing(boot: Callable[..., Any], unkept: Finding) -> None:
    ran = boot()
    assert ran.code == 0
    assert f"CACHE_NOT_KEPT {unkept.subject}" in ran.out


def test_boot_that_is_refused_decodes_nothing(cli: Any) -> None:
    ran = cli("boot", "qwen3.6-28b", *CPU, "--format", "json")
    assert ran.code == 1
    assert ran.json["decode"] is None
    assert {row["code"] for row in ran.json["report"]["findings"]} == {"UNKNOWN_MODEL"}


def test_boot_without_a_device_is_refused(cli: Any) -> None:
    ran = cli("boot", "qwen3.6-27b", "--target", "cuda:99")
    assert ran.code == 1
    assert "NO_DEVICE" in ran.out
    assert "Decode" not in ran.out


def test_model_that_passes_and_decodes_nothing_is_refused(boot: Callable[..., Any]) -> None:
    ran = boot(model="qwen3.6-35b-a3b-dflash")
    assert ran.code == 1
    said = "REFUSED: qwen3.6-35b-a3b-dflash on cpu: the model did not decode; its audit passed: "
    assert ran.out.startswith(said)
    assert "it decodes nothing by itself" in ran.out


def test_builder_of_another_kind_of_model_is_refused(cli: Any) -> None:
    cli.acme("acme::double")
    ran = cli("boot", "--manifest", cli.manifest(), *CPU, "--format", "json")
    assert ran.code == 1
    assert ran.json["report"]["verdict"] == "passed"
    assert "the builder made a NoneType, which decodes nothing by itself" in ran.json["decode"]["refused"]


def test_builder_that_fails_is_an_internal_error(cli: Any) -> None:
    cli.acme("acme::double", after="raise RuntimeError('no layer of this kind')")
    ran = cli("boot", "--manifest", cli.manifest(), *CPU)
    assert ran.code == 3
    assert "the model's builder failed: RuntimeError: no layer of this kind" in ran.err


def test_builder_that_fails_with_weights_is_an_internal_error(cli: Any) -> None:
    cli.acme("acme::double", after="return None if weights is None else weights.get('embedding')")
    manifest = cli.manifest()
    ran = cli("boot", "--manifest", manifest, *CPU)
    assert ran.code == 3
    assert ran.out.startswith("INCOMPLETE: tiny on cpu: the model was not built with weights; its audit passed: ")
    said = "the model's builder failed: AttributeError: 'RandomWeights' object has no attribute 'get' (at "
    assert said in ran.out
    assert said in ran.err
    assert "Traceback" not in ran.err
    ran = cli("boot", "--manifest", manifest, *CPU, "--format", "json", "--verbose")
    assert (ran.code, ran.json["decode"]["failed"]) == (3, True)
    assert "muster: Traceback (most recent call last):\n" in ran.err


def test_model_of_another_kind_is_told_what_to_do_and_its_notes_once(cli: Any) -> None:
    cli.acme("acme::double", after="return [] if weights is None else weights.get('embedding')")
    ran = cli("boot", "--manifest", cli.manifest(), *CPU)
    assert ran.code == 1
    assert "the builder made a list, which decodes nothing by itself" in ran.out
    assert "run this model with code of its own, and judge it with muster audit" in ran.out
    assert "RandomWeights" not in ran.out


@pytest.mark.parametrize("after", ["return None", "return weights and weights.get('embedding')"])
def test_boot_that_does_not_decode_tells_each_finding_once(cli: Any, after: str) -> None:
    cli.acme("acme::double", after=after)
    ran = cli("boot", "--manifest", cli.manifest('[expected_absent.acme]\ngone = "no layer of it asks"'), *CPU)
    assert "did not decode" in ran.out
    assert ran.out.count("UNUSED_WAIVER acme::gone") == 1


# A plugin whose SiLU passes its registration and fails during decode.
RAISES = """
import numpy as np
import kernel_muster as km


class Speechless(Exception):
    def __str__(self):
        raise ValueError


def silu(gate, up, out):
    {what}


@km.hookimpl
def muster_kernels():
    return [
        km.KernelSpec(
            key="silu::silu_mul", contract="silu_mul", archs=("cpu",), backend=km.PythonKernel(silu),
            overrides="kernel-muster",
        )
    ]
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise ValueError('boom')", "decoding stopped: ValueError: boom (in silu::silu_mul)"),
        ("raise SystemExit(0)", "decoding stopped: SystemExit: 0 (in silu::silu_mul)"),
        ("raise km.UsageError('no')", "decoding stopped: UsageError: no (in silu::silu_mul)"),
        ("raise Speechless", "decoding stopped: Speechless: (its text cannot be shown) (in silu::silu_mul)"),
        ("out[...] = np.nan", "decoding stopped: ContractError: argmax_bf16: NaN in row 0 of logits"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from NumPy, for arithmetic on NaN
def test_kernel_that_fails_while_decoding_is_refused_with_the_report(
    boot: Callable[..., Any], cli: Any, what: str, said: str
) -> None:
    cli.install(RAISES.format(what=what), "raises")
    file = cli.folder / "boot.json"
    ran = boot("--plugin", "raises", "--format", "json", "--output", file)
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith("REFUSED: qwen3.6-27b on cpu: the model did not decode; its audit passed: ")
    found = json.loads(file.read_text())
    assert found["report"]["verdict"] == "passed"
    assert found["decode"]["refused"].startswith(said)
    assert found["decode"]["failed"] is False


def test_what_a_kernel_prints_is_not_part_of_the_result(boot: Callable[..., Any], cli: Any) -> None:
    right = "x = gate.astype('f4'); out[...] = x / (1 + np.exp(-x)) * up.astype('f4'); print('noise')"
    cli.install("print('loud import')\n" + RAISES.format(what=right), "raises")
    ran = boot("--plugin", "raises", "--format", "json")
    assert (ran.code, ran.json["decode"]["is_finite"]) == (0, True)
    assert "noise" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a MODEL"),
        (("qwen3.6-27b", "--target", "sm_90a"), "nothing decodes on an architecture alone; muster audit takes it"),
        (("qwen3.6-27b", *CPU, "--prompt", ""), "a prompt is empty"),
        (("qwen3.6-27b", *CPU, "--layers", "3"), "expected a multiple of 4 up to 64"),
        (("qwen3.6-27b", *CPU, "--weights", "/nowhere"), "/nowhere is no folder"),
    ],
)
def test_boot_with_a_bad_option_is_a_usage_error(cli: Any, arguments: tuple[str, ...], said: str) -> None:
    ran = cli("boot", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


SMALL = """
hidden_size = 32
num_layers = 2
layer_pattern = ["full"]
ffn = "dense"
intermediate_size = 48
vocab_size = 64
rms_norm_eps = 1e-6
[model.attention]
heads = 2
kv_heads = 1
head_dim = 64
[model.rope]
theta = 1e4
"""


def write_checkpoint(folder: Path, *more: str) -> None:
    """Write a dense BF16 model of two layers, with ``more`` tensors that it does not have."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,), "lm_head.weight": (64, 32)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.{name}.weight": (32,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{n}_proj.weight": (rows, 32) for n, rows in (("q", 128), ("k", 64), ("v", 64))}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (32, 128), f"{layer}.mlp.down_proj.weight": (32, 48)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (48, 32) for name in ("gate", "up")}
    shapes |= dict.fromkeys(more, (2, 2))
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tensors = {name: (rng.standard_normal(shape) / 4).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


def test_boot_decodes_a_checkpoint_at_full_size(cli: Any) -> None:
    folder = cli.folder / "checkpoint"
    write_checkpoint(folder)
    text = '[model]\nname = "small"\nquant = "bf16"\nmodel_type = "qwen3_5"\n' + SMALL
    manifest = cli.folder / "MODEL.toml"
    manifest.write_text(text)
    common = ("boot", "--manifest", manifest, *CPU, "--format", "json", "--prompt", "a prompt")
    ran = cli(*common, "--weights", folder)
    assert ran.code == 0, ran.out
    assert ran.json["decode"]["size"] == ""
    assert ran.json["decode"]["weights"] == f"the checkpoint in {folder}"
    assert ran.json["decode"]["tokens"] != cli(*common, "--full").json["decode"]["tokens"]
    (folder / "model.safetensors").unlink()
    broken = cli(*common, "--weights", folder)
    assert (broken.code, broken.out) == (2, "")
    assert "model.safetensors" in broken.err


def test_checkpoint_of_another_size_is_what_is_wrong_and_not_the_manifest(cli: Any) -> None:
    folder = cli.folder / "checkpoint"
    write_checkpoint(folder)
    (folder / "config.json").write_text('{"hidden_size": 256}')
    manifest = cli.folder / "MODEL.toml"
    manifest.write_text('[model]\nname = "small"\nquant = "bf16"\nmodel_type = "qwen3_5"\n' + SMALL)
    ran = cli("boot", "--manifest", manifest, *CPU, "--weights", folder)
    assert ran.code == 1
    assert "REQUEST_NOT_HONORED checkpoint of small" in ran.out
    assert "config.json: hidden_size 256; manifest: hidden_size 32; to accept it write hidden_size = 256" in ran.out
    assert f"where   {folder / 'config.json'}" in ran.out
    assert "give the folder of a checkpoint of small, or name the model that this one is of" in ran.out
    assert "correct the manifest" not in ran.out


def small_manifest(folder: Path, more: str = "") -> Path:
    """Write the manifest of that model."""
    file = folder / "MODEL.toml"
    file.write_text('[model]\nname = "small"\nquant = "bf16"\nmodel_type = "qwen3_5"\n' + more + SMALL)
    return file


def test_tensors_of_a_checkpoint_that_nothing_reads_are_named(cli: Any) -> None:
    folder = cli.folder / "checkpoint"
    vision = [f"model.visual.blocks.{at}.attn.qkv.weight" for at in range(3)]
    write_checkpoint(folder, "mtp.fc.weight", *vision)
    common = ("boot", "--manifest", small_manifest(cli.folder), *CPU, "--weights", folder, "--tokens", "2")
    ran = cli(*common)
    assert ran.code == 0, ran.out
    told = ran.out[ran.out.index("Checkpoint: ") :].partition("\n\n")[0].splitlines()
    assert told == [
        "Checkpoint: 4 tensors that the model did not ask for",
        "  model.visual.blocks.*.attn.qkv.weight (3)",
        "  mtp.fc.weight",
    ]
    assert cli(*common, "--format", "json").json["decode"]["unused"] == [*vision, "mtp.fc.weight"]
    assert "Checkpoint: " not in cli("boot", "qwen3.6-27b", *CPU, "--tokens", "2").out


def test_tensor_of_a_layer_that_nothing_reads_is_refused(cli: Any) -> None:
    folder = cli.folder / "checkpoint"
    write_checkpoint(folder, "model.layers.0.mlp.extra.weight")
    ran = cli("boot", "--manifest", small_manifest(cli.folder), *CPU, "--weights", folder, "--tokens", "2")
    assert (ran.code, ran.out) == (2, "")
    assert "model.layers.0.mlp.extra.weight: expected only tensors that the model's layers read" in ran.err


def test_model_whose_norms_are_read_by_the_wrong_rule_is_refused_before_it_decodes(cli: Any) -> None:
    folder = cli.folder / "checkpoint"
    write_checkpoint(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    ran = cli("boot", "--manifest", small_manifest(cli.folder), *CPU, "--weights", folder)
    assert ran.code == 1
    assert (
        'config.json: model_type "qwen3_5_text", whose norms multiply by 1 + weight; manifest: rms_norm_zero' in ran.out
    )
    right = small_manifest(cli.folder, "rms_norm_zero_centred = true\n")
    assert cli("boot", "--manifest", right, *CPU, "--weights", folder).code == 0


def test_checkpoint_whose_config_has_an_unknown_field_is_warned_of_and_does_not_qualify(cli: Any) -> None:
    folder = cli.folder / "checkpoint"
    write_checkpoint(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3_5", "attention_sharpness": 2, "rope_theta": 1e4}')
    right = small_manifest(cli.folder, "rms_norm_zero_centred = true\n")
    common = ("boot", "--manifest", right, *CPU, "--weights", folder, "--tokens", "2")
    ran = cli(*common)
    assert (ran.code, ran.out.count("UNKNOWN_CONFIG_FIELD config.json")) == (0, 1), ran.out
    assert "attention_sharpness = 2" in ran.out
    assert f"where   {folder / 'config.json'}" in ran.out
    strict = cli(*common, "--profile", "qualify")
    assert strict.code == 1
    assert "UNKNOWN_CONFIG_FIELD" in strict.out
    known = small_manifest(cli.folder, 'rms_norm_zero_centred = true\nknown_config_fields = ["attention_sharpness"]\n')
    assert "UNKNOWN_CONFIG_FIELD" not in cli(*common[:2], known, *common[3:]).out


def test_weights_in_a_folder_of_another_name_are_warned_of(cli: Any) -> None:
    folder = cli.folder / "Acme-Large"
    write_checkpoint(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3_5"}')
    for name in ("small", "large"):
        more = f'match_names = ["acme-{name}"]\nrms_norm_zero_centred = true\n'
        file = small_manifest(cli.folder, more)
        text = file.read_text().replace('"small"', f'"{name}"') + '[[model_types]]\nmodel_type = "qwen3_5"\n'
        (cli.folder / "all" / name).mkdir(parents=True)
        (cli.folder / "all" / name / "MODEL.toml").write_text(text)
    common = ("--manifests", cli.folder / "all", *CPU, "--weights", folder, "--tokens", "2")
    ran = cli("boot", "small", *common)
    assert ran.code == 0, ran.out
    assert "REFERENCE_NAMES_OTHER small" in ran.out
    assert f"{folder} holds 'acme-large' of large" in ran.out
    assert "REFERENCE_NAMES_OTHER" not in cli("boot", "large", *common).out


def test_checkpoint_whose_norms_are_all_zero_computes_nothing(cli: Any) -> None:
    folder = cli.folder / "checkpoint"
    write_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: 0 * v if "norm" in n else v for n, v in tensors.items()}, folder / "model.safetensors")
    ran = cli("boot", "--manifest", small_manifest(cli.folder), *CPU, "--weights", folder)
    assert ran.code == 1
    assert ran.out.startswith("REFUSED: small on cpu: the model did not decode; its audit passed: ")
    assert "all logits of a row are equal, at every token: this model computes nothing" in ran.out


def test_more_tokens_than_the_context_holds_are_a_usage_error(cli: Any) -> None:
    manifest = small_manifest(cli.folder, "context_length = 512\n")
    ran = cli("boot", "--manifest", manifest, *CPU, "--full", "--tokens", "600", "--prompt", "a")
    assert (ran.code, ran.out) == (2, "")
    assert "a sequence grows to 600 tokens that are read, small has a context_length of 512" in ran.err


def test_ids_beyond_the_vocabulary_are_told_how_large_it_is_at_full_size(cli: Any) -> None:
    prompts = cli.folder / "prompts.json"
    prompts.write_text("[[63, 64]]")
    small = ("boot", "--manifest", small_manifest(cli.folder), *CPU, "--prompt", prompts)
    ran = cli(*small, "--full")
    said = f"{prompts}[0]: expected text, or ids from 0 to 63, at least one\n"
    assert (ran.code, ran.err.endswith(said)) == (2, True)
    prompts.write_text("[[300]]")
    ran = cli("boot", "qwen3.6-27b", *CPU, "--prompt", prompts)
    said = "ids from 0 to 255, at least one; this model of reduced size has 256 tokens, --full all 248320\n"
    assert (ran.code, ran.err.endswith(said)) == (2, True)


def test_boot_writes_markdown_to_a_file(boot: Callable[..., Any], cli: Any) -> None:
    file = cli.folder / "boot.md"
    ran = boot("--format", "markdown", "--output", file)
    assert ran.code == 0
    assert file.read_text().startswith("## PASSED: qwen3.6-27b on cpu")
    assert "### Decode" in file.read_text()
    assert json.loads(boot("--format", "json").out)["version"] == "1.3"
