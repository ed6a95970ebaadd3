"""Every command that takes a folder or a config judges it by the same facts, with the same reason."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

DENSE = {"model_type": "qwen3_5", "hidden_size": 5120}
EXPERTS = {"model_type": "qwen3_6_moe", "hidden_size": 2048}
INTEGERS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
NAMES = {"Qwen3.6-27B": "qwen3.6-27b", "Qwen3.6-35B-A3B": "qwen3.6-35b-a3b"}
# Each of these folders passed an audit, and the boot of its weights refused it or decoded wrong tokens.
INPUTS = [
    ("Qwen3.6-27B", DENSE | {"hidden_act": "gelu", "attention_bias": True}, 'hidden_act "gelu"; manifest: "silu"'),
    ("Qwen3.6-27B", DENSE | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
     'in fp8; manifest: quant "nvfp4"; to accept it write quant = "fp8" under [model]'),
    ("Qwen3.6-27B",
     DENSE | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": INTEGERS}}},
     "in 'int' of 8 bits; manifest: quant \"nvfp4\"; no manifest accepts it"),
    ("Qwen3.6-35B-A3B", EXPERTS | {"scoring_func": "sigmoid"},
     'scoring_func "sigmoid"; manifest: moe.router "softmax"'),
    ("Qwen3.6-35B-A3B", EXPERTS | {"mlp_only_layers": [0, 1]}, "mlp_only_layers [0, 1]; manifest: none, built in"),
    ("Qwen3.6-35B-A3B", EXPERTS | {"num_hidden_layers": 40}, "mtp_num_hidden_layers missing; manifest: mtp.layers 1"),
    ("Qwen3.6-35B-A3B", EXPERTS | {"mtp_num_hidden_layers": None},
     "mtp_num_hidden_layers null; manifest: mtp.layers 1"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """Write a checkpoint's folder, whose weights nobody gets to read."""

    def folder(name: str, config: dict[str, Any]) -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config))
        tensor = np.zeros((2, 2), ml_dtypes.bfloat16)
        save_file({"model.embed_tokens.weight": tensor}, made / "model.safetensors")
        return made

    return folder


@pytest.mark.parametrize(("name", "config", "said"), INPUTS)
def test_every_command_refuses_the_same_folder_for_the_same_reason(
    cli: Any, folder: Any, name: str, config: dict[str, Any], said: str
) -> None:
    where, model = folder(name, config), NAMES[name]
    cpu = ("--target", "cpu")
    for command in (
        ("models", where), ("models", "--config", where, "--ref", model), ("audit", where, *cpu),
        ("audit", model, "--config", where / "config.json", *cpu), ("boot", where, *cpu, "--weights", where),
        ("boot", model, *cpu, "--weights", where),
    ):  # fmt: skip
        ran = cli(*command)
        assert ran.code == 1, command
        assert said in ran.out, command


def test_field_that_nobody_knows_warns_in_every_command_and_does_not_qualify(cli: Any, folder: Any) -> None:
    where, cpu = folder("Qwen3.6-27B", DENSE | {"attention_sharpness": 2}), ("--target", "cpu")
    for command in (("models", where), ("audit", where, *cpu), ("audit", "qwen3.6-27b", "--config", where, *cpu)):
        ran = cli(*command)
        assert ran.code == 0, command
        assert "UNKNOWN_CONFIG_FIELD config.json" in ran.out
        assert "attention_sharpness = 2" in ran.out
    strict = cli("audit", where, *cpu, "--profile", "qualify")
    assert strict.code == 1
    assert strict.out.startswith("REFUSED: qwen3.6-27b on cpu: 1 finding to act on")
