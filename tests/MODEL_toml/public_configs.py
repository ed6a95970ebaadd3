"""The config.json files of public models and of their derivatives: fields, levels and quantisation as published.

Written from memory. Each function makes one. ``with_changes`` makes relatives.
"""

from copy import deepcopy
from typing import Any

Config = dict[str, Any]
ROPE = {
    "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
    "rope_type": "default",
}  # fmt: skip
VISION = {
    "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
    "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_5", "num_heads": 16,
    "num_position_embeddings": 2304, "out_hidden_size": 5120, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip


def layer_types(layers: int, every: int = 4) -> list[str]:
    return ["linear_attention" if (at + 1) % every else "full_attention" for at in range(layers)]


def hybrid_text(**more: Any) -> Config:
    """What all text models of the Qwen3.5 kind have."""
    return {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": 248044,
        "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish", "pad_token_id": None, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
        "rope_parameters": deepcopy(ROPE), "tie_word_embeddings": False, "use_cache": True,
         "vocab_size": 248320, **more,
    }  # fmt: skip


def text_27b() -> Config:
    return hybrid_text(
        model_type="qwen3_5_text", hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
        layer_types=layer_types(64), linear_num_value_heads=48, num_attention_heads=24, num_key_value_heads=4,
    )  # fmt: skip


def text_35b() -> Config:
    return hybrid_text(
        model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, layer_types=layer_types(40),
        linear_num_value_heads=32, mlp_only_layers=[], moe_intermediate_size=512, num_attention_heads=16,
        num_experts=256, num_experts_per_tok=8, num_key_value_heads=2, output_router_logits=False,
        router_aux_loss_coef=0.001, shared_expert_intermediate_size=512,
    )  # fmt: skip


def whole(text: Config, quantised: Config | None = None, **more: Any) -> Config:
    """The outer level of a multimodal checkpoint, by transformers 4."""
    kind = text["model_type"].removesuffix("_text")
    architecture = "Qwen3_5MoeForConditionalGeneration" if "moe" in kind else "Qwen3_5ForConditionalGeneration"
    found = {
        "architectures": [architecture], "image_token_id": 248056, "model_type": kind, "text_config": text,
        "tie_word_embeddings": False, "transformers_version": "4.57.1", "video_token_id": 248057,
        "vision_config": deepcopy(VISION), "vision_end_token_id": 248054, "vision_start_token_id": 248053,
        "language_model_only": False, **more,
    }  # fmt: skip
    return found if quantised is None else found | {"quantization_config": quantised}


def resaved(text: Config, quantised: Config | None = None, **more: Any) -> Config:
    """The same by transformers 5: both levels have a flag for tied embeddings, and the rope factor is in its table."""
    text = {key: value for key, value in text.items() if key != "partial_rotary_factor"}
    text |= {"tie_word_embeddings": False, "bos_token_id": None, "pad_token_id": None}
    vision = VISION | {"model_type": "qwen3_5_vision", "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}}
    return whole(text, quantised, transformers_version="5.24.0", vision_config=vision, **more)


def text_alone(text: Config, quantised: Config | None = None) -> Config:
    """The text model of its own class, flat, with the type of the text part."""
    kind = "Moe" if "moe" in text["model_type"] else ""
    found = {**text, "architectures": [f"Qwen3_5{kind}ForCausalLM"], "transformers_version": "5.24.0"}
    return found if quantised is None else found | {"quantization_config": quantised}


def flat_rope(text: Config) -> Config:
    """Rope parameters beside the other fields, as some tools write them."""
    rope = text.pop("rope_parameters")
    return {**text, **rope}


def nvfp4(*ignore: str, **more: Any) -> Config:
    """compressed-tensors, weights and activations in NVFP4."""
    arguments = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 16, "num_bits": 4,
         "observer": "minmax",
        "observer_kwargs": {}, "scale_dtype": "torch.float8_e4m3fn", "strategy": "tensor_group", "symmetric": True,
        "type": "float", "zp_dtype": None,
    }  # fmt: skip
    group = {
        "format": "nvfp4-pack-quantized", "input_activations": arguments | {"dynamic": "local"},
        "output_activations": None, "targets": ["Linear"], "weights": arguments,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group}, "format": "nvfp4-pack-quantized", "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*visual.*", "re:.*linear_attn.in_proj_[ab]$", *ignore], "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
        "transform_config": {}, "version": "0.14.0", **more,
    }  # fmt: skip


def nvfp4_experts() -> Config:
    return nvfp4("re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*mtp.*")


def integers(bits: int, group: int | None) -> Config:
    """compressed-tensors with integer weights: W4A16 and W8A8."""
    found = nvfp4()
    row = found["config_groups"]["group_0"]
    row["weights"] |= {"num_bits": bits, "type": "int", "group_size": group, "scale_dtype": None,
                       "strategy": "group" if group else "channel"}  # fmt: skip
    found["format"] = row["format"] = "pack-quantized" if bits == 4 else "int-quantized"
    return found


