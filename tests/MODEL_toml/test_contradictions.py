"""A config.json that has type and size of a model and is another one all the same."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.MODEL_toml.contradictions import _KEYS, _ROPE_KEYS, contradictions
from kernel_muster.MODEL_toml.schema import ModelTable

ROPE = {
    "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}  # fmt: skip
DENSE: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248320,
    "intermediate_size": 17408, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "attn_output_gate": True, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    "rope_parameters": ROPE, "mtp_num_hidden_layers": 1,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_6_moe", "hidden_size": 2048, "num_hidden_layers": 40, "full_attention_interval": 4,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512, "rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_scaling": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def shipped() -> Catalogue:
    return Catalogue.from_folders([manifest_folder()])


def nested(text: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": text["model_type"].removesuffix("_text"), "text_config": text, **more}


@pytest.mark.parametrize(("config", "name"), [
    (DENSE, "qwen3.6-27b"), (nested(DENSE), "qwen3.8-27b"), (MOE, "qwen3.6-35b-a3b"),
    ({"model_type": "qwen3_5", "hidden_size": 5120}, "qwen3.6-27b"),
    (nested({**DENSE, "head_dim": None}, vocab_size=None), "qwen3.6-27b"),
    (nested(DENSE, quantization_config={"quant_method": "compressed-tensors"}), "qwen3.6-27b"),
    (nested(DENSE, quantization_config={"quant_method": "modelopt"}), "qwen3.6-27b"),
    ({**DENSE, "rope_parameters": {"full_attention": ROPE, "linear_attention": {"rope_theta": 1}}}, "qwen3.6-27b"),
    ({**DENSE, "max_position_embeddings": 262144}, "qwen3.6-27b"),
    ({**DENSE, "full_attention_interval": 4}, "qwen3.6-27b"),
    ({**DENSE, "layer_types": None, "full_attention_interval": 4.0}, "qwen3.6-27b"),
    ({**DENSE, "rope_theta": 1e7, "rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10]}}, "qwen3.6-27b"),
    ({**DENSE, "rope_scaling": {"rope_type": None, "factor": 1.0}}, "qwen3.6-27b"),
    ({**DENSE, "rope_parameters": {**ROPE, "beta_fast": 16}}, "qwen3.6-27b"),
    ({**DENSE, "max_position_embeddings": 1010000}, "qwen3.6-27b"),
])  # fmt: skip
def test_config_that_says_the_same_or_less_is_no_contradiction(
    shipped: Catalogue, config: dict[str, Any], name: str
) -> None:
    found = shipped.resolve_config(config, name)
    assert found.finding is None
    assert found.manifest is not None
    assert found.manifest.name == name


@pytest.mark.parametrize(("change", "said"), [
    ({"num_hidden_layers": 63}, "num_hidden_layers is 63, expected 64 (num_layers)"),
    ({"num_hidden_layers": "64"}, "num_hidden_layers is '64', expected 64 (num_layers)"),
    ({"num_hidden_layers": True}, "num_hidden_layers is true, expected 64"),
    ({"vocab_size": 151936}, "vocab_size is 151936, expected 248320"),
    ({"intermediate_size": 27648}, "intermediate_size is 27648, expected 17408"),
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, expected 1e-06"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected 1e-06"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is true, expected false"),
    ({"head_dim": 128}, "head_dim is 128, expected 256 (attention.head_dim)"),
    ({"attn_output_gate": False}, "attn_output_gate is false, expected true (attention.gated)"),
    ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3, expected 4 (gdn.conv_width)"),
    ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2, expected 1 (mtp.layers)"),
    ({"num_experts": 8}, "num_experts is 8, expected none (ffn = 'dense')"),
    ({"layer_types": ["full_attention"] * 64},
     "layer_types are 0 gdn and 64 full, the first full one at 0, expected 48 gdn and 16 full"),
    ({"layer_types": None, "full_attention_interval": 2}, "full_attention_interval is 2, expected 48 gdn and 16 full"),
    ({"rope_parameters": {**ROPE, "rope_theta": 1e6}}, "rope_theta is 1000000.0, expected 10000000.0 (rope.theta)"),
    ({"rope_parameters": None, "rope_theta": 5}, "rope_theta is 5, expected 10000000.0"),
    ({"rope_parameters": {**ROPE, "mrope_section": [16, 8, 8]}},
     "mrope_section is [16, 8, 8], expected [11, 11, 10] (rope.mrope_sections)"),
    ({"rope_parameters": {**ROPE, "mrope_interleaved": False}}, "mrope_interleaved is false, expected true"),
    ({"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}},
     "rope_type is 'yarn', expected another (rope.yarn_factor)"),
    ({"rope_parameters": {**ROPE, "rope_type": "llama3"}}, "rope_type is 'llama3', expected default or mrope or yarn"),
    ({"layer_types": None, "full_attention_interval": 3.0}, "full_attention_interval is 3.0, expected 48 gdn and 16"),
    ({"layer_types": None, "full_attention_interval": "4"},
     "full_attention_interval is '4', expected a positive integer"),
    ({"full_attention_interval": 2}, "full_attention_interval is 2, expected 48 gdn and 16 full"),
    ({"full_attention_interval": 4.5}, "full_attention_interval is 4.5, expected a positive integer"),
    ({"full_attention_interval": 0}, "full_attention_interval is 0, expected a positive integer"),
    ({"full_attention_interval": True}, "full_attention_interval is true, expected a positive integer"),
    ({"full_attention_interval": float("nan")}, "full_attention_interval is nan, expected a positive integer"),
    ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list of the kind of each layer"),
    ({"layer_types": [*["linear_attention"] * 3, "mamba"] * 16},
     "layer_types has 'mamba', expected linear_attention or full_attention or sliding_attention"),
    ({"layer_types": [["x"], {}, None]}, "layer_types has a list, expected linear_attention or"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn', expected another"),
    ({"rope_scaling": {"rope_theta": 1e4}}, "rope_theta is 10000.0, expected 10000000.0"),
    ({"rope_theta": 1e4}, "rope_theta is 10000.0, expected 10000000.0"),
    ({"rope_parameters": None, "rope_scaling": {"rope_type": None, "type": "linear", "factor": 8.0}},
     "rope_type is 'linear', expected default or mrope or yarn"),
    ({"rope_parameters": {**ROPE, "type": "yarn"}}, "rope_type is 'yarn', expected another"),
    ({"rope_parameters": {"rope_theta": 1e7, "factor": 8.0}},
     "rope factor is 8.0 and rope_type is missing, expected no factor"),
    ({"rope_scaling": {"factor": "8"}}, "rope factor is '8' and rope_type is missing"),
    ({"rope_parameters": {**ROPE, "full_attention": {"rope_theta": 5}}}, "rope_theta is 5, expected 10000000.0"),
    ({"rope_parameters": {**ROPE, "sliding_attention": {"rope_theta": 5}}}, "rope_theta is 5, expected 10000000.0"),
    ({"max_position_embeddings": 262143}, "max_position_embeddings is 262143, expected at least 262144"),
    ({"max_position_embeddings": "262144"}, "max_position_embeddings is '262144', expected at least 262144"),
    ({"max_position_embeddings": True}, "max_position_embeddings is true, expected at least 262144"),
    ({"max_position_embeddings": float("nan")}, "max_position_embeddings is nan, expected at least 262144"),
    ({"quantization_config": {"quant_method": "gptq"}},
     "quantization_config.quant_method is 'gptq', expected one of nvfp4 (quant)"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quant_method is 'fp8', expected one of nvfp4"),
])  # fmt: skip
@pytest.mark.parametrize("is_nested", [False, True])
def test_config_that_contradicts_its_manifest_is_of_no_known_model(
    shipped: Catalogue, change: dict[str, Any], said: str, is_nested: bool
) -> None:
    config = {**DENSE, **change}
    found = shipped.resolve_config(nested(config) if is_nested else config, "a fine tune of qwen3.6-27b")
    assert found.manifest is None
    assert found.finding is not None
    assert (found.finding.code, found.finding.subject) == ("UNKNOWN_MODEL", "qwen3.6-27b")
    assert said in found.finding.why
    assert found.finding.where[0].startswith(str(manifest_folder() / "qwen3.6-27b" / "MODEL.toml"))
    assert "but the config.json contradicts it" in found.steps[-1]


@pytest.mark.parametrize(("change", "said"), [
    ({"num_experts": 128}, "num_experts is 128, expected 256 (moe.experts)"),
    ({"norm_topk_prob": False}, "norm_topk_prob is false, expected true (moe.renormalise)"),
    ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4, expected 8"),
])  # fmt: skip
def test_model_that_is_named_must_be_that_of_its_config(shipped: Catalogue, change: dict[str, Any], said: str) -> None:
    finding = shipped.resolve_config({**MOE, **change}, "qwen3.6-35b-a3b").finding
    assert finding is not None
    assert said in finding.why


SMALL: dict[str, Any] = {"name": "small", "quant": "bf16"}


@pytest.mark.parametrize(("kind", "is_zero_centred"), [
    ("qwen3_next", True), ("qwen3_5", True), ("qwen3_5_text", True), ("qwen3_5_moe", True), ("qwen3_6_moe_text", True),
    ("qwen3", False), ("qwen3_moe", False), ("qwen2", False), ("llama", False), ("mistral", False),
])  # fmt: skip
def test_rule_of_norms_is_that_of_the_model_type(kind: str, is_zero_centred: bool) -> None:
    right, wrong = (ModelTable(**SMALL, rms_norm_zero_centred=one) for one in (is_zero_centred, not is_zero_centred))
    assert contradictions(right, {"model_type": kind}) == ()
    rules = ("1 + weight", "the weight alone") if is_zero_centred else ("the weight alone", "1 + weight")
    said = f"norms of model_type {kind!r} multiply by {rules[0]}, expected {rules[1]} (rms_norm_zero_centred)"
    assert contradictions(wrong, {"text_config": {"model_type": kind}, "model_type": "other"}) == (said,)


@pytest.mark.parametrize("kind", ["unheard_of", 7, None, ["qwen3_5"]])
def test_rule_of_norms_of_a_type_that_nobody_knows_is_no_contradiction(kind: object) -> None:
    for rule in (True, False):
        assert contradictions(ModelTable(**SMALL, rms_norm_zero_centred=rule), {"model_type": kind}) == ()


def test_rule_of_norms_is_compared_where_a_manifest_has_norms() -> None:
    config = {"model_type": "qwen3_5"}
    assert contradictions(ModelTable.model_validate(SMALL), config) == ()  # of an engine that is audited by traces
    assert len(contradictions(ModelTable.model_validate({**SMALL, "rms_norm_eps": 1e-6}), config)) == 1


def test_context_that_yarn_stretches_may_be_longer_than_the_config_says() -> None:
    rope = {"theta": 1e4, "yarn_factor": 4.0, "yarn_original_context": 1000}
    for context, count in ((4000, 0), (4001, 1)):
        model = ModelTable.model_validate({**SMALL, "context_length": context, "rope": rope})
        assert len(contradictions(model, {"max_position_embeddings": 1000})) == count


YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(("rope", "said"), [
    (YARN, ()),
    ({**YARN, "beta_fast": 32.0, "beta_slow": 1, "truncate": True, "attention_factor": None}, ()),
    ({"rope_theta": 1e4}, ()),
    ({**YARN, "beta_fast": 16}, ("rope beta_fast is 16, expected 32, which the YaRN kernel has built in",)),
    ({**YARN, "truncate": False}, ("rope truncate is false, expected true, which the YaRN kernel has built in",)),
    ({**YARN, "mscale": 1.0}, ("rope mscale is 1.0, expected none, which the YaRN kernel has built in",)),
    ({**YARN, "rope_type": None, "type": "default"}, ("rope_type is 'default', expected yarn (rope.yarn_factor)",)),
    ({**YARN, "rope_type": None}, ("rope factor is 64.0 and rope_type is missing, expected yarn",)),
    ({**YARN, "factor": 32}, ("factor is 32, expected 64.0 (rope.yarn_factor)",)),
])  # fmt: skip
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_stretched_rope_is_compared_with_its_options(key: str, rope: dict[str, Any], said: tuple[str, ...]) -> None:
    table = {"theta": 1e4, "yarn_factor": 64.0, "yarn_original_context": 4096}
    assert contradictions(ModelTable.model_validate({**SMALL, "rope": table}), {key: rope}) == said


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_parameters_that_are_no_table_are_said(key: str) -> None:
    assert contradictions(ModelTable(**SMALL), {key: [1]}) == (f"{key} is a list, expected an object",)


def test_shared_expert_that_a_manifest_does_not_have_is_a_contradiction() -> None:
    moe = {"experts": 8, "top_k": 2, "intermediate_size": 64}
    model = ModelTable.model_validate({**SMALL, "ffn": "moe", "moe": moe})
    assert contradictions(model, {"shared_expert_intermediate_size": 0}) == ()
    said = "shared_expert_intermediate_size is 64, expected none (moe.shared_intermediate_size)"
    assert contradictions(model, {"shared_expert_intermediate_size": 64}) == (said,)


def test_many_contradictions_are_counted(shipped: Catalogue) -> None:
    # another hidden size would be another model of the type, and is said as that
    config = {**DENSE, **dict.fromkeys(_KEYS.values(), 7), "hidden_size": DENSE["hidden_size"]}
    finding = shipped.resolve_config(config, "qwen3.6-27b").finding
    assert finding is not None
    assert "; and " in finding.why
    assert finding.why.endswith(" more")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted({
    *_KEYS.values(), *_ROPE_KEYS.values(), "layer_types", "full_attention_interval", "rope_parameters", "rope_scaling",
    "rope_type", "type", "quantization_config", "quant_method", "text_config", "full_attention", "sliding_attention",
    "num_experts", "beta_fast", "truncate",
}))  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, JSON | st.dictionaries(NAMES, JSON, max_size=3), max_size=6))
def test_whatever_stands_in_a_config_is_compared_without_an_exception(config: dict[str, Any]) -> None:
    for manifest in Catalogue.from_folders([manifest_folder()]).manifests[:2]:
        assert all(isinstance(text, str) and len(text) < 400 for text in contradictions(manifest.model, config))
