"""Config files of public models: each resolves rightly, or is refused with the right cause, through every command."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import public_configs as public
import pytest
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.MODEL_toml.hf.config import HfConfig
from kernel_muster.MODEL_toml.hf.fields import unknown_fields

Config = dict[str, Any]
BOTH_27B = ("qwen3.6-27b", "qwen3.8-27b")


@pytest.fixture(scope="module")
def shipped() -> Catalogue:
    return Catalogue.from_folders([manifest_folder()])


def changed(config: Config, **text: Any) -> Config:
    config["text_config"] |= text
    return config


def holo() -> Config:
    return changed(public.whole(public.text_35b(), public.nvfp4_experts()), mtp_num_hidden_layers=None)


#: Folder, its config, the expected model, and the remaining doubts.
RESOLVED: dict[str, tuple[str, Callable[[], Config], str, tuple[str, ...]]] = {
    "27b, BF16 as published": (
        "Qwen3.6-27B", lambda: public.whole(public.text_27b()), "qwen3.6-27b", ("WEIGHTS_NOT_QUANTISED",)),
    "27b, NVFP4 by compressed-tensors": (
        "Qwen3.6-27B-NVFP4", lambda: public.whole(public.text_27b(), public.nvfp4()), "qwen3.6-27b", ()),
    "27b of 3.8, NVFP4 by ModelOpt": (
        "Qwen3.8-27B-NVFP4", lambda: public.whole(public.text_27b(), public.modelopt()), "qwen3.8-27b", ()),
    "27b, re-saved by transformers 5": (
        "Qwen3.6-27B-mine", lambda: public.resaved(public.text_27b(), public.nvfp4()), "qwen3.6-27b", ()),
    "27b, text class of transformers 5": (
        "Qwen3.6-27B-text", lambda: public.text_alone(public.text_27b(), public.nvfp4()), "qwen3.6-27b", ()),
    "27b, rope parameters beside the rest": (
        "Qwen3.8-27B-x", lambda: public.whole(public.flat_rope(public.text_27b()), public.nvfp4()), "qwen3.8-27b", ()),
    "27b, nested type without _text": (
        "Qwen3.6-27B-y", lambda: public.whole(public.text_27b() | {"model_type": "qwen3_5"}, public.nvfp4()),
        "qwen3.6-27b", ()),
    "27b, unsloth's marks": (
        "unsloth--Qwen3.6-27B-NVFP4",
        lambda: public.whole(public.text_27b(), public.nvfp4(), unsloth_fixed=True, unsloth_fixed_mtp=True),
        "qwen3.6-27b", ()),
    "35b, NVFP4 by compressed-tensors": (
        "Qwen3.6-35B-A3B-NVFP4", lambda: public.whole(public.text_35b(), public.nvfp4_experts()),
        "qwen3.6-35b-a3b", ()),
    "35b, under any name": (
        "some-folder", lambda: public.whole(public.text_35b(), public.nvfp4_experts()), "qwen3.6-35b-a3b", ()),
    "35b, re-saved by transformers 5": (
        "35b-resaved", lambda: public.resaved(public.text_35b(), public.modelopt()), "qwen3.6-35b-a3b", ()),
    "35b, text class of transformers 5": (
        "35b-text", lambda: public.text_alone(public.text_35b(), public.nvfp4_experts()), "qwen3.6-35b-a3b", ()),
    "35b, flag of the nested level set by transformers 5": (
        "35b-tied-inside",
        lambda: changed(public.resaved(public.text_35b(), public.modelopt()), tie_word_embeddings=True),
        "qwen3.6-35b-a3b", ()),
    "35b, rope parameters beside the rest": (
        "35b-flat", lambda: public.whole(public.flat_rope(public.text_35b()), public.nvfp4_experts()),
        "qwen3.6-35b-a3b", ()),
    "Holo, the 35b's config without an MTP head": ("Holo-3.1-35B-A3B-NVFP4", holo, "holo-3.1-35b-a3b", ()),
    "Ornith in a folder of its name": (
        "Ornith-1.0-35B-NVFP4",
        lambda: public.whole(public.text_35b(), public.nvfp4("re:.*self_attn.*", "re:.*mlp.gate$")),
        "qwen3.6-35b-a3b", ("REFERENCE_NAMES_OTHER",)),
    "heretic in a folder of its name": (
        "Qwen3.6-35B-A3B-heretic-NVFP4", lambda: public.whole(public.text_35b(), public.nvfp4_experts()),
        "qwen3.6-35b-a3b", ("REFERENCE_NAMES_OTHER",)),
}  # fmt: skip

#: Folder, its config, the code, and a part of its reason.
REFUSED: dict[str, tuple[str, Callable[[], Config], str, str]] = {
    "27b, FP8 blocks": (
        "Qwen3.6-27B-FP8", lambda: public.whole(public.text_27b(), public.fp8_blocks()), "UNKNOWN_MODEL",
        'in fp8; manifest: quant "nvfp4"; to accept it write quant = "fp8" under [model]'),
    "27b, FP8 by ModelOpt": (
        "Qwen3.6-27B-FP8", lambda: public.whole(public.text_27b(), public.modelopt("FP8")), "UNKNOWN_MODEL",
        'in fp8; manifest: quant "nvfp4"; to accept it write quant = "fp8"'),
    "27b, NVFP4 with AWQ's smoothing": (
        "Qwen3.6-27B-AWQ", lambda: public.whole(public.text_27b(), public.modelopt("NVFP4_AWQ")), "UNKNOWN_MODEL",
        "in 'NVFP4_AWQ'; manifest: quant \"nvfp4\"; no manifest accepts it: layers read nvfp4 and bf16"),
    "35b, FP8 blocks": (
        "35b", lambda: public.whole(public.text_35b(), public.fp8_blocks()), "UNKNOWN_MODEL",
         'in fp8; manifest: quant'),
    "35b, AWQ": (
        "35b", lambda: public.whole(public.text_35b(), public.awq()), "UNKNOWN_MODEL",
        "config.json: quantization_config has quant_method 'awq'; manifest: quant \"nvfp4\"; no manifest accepts it"),
    "35b, GPTQ": (
        "35b", lambda: public.whole(public.text_35b(), public.gptq()), "UNKNOWN_MODEL",
        "config.json: quantization_config has quant_method 'gptq'; manifest"),
    "27b, four-bit integers": (
        "Qwen3.6-27B-W4A16", lambda: public.whole(public.text_27b(), public.integers(4, 128)), "UNKNOWN_MODEL",
        "in 'int' of 4 bits; manifest"),
    "27b, eight-bit integers": (
        "Qwen3.6-27B-W8A8", lambda: public.whole(public.text_27b(), public.integers(8, None)), "UNKNOWN_MODEL",
        "in 'int' of 8 bits; manifest"),
    "27b, NVFP4 beside FP8": (
        "Qwen3.6-27B-mixed", lambda: public.whole(public.text_27b(), public.mixed()), "UNKNOWN_MODEL",
        'in fp8; manifest: quant "nvfp4"; no manifest accepts it: layers read nvfp4 and bf16, and one quantised form'),
    "3.5-27b, which no manifest tells from its successors": (
        "Qwen3.5-27B", lambda: public.whole(public.text_27b(), public.nvfp4()), "AMBIGUOUS_MODEL",
        "2 manifests serve (qwen3_5, 5120) equally well"),
    "27b without its MTP head": (
        "Qwen3.6-27B-NVFP4", lambda: changed(public.whole(public.text_27b(), public.nvfp4()), mtp_num_hidden_layers=0),
        "UNKNOWN_MODEL", "mtp_num_hidden_layers 0; manifest: mtp.layers 1; to accept it write no [model.mtp] table"),
    "35b with fewer experts": (
        "REAP", lambda: changed(public.whole(public.text_35b(), public.nvfp4_experts()), num_experts=192),
        "UNKNOWN_MODEL",
         "num_experts 192; manifest: moe.experts 256; to accept it write experts = 192 under [model.moe]"),
    "35b, stretched to a million tokens": (
        "35b-1M",
        lambda: changed(
            public.whole(public.text_35b(), public.nvfp4_experts()), max_position_embeddings=1010000,
            rope_parameters=public.ROPE | {"rope_type": "yarn", "factor": 4.0,
             "original_max_position_embeddings": 262144},
        ),
        "UNKNOWN_MODEL",
         'rope_parameters.rope_type "yarn"; manifest: no rope.yarn_factor; to accept it write yarn_factor = 4.0'),
    "35b with tied embeddings": (
        "35b-tied", lambda: public.whole(public.text_35b(), public.nvfp4_experts(), tie_word_embeddings=True),
        "UNKNOWN_MODEL", "tie_word_embeddings true (text_config: false); manifest: tie_word_embeddings false"),
    "3.5-9b": (
        "Qwen3.5-9B",
        lambda: changed(public.whole(public.text_27b()), hidden_size=4096, num_hidden_layers=32),
        "UNKNOWN_MODEL",
         "no manifest claims model_type qwen3_5, hidden_size 4096; of this type there is hidden_size 5120"),
    "3-8b": ("Qwen3-8B", public.qwen3, "UNKNOWN_MODEL", "no manifest claims model_type qwen3, hidden_size 4096"),
    "3-30b-a3b": ("Qwen3-30B-A3B", public.qwen3_moe, "UNKNOWN_MODEL",
     "no manifest claims model_type qwen3_moe, hidden"),
    "3-next": ("Qwen3-Next-80B-A3B", public.qwen3_next, "UNKNOWN_MODEL",
     "no manifest claims model_type qwen3_next, "),
    "3-vl-8b": ("Qwen3-VL-8B", public.qwen3_vl, "UNKNOWN_MODEL", "no manifest claims model_type qwen3_vl, hidden_size"),
    "3-vl-30b-a3b": (
        "Qwen3-VL-30B-A3B", lambda: public.qwen3_vl("qwen3_vl_moe"), "UNKNOWN_MODEL",
        "no manifest claims model_type qwen3_vl_moe, hidden_size 2048"),
    "a drafter by its folder": (
        "Qwen3.6-35B-A3B-DFlash", public.drafter, "UNKNOWN_MODEL",
         "no manifest claims model_type qwen3, hidden_size 2048"),
}  # fmt: skip


def folder(tmp_path: Path, name: str, config: Config, hf_quant: Config | None = None) -> Path:
    made = tmp_path / name
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if hf_quant is not None:
        (made / "hf_quant_config.json").write_text(json.dumps(hf_quant), encoding="utf-8")
    return made


@pytest.mark.parametrize("case", RESOLVED)
def test_public_config_resolves_to_its_model(tmp_path: Path, shipped: Catalogue, case: str) -> None:
    name, make, expected, doubts = RESOLVED[case]
    where = folder(tmp_path, name, make())
    found = shipped.resolve(str(where))
    assert found.finding is None, found.finding
    assert found.manifest is not None
    assert (found.manifest.name, tuple(one.code for one in found.doubts)) == (expected, doubts)
    again = shipped.resolve_config(where / "config.json", expected)  # named, and its config given
    assert again.finding is None, again.finding


@pytest.mark.parametrize("case", REFUSED)
def test_public_config_of_another_model_is_refused_with_the_cause(
    tmp_path: Path, shipped: Catalogue, case: str
) -> None:
    name, make, code, why = REFUSED[case]
    found = shipped.resolve(str(folder(tmp_path, name, make())))
    assert found.manifest is None
    assert found.finding is not None
    assert found.finding.code == code
    assert why in found.finding.why


def test_drafter_is_found_by_its_name(tmp_path: Path, shipped: Catalogue) -> None:
    where = folder(tmp_path, "Qwen3.6-35B-A3B-DFlash", public.drafter())
    unnamed = shipped.resolve(str(where)).finding
    assert unnamed is not None
    assert unnamed.remedies[0].startswith("name qwen3.6-35b-a3b-dflash, whose text the reference holds")
    found = shipped.resolve_config(where, "z-lab/Qwen3.6-35B-A3B-DFlash")
    assert (found.finding, found.doubts) == (None, ())
    for change, said in (
        ({"block_size": 8}, "block_size 8; manifest: dflash.gamma 16; to accept it write gamma = 8 under [dflash]"),
        (
            {"dflash_config": {"mask_token_id": 1}},
            "dflash_config.mask_token_id 1; manifest: dflash.mask_token_id 248070",
        ),
        (
            {"dflash_config": {"target_layer_ids": [1]}},
            "dflash_config.target_layer_ids [1]; manifest: dflash.target_la",
        ),
        ({"sliding_window": 8}, "sliding_window 8; manifest: dflash.window 4096; to accept it write window = 8 under"),
    ):
        finding = shipped.resolve_config(public.drafter() | change, "qwen3.6-35b-a3b-dflash").finding
        assert finding is not None
        assert f"config.json: {said}" in finding.why


@pytest.mark.parametrize(("algorithm", "said"), [
    ("NVFP4", None), ("FP8", 'in fp8; manifest: quant "nvfp4"; to accept it write quant = "fp8"'),
    ("W4A8_AWQ", "in 'W4A8_AWQ'; manifest"),
])  # fmt: skip
def test_quantisation_is_read_from_either_file(
    tmp_path: Path, shipped: Catalogue, algorithm: str, said: str | None
) -> None:
    config = public.whole(public.text_27b())
    where = folder(tmp_path, "Qwen3.6-27B", config, public.hf_quant(algorithm))
    for given in (where, where / "config.json"):
        found = shipped.resolve_config(given, "qwen3.6-27b")
        assert (found.finding is None) == (said is None)
        assert found.doubts == ()
        assert said is None or (found.finding is not None and said in found.finding.why)


def test_config_that_names_each_expert_is_judged_in_no_time(tmp_path: Path, shipped: Catalogue) -> None:
    """30,720 names: as expressions, each matched against each module, they took minutes."""
    layers = {
        f"model.language_model.layers.{layer}.mlp.experts.{expert}.{name}_proj": {"quant_algo": "NVFP4"}
        for layer in range(40) for expert in range(256) for name in ("gate", "up", "down")
    }  # fmt: skip
    quantised = public.modelopt("MIXED_PRECISION", quantized_layers=layers, ignore=[])
    where = folder(tmp_path, "35b", public.whole(public.text_35b(), quantised))
    began = time.process_time()
    found = shipped.resolve(str(where))
    assert (found.finding, found.doubts) == (None, ())
    layers["model.language_model.layers.7.mlp.experts.0.up_proj"] = {"quant_algo": "FP8"}
    finding = shipped.resolve_config(public.whole(public.text_35b(), quantised), "qwen3.6-35b-a3b").finding
    assert finding is not None
    assert "quantization_config has model.layers.7.mlp.experts.0.up_proj in fp8; manifest" in finding.why
    assert time.process_time() - began < 10


def test_quantisation_of_two_files_that_differ_is_refused(tmp_path: Path, shipped: Catalogue) -> None:
    config = public.whole(public.text_27b(), public.modelopt())
    finding = shipped.resolve(str(folder(tmp_path, "Qwen3.6-27B", config, public.hf_quant("FP8")))).finding
    assert finding is not None
    assert "nvfp4 in config.json, fp8 in hf_quant_config.json" in finding.why


def test_no_field_of_a_public_config_is_unknown() -> None:
    made = [make() for _, make, *_ in (*RESOLVED.values(), *REFUSED.values())]
    for config in made:
        is_read = config.get("quantization_config", {}).get("quant_method") not in ("awq", "gptq")
        unknown = [one.name for one in unknown_fields(HfConfig(config)) if is_read or "quantization_" not in one.name]
        assert unknown == []


@pytest.mark.parametrize(("change", "name"), [
    ({"attention_sharpness": 2}, "text_config.attention_sharpness = 2"),
    ({"rope_parameters": public.ROPE | {"rope_warp": "x"}}, 'text_config.rope_parameters.rope_warp = "x"'),
    ({"expert_choice": {"a": 1}}, "text_config.expert_choice = a table"),
    ({"attention_sharpness": False}, "text_config.attention_sharpness = false"),
    ({"attention_sharpness": None}, None),
    ({"quantization_config": public.nvfp4(rounding="up")}, 'text_config.quantization_config.rounding = "up"'),
])  # fmt: skip
def test_field_that_nobody_knows_is_a_doubt(
    tmp_path: Path, shipped: Catalogue, change: Config, name: str | None
) -> None:
    quantised = None if "quantization_config" in change else public.nvfp4_experts()
    where = folder(tmp_path, "35b", changed(public.whole(public.text_35b(), quantised), **change))
    found = shipped.resolve(str(where))
    assert found.manifest is not None
    if name is None:
        assert found.doubts == ()
        return
    (doubt,) = found.doubts
    assert (doubt.code, doubt.subject, doubt.where) == (
        "UNKNOWN_CONFIG_FIELD", "config.json", (str(where / "config.json"),),
    )  # fmt: skip
    assert doubt.why.endswith(f": {name}")
