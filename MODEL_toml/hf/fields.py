"""Every known field of a ``config.json``, in one table: the manifest key that must equal it, or the only values built.

A field of neither kind that is not among the harmless ones is unknown, and a boot warns of it. A new field is one line
here. Where releases of Hugging Face transformers differ in a name, the usual one stands first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kernel_muster.MODEL_toml.hf.config import ROPE_TABLES, TIE, HfConfig
from kernel_muster.registry.values import frozen

#: Fields with a key of their own below [model]. Those with other rules of comparison are in ``SPECIAL``.
KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "vocab_size": ("vocab_size",),
    "rms_norm_eps": ("rms_norm_eps",),
    "intermediate_size": ("intermediate_size",),
    "attention.heads": ("num_attention_heads",),
    "attention.kv_heads": ("num_key_value_heads",),
    "attention.head_dim": ("head_dim",),
    "attention.gated": ("attn_output_gate",),
    "attention.qk_norm": ("use_qk_norm", "qk_layernorm", "use_qk_layernorm"),
    "gdn.key_heads": ("linear_num_key_heads",),
    "gdn.key_dim": ("linear_key_head_dim",),
    "gdn.value_heads": ("linear_num_value_heads",),
    "gdn.value_dim": ("linear_value_head_dim",),
    "gdn.conv_width": ("linear_conv_kernel_dim",),
    "moe.experts": ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts"),
    "moe.top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "moe.intermediate_size": ("moe_intermediate_size",),
    "moe.shared_intermediate_size": ("shared_expert_intermediate_size",),
    "moe.router": ("scoring_func", "score_func", "router_scoring_func", "moe_router_score_function"),
    "moe.renormalise": ("norm_topk_prob",),
    "mtp.layers": ("mtp_num_hidden_layers", "num_nextn_predict_layers"),
}
#: Rope parameters: in their table, or beside it in configs of an older generation.
ROPE_KEYS: Mapping[str, str] = {
    "theta": "rope_theta",
    "partial_factor": "partial_rotary_factor",
    "mrope_sections": "mrope_section",
    "mrope_interleaved": "mrope_interleaved",
    "yarn_factor": "factor",
    "yarn_original_context": "original_max_position_embeddings",
}
#: Those that some exports have beside the table, in the text model itself.
BESIDE_ROPE = (
    "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "rope_type",
    "original_max_position_embeddings",
)  # fmt: skip
YARN = "yarn"
NOT_YARN = ("default", "mrope")
#: What YaRN's kernel has built in (plugins/rope); None: it follows from the factor.
YARN_OPTIONS: Mapping[str, Any] = {
    "beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": None, "mscale": None, "mscale_all_dim": None,
}  # fmt: skip
GDN, ATTENTION, WINDOW = "linear_attention", "full_attention", "sliding_attention"
#: Fields of a drafter, by key of the ``[dflash]`` table: of the config or its ``dflash_config``; of that alone.
DRAFTER = "dflash_config"
DRAFTER_KEYS = {"gamma": "block_size", "window": "sliding_window"}
DRAFTER_OPTIONS = {"mask_token_id": "mask_token_id", "target_layer_ids": "target_layer_ids"}
#: Where a quantisation config stands; the second name is that of early releases of compressed-tensors.
QUANTISATION = ("quantization_config", "compression_config")

_SILU, _OFF, _ABSENT = ("silu", "swish"), (False,), ()
#: Fields that change what layers compute, and the values that are built. Null is absent, and always right.
BUILT_IN: Mapping[str, tuple[Any, ...]] = {
    # the FFN
    "hidden_act": _SILU,
    "hidden_activation": _SILU,
    "activation_function": _SILU,
    "mlp_bias": _OFF,
    # attention
    "attention_bias": _OFF,
    "qkv_bias": _OFF,
    "use_bias": _OFF,
    "use_sliding_window": _OFF,
    "attention_chunk_size": _ABSENT,
    "attn_logit_softcapping": _ABSENT,
    "attn_logit_softcap": _ABSENT,
    "attention_multiplier": _ABSENT,
    "query_pre_attn_scalar": _ABSENT,
    "dual_chunk_attention_config": _ABSENT,
    "sparse_attention_config": _ABSENT,
    "output_gate_type": _SILU,
    "rope_interleave": _OFF,
    "rope_interleaved": _OFF,
    "no_rope_layers": ([],),
    "no_rope_layer_interval": _ABSENT,
    # the gated delta net keeps its state in FP32
    "mamba_ssm_dtype": ("float32",),
    # experts: all layers have them, and the router's scores are used as they are
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,),
    "first_k_dense_replace": (0,),
    "routed_scaling_factor": (1,),
    "n_group": (1,),
    "topk_group": (1,),
    "topk_method": ("greedy",),
    # embedding, residual stream and logits
    "final_logit_softcapping": _ABSENT,
    "final_logit_softcap": _ABSENT,
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    # the MTP head reads the model's embedding
    "mtp_use_dedicated_embeddings": _OFF,
}
#: Fields that are compared by rules of their own.
SPECIAL = frozenset({
    "model_type", "text_config", TIE, "layer_types", "full_attention_interval", "max_position_embeddings",
    "sliding_window", DRAFTER, *DRAFTER_KEYS.values(), *QUANTISATION, *ROPE_TABLES, *BESIDE_ROPE,
})  # fmt: skip
#: Fields that change no result of the text model, by subject.
_HARMLESS: Mapping[str, str] = {
    "names and releases": """
        architectures auto_map transformers_version _name_or_path name_or_path _commit_hash _attn_implementation
        attn_implementation _attn_implementation_autoset _attn_implementation_internal torchscript tokenizer_class
        prefix task_specific_params finetuning_task problem_type id2label label2id num_labels unsloth_fixed
        unsloth_fixed_mtp unsloth_version""",
    # weights are read as they are stored, whatever type a loader would give them
    "types": "torch_dtype dtype use_bfloat16",
    "training": """
        initializer_range initializer_factor attention_dropout hidden_dropout resid_dropout embd_dropout resid_pdrop
        embd_pdrop router_aux_loss_coef router_z_loss_coef router_jitter_noise aux_loss_alpha seq_aux
        mtp_loss_scaling_factor gradient_checkpointing pretraining_tp ep_size""",
    "tokens": """
        bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id
        forced_eos_token_id""",
    "generation": """
        bad_words_ids suppress_tokens begin_suppress_tokens temperature top_k top_p min_p typical_p do_sample num_beams
        num_beam_groups diversity_penalty repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size exponential_decay_length_penalty max_length min_length max_new_tokens
        early_stopping num_return_sequences remove_invalid_values""",
    "what a call returns": """
        output_scores output_attentions output_hidden_states output_router_logits return_dict return_dict_in_generate
        use_cache chunk_size_feed_forward tf_legacy_loss pruned_heads is_decoder is_encoder_decoder
        add_cross_attention cross_attention_hidden_size tie_encoder_decoder""",
    "other modalities": """
        vision_config audio_config image_token_id video_token_id audio_token_id vision_token_id vision_start_token_id
        vision_end_token_id image_token_index video_token_index language_model_only""",
    # without use_sliding_window; a drafter's reading of its target is in its dflash_config
    "without effect": "max_window_layers num_target_layers",
}
HARMLESS = frozenset(name for names in _HARMLESS.values() for name in names.split())
_KNOWN = frozenset({*BUILT_IN, *SPECIAL, *HARMLESS, *(key for keys in KEYS.values() for key in keys)})
_KNOWN_ROPE = frozenset({
    *ROPE_KEYS.values(), *YARN_OPTIONS, "rope_type", "type", GDN, ATTENTION, WINDOW,
})  # fmt: skip
#: Fields of a quantisation config that are read, that describe activations or the KV cache, which are BF16 here, or
#: that describe how it was made.
_KNOWN_QUANT = frozenset({
    "quant_method", "config_groups", "format", "ignore", "transform_config", "sparsity_config", "quant_algo",
    "group_size", "exclude_modules", "quantized_layers", "quantization", "has_zero_point", "pre_quant_scale",
    "modules_to_not_convert", "ignored_layers", "weight_block_size", "fmt",
    "kv_cache_scheme", "kv_cache_quant_algo", "activation_scheme",
    "quantization_status", "global_compression_ratio", "version", "producer", "quant_library",
})  # fmt: skip
_KNOWN_DRAFTER = frozenset({*DRAFTER_OPTIONS.values(), *DRAFTER_KEYS.values()})


@frozen
class UnknownField:
    """A field that is neither compared nor harmless: its dotted name, and its value."""

    name: str
    value: Any

    @property
    def top(self) -> str:
        """The name that a manifest may list: that of the field itself, without its level."""
        return self.name.removeprefix("text_config.").partition(".")[0]


def unknown_fields(config: HfConfig) -> Iterator[UnknownField]:
    """Yield the fields that nobody knows, of both levels and of the tables in them; null counts as absent."""
    for prefix, table in config.levels:
        yield from _unknown(table, prefix, _KNOWN)
        for name in ROPE_TABLES:
            yield from _unknown_rope(table.get(name), f"{prefix}{name}.")
        yield from _unknown(table.get(DRAFTER), f"{prefix}{DRAFTER}.", _KNOWN_DRAFTER)
        for name in QUANTISATION:
            yield from _unknown(table.get(name), f"{prefix}{name}.", _KNOWN_QUANT)


def _unknown_rope(rope: Any, prefix: str) -> Iterator[UnknownField]:
    yield from _unknown(rope, prefix, _KNOWN_ROPE)
    for kind in (ATTENTION, WINDOW) if isinstance(rope, Mapping) else ():
        yield from _unknown(rope.get(kind), f"{prefix}{kind}.", _KNOWN_ROPE)


def _unknown(table: Any, prefix: str, known: frozenset[str]) -> Iterator[UnknownField]:
    for key, value in table.items() if isinstance(table, Mapping) else ():
        if key not in known and value is not None:
            yield UnknownField(f"{prefix}{key}", value)