def mixed() -> Config:
    """NVFP4 feed-forward layers beside FP8 mixers, as compressed-tensors writes them."""
    found = nvfp4(format="mixed-precision")
    found["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    row = deepcopy(found["config_groups"]["group_0"])
    row |= {"format": "float-quantized", "targets": ["re:.*self_attn.*", "re:.*linear_attn.*"]}
    row["weights"] |= {"num_bits": 8, "strategy": "channel", "group_size": None, "scale_dtype": None}
    found["config_groups"]["group_1"] = row
    return found


def fp8_blocks() -> Config:
    """The publisher's own FP8: E4M3 with a scale for each 128 x 128 block."""
    skipped = ["lm_head", "model.visual", "mtp.fc", "model.language_model.embed_tokens"]
    skipped += [f"model.language_model.layers.{at}.linear_attn.in_proj_a" for at in range(3)]
    return {
        "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": skipped, "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }  # fmt: skip


def awq() -> Config:
    return {
        "bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"], "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    }  # fmt: skip


def gptq() -> Config:
    return {
        "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "group_size": 128, "quant_method": "gptq",
         "sym": True,
        "lm_head": False, "pack_dtype": "int32", "dynamic": {"-:.*attn.*": {}}, "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:5.6.0"]},
    }  # fmt: skip


def modelopt(algorithm: str = "NVFP4", **more: Any) -> Config:
    """ModelOpt's quantization_config, which repeats hf_quant_config.json."""
    arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "config_groups": {"group_0": {"input_activations": arguments, "weights": arguments, "targets": ["Linear"]}},
        "ignore": ["lm_head", "mtp*", "model.visual*", "*in_proj_a", "*in_proj_b", "*mlp.gate", "*shared_expert_gate"],
        "quant_algo": algorithm, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.39.0"}, "quant_method": "modelopt", **more,
    }  # fmt: skip


def hf_quant(algorithm: str = "NVFP4") -> Config:
    """ModelOpt's file of its own."""
    return {
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16,
                         "exclude_modules": ["lm_head", "mtp*", "model.visual*", "*mlp.gate"]},
    }  # fmt: skip


def qwen3(hidden: int = 4096, **more: Any) -> Config:
    """Qwen3 dense: 8B and its relatives."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": hidden, "initializer_range": 0.02,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936, **more,
    }  # fmt: skip


def qwen3_moe() -> Config:
    """Qwen3-30B-A3B."""
    return qwen3(
        2048, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", decoder_sparse_step=1,
        intermediate_size=6144, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128,
        num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, output_router_logits=False,
        router_aux_loss_coef=0.001,
    )  # fmt: skip


def qwen3_next() -> Config:
    """Qwen3-Next-80B-A3B: no layer_types, an interval."""
    found = hybrid_text(
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", hidden_size=2048, intermediate_size=5120,
        decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True, num_experts=512,
        num_experts_per_tok=10, num_hidden_layers=48, linear_num_value_heads=32, num_attention_heads=16,
        num_key_value_heads=2, rope_scaling=None, rope_theta=10000000, router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512, vocab_size=151936,
    )  # fmt: skip
    for name in ("rope_parameters", "mamba_ssm_dtype", "mtp_num_hidden_layers", "attn_output_gate", "output_gate_type"):
        del found[name]
    return found


def qwen3_vl(kind: str = "qwen3_vl") -> Config:
    """Qwen3-VL-8B, or 30B-A3B, as transformers 5 writes it: the text class of the latter ties by default."""
    base = qwen3() if kind == "qwen3_vl" else qwen3_moe()
    text = base | {"model_type": f"{kind}_text", "tie_word_embeddings": kind == "qwen3_vl_moe"}
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_theta": 5000000, "rope_type": "default"}
    text |= {"rope_parameters": rope, "rope_scaling": None, "rope_theta": None, "max_position_embeddings": 262144}
    outer = {"model_type": kind, "text_config": text, "tie_word_embeddings": False, "vision_config": {"depth": 27}}
    return outer | {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}


def drafter() -> Config:
    """The block-diffusion drafter of the 35B."""
    return qwen3(
        2048, architectures=["DFlashDraftModel"], auto_map={"AutoModel": "dflash.DFlashDraftModel"}, block_size=16,
        dflash_config={"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]}, intermediate_size=6144,
        layer_types=["sliding_attention"] * 8, max_position_embeddings=262144, num_hidden_layers=8,
        num_key_value_heads=4, num_target_layers=40, rope_theta=10000000, sliding_window=4096, use_sliding_window=True,
        rope_scaling={"factor": 64.0, "original_max_position_embeddings": 4096, "rope_type": "yarn"}, vocab_size=248320,
        quantization_config=nvfp4(),
    )  # fmt: skip
