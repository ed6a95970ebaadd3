"""Tensors of a checkpoint that would be ignored silently are refused by name."""

from typing import Any

import numpy as np
import pytest
from kernel_muster.models.checkpoints import CheckpointError, CheckpointWeights, open_checkpoint
from kernel_muster.models.weights.source import WeightSpec

H, V = 32, 24
LAYER, STYLES = "layers.0.", ("bf16", "compressed-tensors", "modelopt")


def weight_of(disk: Any, module: str, style: str) -> dict[str, Any]:
    if style == "bf16":
        return {f"{module}.weight": disk.values(6, H)}
    make = disk.compressed_tensors if style == "compressed-tensors" else disk.modelopt
    return dict(make(module, disk.weight(6, H)))


def config_of(disk: Any, style: str) -> Any:
    return {"bf16": None, "compressed-tensors": disk.ct_config(), "modelopt": disk.mo_config()}[style]


def opened(disk: Any, tensors: dict[str, Any], quantization: Any = None, prefix: str = "model.") -> CheckpointWeights:
    whole = {f"{prefix}embed_tokens.weight": disk.values(V, H)} | tensors if prefix else tensors
    return CheckpointWeights(open_checkpoint(disk.write(whole, quantization)))


def ask(name: str, *shape: int, quant: str = "array") -> WeightSpec:
    return WeightSpec(name, shape, quant)


@pytest.mark.parametrize(("style", "leaf"), [
    ("bf16", "weight_scale"), ("bf16", "weight_scale_2"), ("bf16", "weight_global_scale"),
    ("compressed-tensors", "weight_scale_2"), ("modelopt", "weight_global_scale"), ("bf16", "bias"),
])  # fmt: skip
def test_scale_that_the_format_of_a_weight_does_not_have_is_refused(disk: Any, style: str, leaf: str) -> None:
    module = "model.layers.0.self_attn.q_proj"
    tensors = weight_of(disk, module, style) | {f"{module}.{leaf}": np.full(1, 0.01, np.float32)}
    found = opened(disk, tensors, config_of(disk, style))
    with pytest.raises(CheckpointError, match=rf"q_proj\.{leaf}: expected only weight.*, got a tensor not read here"):
        found.find(ask("layers.0.attn.q_proj", 6, H, quant="bf16" if style == "bf16" else "nvfp4"))
    assert found.report().used == ()


@pytest.mark.parametrize("style", STYLES)
def test_report_names_as_used_what_was_read(disk: Any, style: str) -> None:
    module = "model.layers.0.self_attn.k_proj"
    tensors = weight_of(disk, module, style)
    scales = {f"{module}.{leaf}": np.ones((), np.float32) for leaf in ("input_scale", "k_scale")}
    found = opened(disk, tensors | scales, config_of(disk, style))
    found.find(ask("layers.0.attn.k_proj", 6, H, quant="bf16" if style == "bf16" else "nvfp4"))
    assert found.report().used == tuple(sorted(tensors))
    assert found.report().activation_scales == tuple(sorted(scales))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize(("ours", "stranger"), [
    ("layers.0.attn.input_norm", "layers.0.input_layernorm.bias"),
    ("layers.0.attn.input_norm", "layers.0.self_attn.sinks"),
    ("layers.0.attn.input_norm", "layers.0.self_attn.q_norm.bias"),
    ("layers.0.attn.input_norm", "layers.0.self_attn.q_proj.lora_A.weight"),
    ("layers.0.attn.input_norm", "layers.0.self_attn.qkv_proj.weight"),
    ("layers.0.attn.input_norm", "layers.0.linear_attn.A_log"),
    ("layers.0.attn.input_norm", "layers.0.pre_feedforward_layernorm.weight"),
    ("layers.0.gdn.input_norm", "layers.0.linear_attn.conv1d.bias"),
    ("layers.0.gdn.input_norm", "layers.0.linear_attn.D"),
    ("layers.0.gdn.input_norm", "layers.0.self_attn.q_proj.weight"),
    ("layers.0.gdn.input_norm", "layers.0.post_attention_layernorm.bias"),
    ("layers.0.ffn.up_proj", "layers.0.mlp.experts.0.up_proj.weight"),
    ("layers.0.ffn.up_proj", "layers.0.mlp.gate_up_proj.weight"),
    ("layers.0.moe.router", "layers.0.mlp.shared_expert_gate.bias"),
    ("layers.0.moe.router", "layers.0.mlp.experts.gate_up_proj_bias"),
    ("layers.0.moe.router", "layers.0.mlp.up_proj.weight"),
    ("layers.0.moe.router", "layers.0.mlp.expert_bias"),
    ("final_norm.weight", "norm.bias"),
    ("final_norm.weight", "embed_tokens.weight_scale"),
    ("final_norm.weight", "embedding_norm.weight"),
    ("layers.0.attn.input_norm", "norm.bias"),
])  # fmt: skip
def test_tensor_that_no_layer_reads_is_refused_by_name(disk: Any, prefix: str, ours: str, stranger: str) -> None:
    found = opened(disk, {prefix + stranger: disk.values(4)}, prefix=prefix)
    with pytest.raises(CheckpointError) as caught:
        found.find(ask(ours, H))
    wanted = "expected only tensors that the model's layers read, got a tensor not read here"
    assert str(caught.value).endswith(f"model.safetensors: {prefix}{stranger}: {wanted}")
    assert caught.value.tensor == prefix + stranger


