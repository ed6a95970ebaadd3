"""A model from its config.json: the same dimensions as its manifest, and the same model from both."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.models.build import build_model
from kernel_muster.models.config_model import config_differences, config_model
from kernel_muster.models.drafter import build_drafter
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.weights.source import SyntheticWeights
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups

Make = Callable[..., LookupSession]
COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
GROUP = {
    "format": "nvfp4-pack-quantized", "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"},
}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
ROPE = {
    "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}  # fmt: skip
TEXT = {
    "vocab_size": 248320, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "head_dim": 256,
    "attn_output_gate": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1, "rope_parameters": ROPE,
}  # fmt: skip
DENSE = {
    **TEXT, "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "intermediate_size": 17408, "linear_num_value_heads": 48,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
}  # fmt: skip
MOE = {
    **TEXT, "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "full_attention_interval": 4,
}  # fmt: skip
HOLO = {**MOE, "mtp_num_hidden_layers": None}
DRAFTER = {
    "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "hidden_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "vocab_size": 248320, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000000, "block_size": 16,
    "sliding_window": 4096, "layer_types": ["sliding_attention"] * 8, "quantization_config": COMPRESSED,
    "rope_scaling": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
}  # fmt: skip


def nested(text: dict[str, Any], quantised: Any = COMPRESSED) -> dict[str, Any]:
    kind = text["model_type"].removesuffix("_text")
    return {"model_type": kind, "text_config": text, "vision_config": {"depth": 27}, "quantization_config": quantised}


CONFIGS = {
    "qwen3.6-27b": nested(DENSE), "qwen3.8-27b": nested(DENSE, MODELOPT), "qwen3.6-35b-a3b": nested(MOE),
    "ornith-1.0-35b": nested(MOE), "qwen3.6-35b-a3b-heretic": nested(MOE),
    "holo-3.1-35b-a3b": nested(HOLO, {"quant_method": "compressed-tensors", "config_groups": {"a": GROUP}}),
    "qwen3.6-35b-a3b-dflash": DRAFTER,
}  # fmt: skip


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {manifest.name: manifest for manifest in Catalogue.from_folders([manifest_folder()]).manifests}


def test_configs_are_those_of_all_shipped_models(manifests: dict[str, Any]) -> None:
    assert set(CONFIGS) == set(manifests)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_of_each_model_gives_the_dimensions_of_its_manifest(manifests: dict[str, Any], name: str) -> None:
    found = config_model(CONFIGS[name], name, "qwen3.6-35b-a3b")
    assert config_differences(manifests[name].model, found.model) == ()
    assert found.has_vision == (name != "qwen3.6-35b-a3b-dflash")
    if name == "ornith-1.0-35b":  # its attention is BF16 in the weights, without a mark in the config
        return
    assert model_dims(found) == model_dims(manifests[name])


@pytest.mark.parametrize("name", ["qwen3.6-27b", "holo-3.1-35b-a3b", "qwen3.6-35b-a3b-dflash"])
def test_config_and_manifest_ask_for_the_same_kernels(
    make_session: Make, asked: Any, manifests: dict[str, Any], name: str
) -> None:
    build = build_drafter if "dflash" in name else build_model
    found = []
    for source in (config_model(CONFIGS[name], name, "qwen3.6-35b-a3b"), manifests[name]):
        kernels = Lookups(make_session())
        build(source, kernels)
        found.append({question: row.layers for question, row in asked(kernels).items()})
    assert found[0] == found[1]


def test_differences_name_what_a_manifest_has_wrong(manifests: dict[str, Any]) -> None:
    found = config_model(
        nested(
            {**DENSE, "vocab_size": 151936, "head_dim": 128, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
        ),
        "x",
    )
    assert config_differences(manifests["qwen3.6-27b"].model, found.model) == (
        "attention.head_dim is 256 in the manifest, 128 in the config",
        "rope.partial_factor is 0.25 in the manifest, 0.5 in the config",
        "vocab_size is 248320 in the manifest, 151936 in the config",
    )


TINY = {
    **DENSE, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "intermediate_size": 96, "vocab_size": 80, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_num_value_heads": 4, "linear_value_head_dim": 16, "layer_types": DENSE["layer_types"][:4],
    "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
}  # fmt: skip


def test_tiny_config_builds_a_model_that_computes(make_session: Make) -> None:
    model = build_model(config_model(nested(TINY), "tiny"), Lookups(make_session()), SyntheticWeights(), 16)
    state = model.new_state(StateSizes(1, 4))
    (done,) = model.prefill(state, [state.open()], [[1, 2, 3]])
    assert np.isfinite(done.logits.astype(np.float64)).all()


def test_vision_tower_is_refused_clearly_and_is_a_finding(make_session: Make) -> None:
    session = make_session()
    with pytest.raises(UsageError, match="cannot be built for image, video: the vision tower is not built"):
        build_model(config_model(nested(TINY), "tiny"), Lookups(session), modalities=("text", "video", "image"))
    (request,) = session.requests
    assert "vision tower is not built" in request.why


@pytest.mark.parametrize(("changes", "message"), [
    ({"hidden_act": "gelu"}, 'hidden_act "gelu"; manifest: "silu", built in; no manifest accepts it'),
    ({"attention_bias": True}, "attention_bias true; manifest: false, built in; no manifest accepts it"),
    ({"rms_norm_eps": None, "linear_key_head_dim": None}, "rms_norm_eps is missing; linear_key_head_dim is missing"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types holds sliding_attention, expected linear_attention or"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
    ({"quantization_config": {"quant_method": "fp8"}}, "its weights are fp8, expected nvfp4 or bf16"),
    ({"quantization_config": COMPRESSED | {"format": "float-quantized"}},
     "its weights are fp8, expected nvfp4 or bf16"),
    ({"quantization_config": {"quant_method": "gptq"}},
     "expected quant_method compressed-tensors or modelopt, got 'gptq'"),
    ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3"}},
     'rope_type "llama3"; manifest: no rope.yarn_factor'),
    ({"rope_parameters": {}}, "rope_theta is missing"),
    ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "beta_fast": 16,
                          "original_max_position_embeddings": 64}}, "beta_fast 16; manifest: 32, built into the YaRN"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
     'it contradicts itself or the layers: config.json: rope_sc'),
    ({"rope_scaling": {"factor": 4.0}},
     "it contradicts itself or the layers: config.json: rope_scaling.factor 4.0 without"),
    ({"moe": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "scoring_func": "noaux"},
     "moe.router: Input should be 'softmax' or 'sigmoid'"),
    ({"num_attention_heads": "two"}, "attention.heads: Input should be a valid integer"),
    ({"model_type": None}, "it has no model_type"),
    ({"dflash_config": {}}, "a drafter's config does not name its target; block_size is missing"),
])  # fmt: skip
def test_config_that_cannot_be_built_from_names_everything(changes: dict[str, Any], message: str) -> None:
    message = message.replace("target;", "target: give one;")
    with pytest.raises(UsageError, match=re.escape(message)):
        config_model({**TINY, "quantization_config": COMPRESSED, **changes}, "tiny")


@pytest.mark.parametrize(("change", "message"), [
    ({"gamma": 0}, "gamma 0 and window 8: expected at least 1"),
    ({"mask_token_id": 96}, "mask_token_id is 96, expected 0"),
    ({"mask_token_id": "x"}, "dflash.mask_token_id is 'x', expected an integer"),
    ({"target_layer_ids": [3, 1]}, r"target_layer_ids is \[3, 1\], expected rising"),
    ({"target_layer_ids": 3}, "target_layer_ids is 3, expected a list"), ({"target": None}, "dflash.target is None"),
    (None, r"its manifest has no \[dflash\] table"),
])  # fmt: skip
def test_drafter_table_that_makes_no_sense_is_a_finding(
    make_session: Make, change: dict[str, Any] | None, message: str
) -> None:
    table = config_model({**DRAFTER, "vocab_size": 96}, "draft", "t").model
    good = {"target": "t", "gamma": 4, "window": 8, "mask_token_id": 95, "target_layer_ids": [0, 2]}

    class Manifest:
        model = table
        dflash = {} if change is None else {**good, **change}

    session = make_session()
    with pytest.raises(UsageError, match=message):
        build_drafter(Manifest(), Lookups(session))
    assert len(session.requests) == 1


def test_drafter_is_no_model_and_fits_its_own_target_only(make_session: Make, tiny: Any) -> None:
    with pytest.raises(UsageError, match=r"it is a drafter of qwen3\.6-35b-a3b, not a model"):
        build_model(config_model(DRAFTER, "draft", "qwen3.6-35b-a3b"), Lookups(make_session()))
    found = config_model({**DRAFTER, "vocab_size": 248320}, "draft", "other")
    match = "it drafts for other; hidden is 2048, the target's 64; vocab is 248320, the target's 96; it reads layer 37"
    with pytest.raises(UsageError, match=match):
        build_drafter(found, Lookups(make_session()), target=tiny("dense"))
