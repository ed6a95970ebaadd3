"""A config.json with the type and size of a model, but of another model."""

import re
from functools import cache
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.MODEL_toml.hf.contradictions import contradictions
from kernel_muster.MODEL_toml.hf.fields import BUILT_IN, KEYS, ROPE_KEYS
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
    "mtp_num_hidden_layers": 1,
}  # fmt: skip


@cache
def all_shipped() -> Catalogue:
    return Catalogue.from_folders([manifest_folder()])


@pytest.fixture(scope="module")
def shipped() -> Catalogue:
    return all_shipped()


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


CHANGES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"num_hidden_layers": 63}, "num_hidden_layers 63", "num_layers 64", "num_layers = 63 under [model]"),
    ({"num_hidden_layers": "64"}, "num_hidden_layers \"64\"", "num_layers 64",
     "no manifest accepts it: expected a value like 64"),
    ({"num_hidden_layers": True}, "num_hidden_layers true", "num_layers 64", "no manifest accepts it: expected a valu"),
    ({"vocab_size": 151936}, "vocab_size 151936", "vocab_size 248320", "vocab_size = 151936 under [model]"),
    ({"intermediate_size": 27648}, "intermediate_size 27648", "intermediate_size 17408", "intermediate_size = 27648"),
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05", "rms_norm_eps 1e-06", "rms_norm_eps = 1e-05 under [model]"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan", "rms_norm_eps 1e-06", "no manifest accepts it: expected"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings true", "tie_word_embeddings false",
     "tie_word_embeddings = true under [model]"),
    ({"head_dim": 128}, "head_dim 128", "attention.head_dim 256", "head_dim = 128 under [model.attention]"),
    ({"attn_output_gate": False}, "attn_output_gate false", "attention.gated true",
     "gated = false under [model.attention]"),
    ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3", "gdn.conv_width 4",
     "conv_width = 3 under [model.gdn]"),
    ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers 2", "mtp.layers 1", "layers = 2 under [model.mtp]"),
    ({"mtp_num_hidden_layers": None}, "mtp_num_hidden_layers null", "mtp.layers 1", "no [model.mtp] table"),
    ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers 0", "mtp.layers 1", "no [model.mtp] table"),
    ({"num_experts": 8}, "num_experts 8", 'ffn "dense"', 'ffn = "moe" under [model], and [model.moe]'),
    ({"layer_types": ["full_attention"] * 64}, "layer_types 0 gdn and 64 full, the first full one at 0",
     "layer_pattern over 64 layers, 48 gdn and 16 full, the first full one at 3",
     'layer_pattern = ["full"] and num_layers = 64 under [model]'),
    ({"layer_types": None, "full_attention_interval": 2}, "full_attention_interval 2",
     "layer_pattern over 64 layers, 48 gdn and 16 full", 'layer_pattern = ["gdn", "full"] and num_layers = 64'),
    ({"rope_parameters": {**ROPE, "rope_theta": 1e6}}, "rope_parameters.rope_theta 1000000.0",
     "rope.theta 10000000.0", "theta = 1000000.0 under [model.rope]"),
    ({"rope_parameters": None, "rope_theta": 5}, "rope_theta 5", "rope.theta 10000000.0", "theta = 5 under"),
    ({"rope_parameters": {**ROPE, "mrope_section": [16, 8, 8]}}, "rope_parameters.mrope_section [16, 8, 8]",
     "rope.mrope_sections [11, 11, 10]", "mrope_sections = [16, 8, 8] under [model.rope]"),
    ({"rope_parameters": {**ROPE, "mrope_interleaved": False}}, "rope_parameters.mrope_interleaved false",
     "rope.mrope_interleaved true", "mrope_interleaved = false under [model.rope]"),
    ({"mrope_interleaved": False}, "mrope_interleaved false", "rope.mrope_interleaved true",
     "no manifest accepts it: config.json gives it two values"),
    ({"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65536}},
     "rope_parameters.rope_type \"yarn\"", "no rope.yarn_factor",
     "yarn_factor = 4.0 and yarn_original_context = 65536 under [model.rope]"),
    ({"rope_parameters": {**ROPE, "rope_type": "llama3"}},
     "rope_parameters.rope_type \"llama3\"", "no rope.yarn_factor",
     "no manifest accepts it: expected default or mrope or yarn"),
    ({"rope_type": "llama3"}, "rope_type \"llama3\"", "no rope.yarn_factor", "no manifest accepts it: expected defaul"),
    ({"layer_types": None, "full_attention_interval": 3.0}, "full_attention_interval 3.0", "layer_pattern over 64",
     "layer_pattern = [the kinds of all 64 layers] and num_layers = 64 under"),
    ({"layer_types": None, "full_attention_interval": "4"}, 'full_attention_interval "4"', "layer_pattern",
     "no manifest accepts it: expected a positive integer"),
    ({"full_attention_interval": 2}, "full_attention_interval 2", "layer_pattern over 64", "layer_pattern = "),
    ({"full_attention_interval": 4.5}, "full_attention_interval 4.5", "layer_pattern", "no manifest accepts it: expec"),
    ({"full_attention_interval": 0}, "full_attention_interval 0", "layer_pattern", "no manifest accepts it: expected "),
    ({"full_attention_interval": True}, "full_attention_interval true", "layer_pattern", "no manifest accepts it: exp"),
    ({"full_attention_interval": float("nan")}, "full_attention_interval nan", "layer_pattern", "no manifest accepts"),
    ({"layer_types": "full_attention"}, 'layer_types "full_attention"', "layer_pattern",
     "no manifest accepts it: expected a list of the kind of each layer"),
    ({"layer_types": [*["linear_attention"] * 3, "mamba"] * 16}, 'layer_types "mamba" among them',
     "layer_pattern over 64", "no manifest accepts it: expected linear_attention or full_attention"),
    ({"layer_types": [["x"], {}, None]}, 'layer_types ["x"] among them', "layer_pattern", "no manifest"),
    ({"layer_types": [*["linear_attention"] * 3, "sliding_attention"] * 16}, 'layer_types "sliding_attention" among',
     "attention to the whole context", "known_config_fields = "),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type \"yarn\"", "no rope.yarn_factor",
     "no manifest accepts it: config.json gives it two values"),
    ({"rope_scaling": {"rope_theta": 1e4}}, "rope_scaling.rope_theta 10000.0", "rope.theta 10000000.0",
     "no manifest accepts it: config.json gives it two values"),
    ({"rope_theta": 1e4}, "rope_theta 10000.0", "rope.theta 10000000.0",
     "no manifest accepts it: config.json gives it two values"),
    ({"rope_parameters": None, "rope_scaling": {"rope_type": None, "type": "linear", "factor": 8.0}},
     'rope_scaling.type "linear"', "no rope.yarn_factor", "no manifest accepts it: expected default or mrope or yarn"),
    ({"rope_parameters": {**ROPE, "type": "yarn"}}, 'rope_parameters.type "yarn"', "no rope.yarn_factor",
     "no manifest accepts it: config.json gives it two values"),
    ({"rope_parameters": {"rope_theta": 1e7, "factor": 8.0}}, "rope_parameters.factor 8.0 without rope_type",
     "no rope.yarn_factor", "no manifest accepts it: a factor needs its rope_type"),
    ({"rope_scaling": {"factor": "8"}}, 'rope_scaling.factor "8" without rope_type', "no rope.yarn_factor", "no manif"),
    ({"rope_parameters": {**ROPE, "full_attention": {"rope_theta": 5}}}, "rope_parameters.full_attention.rope_theta 5",
     "rope.theta 10000000.0",
     "no manifest accepts it: config.json gives it two values"),
    ({"rope_parameters": {**ROPE, "sliding_attention": {"rope_theta": 5}}},
     "rope_parameters.sliding_attention.rope_theta 5", "rope.theta 10000000.0",
     "no manifest accepts it: config.json gives it two values"),
    ({"max_position_embeddings": 262143}, "max_position_embeddings 262143", "context_length 262144",
     "context_length = 262143 under [model]"),
    ({"max_position_embeddings": "262144"}, 'max_position_embeddings "262144"', "context_length 262144",
     "no manifest accepts it: expected an integer"),
    ({"max_position_embeddings": True}, "max_position_embeddings true", "context_length 262144", "no manifest accepts"),
    ({"max_position_embeddings": float("nan")}, "max_position_embeddings nan", "context_length 262144", "no manifest"),
    ({"hidden_act": "gelu"}, 'hidden_act "gelu"', '"silu", built in',
     'known_config_fields = ["hidden_act"] under [model], if the builder of the model computes it'),
    ({"attention_bias": True}, "attention_bias true", "false, built in", 'known_config_fields = ["attention_bias"]'),
    ({"use_sliding_window": True}, "use_sliding_window true", "false, built in", "known_config_fields"),
    ({"sliding_window": 4096}, "sliding_window 4096", "attention to the whole context", "known_config_fields = "),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0", "none, built in", "known_config_fields"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0", "none, built in", "known_config_fields"),
    ({"mlp_only_layers": [0]}, "mlp_only_layers [0]", "none, built in", "known_config_fields"),
    ({"mamba_ssm_dtype": "bfloat16"}, 'mamba_ssm_dtype "bfloat16"', '"float32", built in', "known_config_fields"),
    ({"output_gate_type": "sigmoid"}, 'output_gate_type "sigmoid"', '"silu", built in', "known_config_fields"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings true", "false, built in", "known_config"),
    ({"use_qk_norm": False}, "use_qk_norm false", "attention.qk_norm true", "qk_norm = false under [model.attention]"),
    ({"dflash_config": {"mask_token_id": 1}}, "dflash_config a table", "no [dflash]", "a [dflash] table"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said", "mine", "accept"), CHANGES)
@pytest.mark.parametrize("is_nested", [False, True])
def test_config_that_contradicts_its_manifest_is_of_no_known_model(
    shipped: Catalogue, change: dict[str, Any], said: str, mine: str, accept: str, is_nested: bool
) -> None:
    config = {**DENSE, **change}
    found = shipped.resolve_config(nested(config) if is_nested else config, "a fine tune of qwen3.6-27b")
    assert found.manifest is None
    assert found.finding is not None
    assert (found.finding.code, found.finding.subject) == ("UNKNOWN_MODEL", "qwen3.6-27b")
    text = found.finding.why
    assert f"config.json: {said}" in text
    rest = text[text.index(f"config.json: {said}") :]
    assert f"; manifest: {mine}" in rest
    assert f"{'; ' if accept.startswith('no manif') else '; to accept it write '}{accept}" in rest
    assert found.finding.where[0].startswith(str(manifest_folder() / "qwen3.6-27b" / "MODEL.toml"))
    assert "but the config.json contradicts it" in found.steps[-1]


LINE = re.compile(r"(\w+) = (.+?)(?: and (\w+) = (.+?))? under \[model\.?(\w*)\]")
#: Facts that depend on others: one line alone makes no valid manifest.
FOLLOWED = ("num_hidden_layers", "head_dim", "num_experts", "layer_types")


@pytest.mark.parametrize("change", [change for change, _, _, accept in CHANGES if LINE.match(accept)
                                    and not set(FOLLOWED) & set(change)], ids=str)  # fmt: skip
def test_line_that_would_accept_a_field_accepts_it(shipped: Catalogue, change: dict[str, Any]) -> None:
    config = {**DENSE, **change}
    manifest = shipped.resolve("qwen3.6-27b").manifest
    assert manifest is not None
    table, found = manifest.model.model_dump(), contradictions(manifest.model, config)
    for one in found:
        if line := LINE.match(one.accept):
            *pairs, owner = line.groups()
            for name, value in zip(pairs[::2], pairs[1::2], strict=True):
                if name:
                    (table[owner] if owner else table)[name] = tomli.loads(f"value = {value}")["value"]
    model = ModelTable.model_validate(table)
    left = contradictions(model, config, known=model.known_config_fields)
    assert [str(one) for one in left if LINE.match(one.accept)] == []


@pytest.mark.parametrize(("change", "said"), [
    ({"num_experts": 128}, "num_experts 128; manifest: moe.experts 256; to accept it write experts = 128 under [model"),
    ({"num_experts": None, "num_local_experts": 128}, "num_local_experts 128; manifest: moe.experts 256; to accept it"),
    ({"norm_topk_prob": False}, "norm_topk_prob false; manifest: moe.renormalise true; to accept it write renormalise"),
    ({"num_experts_per_tok": 4}, "num_experts_per_tok 4; manifest: moe.top_k 8; to accept it write top_k = 4 under"),
    ({"scoring_func": "sigmoid"}, 'scoring_func "sigmoid"; manifest: moe.router "softmax"; to accept it write router '),
    ({"scoring_func": "noaux"}, 'scoring_func "noaux"; manifest: moe.router "softmax"; no manifest accepts it: '),
    ({"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5; manifest: 1, built in; to accept it write known_conf"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step 2; manifest: 1, built in; to accept it write known_config_field"),
    ({"first_k_dense_replace": 1}, "first_k_dense_replace 1; manifest: 0, built in; to accept it write known_config_f"),
    ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0; manifest: moe.shared_intermediate_si"),
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
    flag, other = str(is_zero_centred).lower(), str(not is_zero_centred).lower()
    (found,) = contradictions(wrong, {"text_config": {"model_type": kind}, "model_type": "other"})
    assert str(found) == (
        f'config.json: model_type "{kind}", whose norms multiply by {rules[0]}; '
        f"manifest: rms_norm_zero_centred {other}, {rules[1]}; "
        f"to accept it write rms_norm_zero_centred = {flag} under [model]"
    )


@pytest.mark.parametrize("kind", ["unheard_of", 7, None, ["qwen3_5"]])
def test_rule_of_norms_of_a_type_that_nobody_knows_is_no_contradiction(kind: object) -> None:
    for rule in (True, False):
        assert contradictions(ModelTable(**SMALL, rms_norm_zero_centred=rule), {"model_type": kind}) == ()


def test_rule_of_norms_is_compared_where_a_manifest_has_norms() -> None:
    config = {"model_type": "qwen3_5"}
    assert contradictions(ModelTable.model_validate(SMALL), config) == ()  # of an engine audited by traces
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
    ({**YARN, "beta_fast": 16}, ("beta_fast 16; manifest: 32, built into the YaRN kernel",)),
    ({**YARN, "truncate": False}, ("truncate false; manifest: true, built into the YaRN kernel",)),
    ({**YARN, "mscale": 1.0}, ("mscale 1.0; manifest: none, built into the YaRN kernel",)),
    ({**YARN, "rope_type": None, "type": "default"},
     ('type "default"; manifest: rope.yarn_factor; to accept it write no yarn_factor under [model.rope]',)),
    ({**YARN, "rope_type": None}, ("factor 64.0 without rope_type; manifest: rope.yarn_factor; no manifest accepts",)),
    ({**YARN, "factor": 32}, ("factor 32; manifest: rope.yarn_factor 64.0; to accept it write yarn_factor = 32",)),
])  # fmt: skip
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_stretched_rope_is_compared_with_its_options(key: str, rope: dict[str, Any], said: tuple[str, ...]) -> None:
    table = {"theta": 1e4, "yarn_factor": 64.0, "yarn_original_context": 4096}
    found = contradictions(ModelTable.model_validate({**SMALL, "rope": table}), {key: rope})
    assert len(found) == len(said)
    assert all(str(one).startswith(f"config.json: {key}.{text}") for one, text in zip(found, said, strict=True))


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_parameters_that_are_no_table_are_said(key: str) -> None:
    (found,) = contradictions(ModelTable(**SMALL), {key: [1]})
    assert (
        str(found) == f"config.json: {key} a list; manifest: [model.rope]; no manifest accepts it: expected an object"
    )


def test_shared_expert_that_a_manifest_does_not_have_is_a_contradiction() -> None:
    moe = {"experts": 8, "top_k": 2, "intermediate_size": 64}
    model = ModelTable.model_validate({**SMALL, "ffn": "moe", "moe": moe})
    assert contradictions(model, {"shared_expert_intermediate_size": 0}) == ()
    (found,) = contradictions(model, {"shared_expert_intermediate_size": 64})
    assert str(found) == (
        "config.json: shared_expert_intermediate_size 64; manifest: no moe.shared_intermediate_size; "
        "to accept it write shared_intermediate_size = 64 under [model.moe]"
    )


def test_many_contradictions_are_counted(shipped: Catalogue) -> None:
    # another hidden size makes another model of the type, with its own message
    config = {**DENSE, **dict.fromkeys((key for keys in KEYS.values() for key in keys), 7), "hidden_size": 5120}
    finding = shipped.resolve_config(config, "qwen3.6-27b").finding
    assert finding is not None
    assert "contradicts its manifest: (1) config.json: num_hidden_layers 7; manifest: num_layers 64; " in finding.why
    assert " (8) config.json: " in finding.why
    assert finding.why.endswith(" more")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted({
    *(key for keys in KEYS.values() for key in keys), *ROPE_KEYS.values(), *BUILT_IN,
    "layer_types", "full_attention_interval", "rope_parameters", "rope_scaling",
    "rope_type", "type", "quantization_config", "quant_method", "text_config", "full_attention", "sliding_attention",
    "num_experts", "beta_fast", "truncate", "dflash_config", "sliding_window", "tie_word_embeddings", "config_groups",
    "weights", "targets", "ignore", "quant_algo", "compression_config",
}))  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, JSON | st.dictionaries(NAMES, JSON, max_size=3), max_size=6))
def test_whatever_stands_in_a_config_is_compared_without_an_exception(config: dict[str, Any]) -> None:
    for manifest in all_shipped().manifests[:2]:
        assert all(len(str(one)) < 600 and str(one).isprintable() for one in contradictions(manifest.model, config))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES | st.text(max_size=8), JSON | st.dictionaries(NAMES, JSON, max_size=3), max_size=6))
def test_whatever_stands_in_a_config_is_resolved_without_an_exception(config: dict[str, Any]) -> None:
    catalogue = all_shipped()
    for reference in ("qwen3.6-27b", "/models/Qwen3.6-27B", None):
        found = catalogue.resolve_config({"model_type": "qwen3_5", "hidden_size": 5120, **config}, reference)
        for finding in found.findings:
            assert finding.why.isprintable()
            assert len(finding.why) < 6000
            assert all(text.isprintable() for text in (*finding.remedies, *finding.where))