@pytest.mark.parametrize(("ours", "stranger"), [
    ("mtp.norm.weight", "mtp.norm.bias"), ("mtp.0.attn.input_norm", "mtp.layers.0.self_attn.sinks"),
    ("mtp.norm.weight", "mtp.embed_tokens.weight"), ("mtp.0.ffn.up_proj", "mtp.layers.0.mlp.gate.weight"),
])  # fmt: skip
def test_head_of_several_tokens_is_judged_where_it_is_built(disk: Any, ours: str, stranger: str) -> None:
    tensors = {stranger: disk.values(4), "model.norm.weight": disk.values(H)}
    found = opened(disk, tensors)
    assert found.find(ask("final_norm.weight", H)).shape == (H,)
    assert stranger in found.report().unused
    with pytest.raises(CheckpointError, match="got a tensor not read here"):
        found.find(ask(ours, H))


def test_drafter_is_judged_from_its_root_on(disk: Any) -> None:
    tensors = {"fc.weight": disk.values(H, 3 * H), "hidden_norm.weight": disk.values(H), "norm.weight": disk.values(H)}
    found = opened(disk, tensors | {"d2t.weight": disk.values(4)}, prefix="")
    with pytest.raises(CheckpointError, match=r"d2t\.weight: expected only tensors that the model's layers read"):
        found.find(ask("final_norm.weight", H))


@pytest.mark.parametrize(("ours", "one", "other"), [
    ("gdn.input_norm", "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_z.weight"),
    ("gdn.input_norm", "linear_attn.in_proj_ba.weight", "linear_attn.in_proj_a.bias"),
    ("moe.router", "mlp.experts.gate_up_proj", "mlp.experts.7.up_proj.weight"),
    ("moe.router", "mlp.experts.down_proj", "mlp.experts.7.down_proj.weight_packed"),
])  # fmt: skip
def test_two_forms_of_one_weight_are_refused(disk: Any, ours: str, one: str, other: str) -> None:
    at = "model.layers.0."
    found = opened(disk, {at + one: disk.values(4, H), at + other: disk.values(4, H)})
    with pytest.raises(CheckpointError) as caught:
        found.find(ask(LAYER + ours, H))
    assert str(caught.value).endswith(f"{at}{other}: expected one form of a weight, got {at}{one} beside it")


@pytest.mark.parametrize(("heads", "stranger"), [
    (("lm_head.bias",), "lm_head.bias"),
    (("lm_head.weight", "model.language_model.lm_head.weight"), "model.language_model.lm_head.weight"),
])  # fmt: skip
def test_head_of_which_a_part_would_be_left_out_is_refused(disk: Any, heads: tuple[str, ...], stranger: str) -> None:
    tensors = {name: disk.values(V, H) for name in heads}
    found = opened(disk, tensors, prefix="model.language_model.")
    with pytest.raises(CheckpointError, match=stranger.replace(".", r"\.") + ": expected only tensors"):
        found.find(ask("lm_head.weight", V, H, quant="bf16"))


@pytest.mark.parametrize("harmless", [
    "model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.k_scale",
    "model.layers.0.self_attn.q_scale", "model.layers.0.self_attn.attn.v_scale", "model.visual.blocks.0.attn.bias",
    "model.layers.9.self_attn.sinks", "visual.norm.bias", "mtp.other.weight", "lm_head.bias",
])  # fmt: skip
def test_tensor_that_changes_nothing_that_is_read_here_is_reported_alone(disk: Any, harmless: str) -> None:
    name = "model.layers.0.input_layernorm.weight"
    found = opened(disk, {name: disk.values(H), harmless: disk.values(4)})
    assert found.find(ask("layers.0.attn.input_norm", H)).shape == (H,)
    assert harmless in (*found.report().unused, *found.report().activation_scales)
