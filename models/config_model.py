"""A model straight from a Hugging Face ``config.json``: tables as a manifest's, so that one builder serves both.

The text model may be nested in ``text_config``. A ``vision_config`` is noted; its tower is not built. Nothing is
guessed: a size that is missing, or an option that layers do not have, is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernel_muster.MODEL_toml.contradictions import contradictions
from kernel_muster.MODEL_toml.hf_config import config_facts
from kernel_muster.MODEL_toml.schema import ModelTable
from kernel_muster.registry.errors import UsageError
from pydantic import ValidationError

_KINDS = {"linear_attention": "gdn", "full_attention": "full"}
_NVFP4_FORMATS = ("nvfp4-pack-quantized", "NVFP4")
_LAYERS_A_GROUP = 4


@dataclass(frozen=True)
class ConfigModel:
    """What a builder reads: the ``[model]`` and ``[dflash]`` tables that a config amounts to."""

    model: ModelTable
    dflash: Mapping[str, Any] = field(default_factory=dict)
    has_vision: bool = False


def config_model(config: Mapping[str, Any], name: str, target: str | None = None) -> ConfigModel:
    """Read a config's content; UsageError says, all at once, what is missing or not supported.

    ``target`` is the model that a drafter drafts for: its config does not say.
    """
    reader = _Reader(config, name)
    table = reader.table()
    dflash = reader.drafter(target)
    if reader.problems:
        raise UsageError(f"{name}: the config.json cannot be built from: {'; '.join(reader.problems)}")
    try:
        model = ModelTable.model_validate({key: value for key, value in table.items() if value is not None})
    except ValidationError as error:
        why = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'model'}: {one['msg']}" for one in error.errors())
        raise UsageError(f"{name}: the config.json cannot be built from: {why}") from None
    # What was read is one of the places that state it: the others must agree (two tables of rope parameters).
    if found := contradictions(model, config):
        raise UsageError(f"{name}: the config.json cannot be built from, it contradicts itself: {'; '.join(found)}")
    return ConfigModel(model, dflash, bool(config.get("vision_config")))


def config_differences(manifest: ModelTable, found: ModelTable) -> tuple[str, ...]:
    """Say where a manifest's dimensions and a config's are not the same; quantisation is the weights' to say."""
    mine, other = _flat(manifest.model_dump()), _flat(found.model_dump())
    ignored = ("name", "hf_id", "match_names", "model_type", "quant", "context_length", "attention.weights")
    return tuple(
        f"{path} is {mine.get(path)} in the manifest, {other.get(path)} in the config"
        for path in sorted(mine.keys() | other.keys())
        if not path.startswith(ignored) and mine.get(path) != other.get(path)
    )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{key}."))
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


class _Reader:
    """Reads one config, and collects what is wrong with it."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        nested = config.get("text_config")
        self.text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
        self.config, self.name = config, name
        self.problems: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the text model, else of the whole."""
        return self.text.get(key, self.config.get(key, default))

    def need(self, key: str) -> Any:
        """Return a value that must be there."""
        value = self.get(key)
        if value is None:
            self.problems.append(f"{key} is missing")
        return value

    def table(self) -> dict[str, Any]:
        """Return the ``[model]`` table."""
        activation = self.get("hidden_act", "silu")
        if activation != "silu":
            self.problems.append(f"hidden_act is {activation!r}, expected silu")
        if self.get("attention_bias"):
            self.problems.append("attention_bias is true, the projections have none")
        has_experts = self.get("num_experts") is not None
        pattern = self._pattern()
        return {
            "name": self.name,
            "quant": self._quant(),
            "model_type": self._type(),
            "hidden_size": self.need("hidden_size"),
            "num_layers": self.need("num_hidden_layers"),
            "layer_pattern": pattern,
            "ffn": "moe" if has_experts else "dense",
            "intermediate_size": None if has_experts else self.need("intermediate_size"),
            "vocab_size": self.need("vocab_size"),
            "context_length": self.get("max_position_embeddings"),
            "tie_word_embeddings": bool(self.get("tie_word_embeddings", False)),
            "rms_norm_eps": self.need("rms_norm_eps"),
            # Qwen3-Next and its successors store norm weights around zero, Qwen3 (the drafter) around one.
            "rms_norm_zero_centred": not self._is_drafter,
            "attention": self._attention() if "full" in pattern else None,
            "gdn": self._gdn() if "gdn" in pattern else None,
            "moe": self._moe() if has_experts else None,
            "rope": self._rope() if "full" in pattern else None,
            "mtp": self._mtp(),
        }

    @property
    def _is_drafter(self) -> bool:
        return isinstance(self.get("dflash_config"), Mapping)

    def _type(self) -> str | None:
        if self._is_drafter:
            return "dflash"
        try:
            return config_facts(self.config).model_types[0]
        except ValueError as error:
            self.problems.append(str(error))
            return None

    def _pattern(self) -> list[str]:
        """Return the kind of every layer, folded to its shortest period."""
        count, kinds = self.get("num_hidden_layers"), self.get("layer_types")
        if not isinstance(kinds, list):
            every = self.get("full_attention_interval", 1 if self._is_drafter else _LAYERS_A_GROUP)
            return ["gdn"] * (every - 1) + ["full"] if isinstance(every, int) and every > 0 else ["full"]
        if self._is_drafter:
            return ["full"]
        if unknown := sorted({str(kind) for kind in kinds if kind not in _KINDS}):
            self.problems.append(f"layer_types holds {', '.join(unknown)}, expected {' or '.join(_KINDS)}")
        if len(kinds) != count:
            self.problems.append(f"layer_types has {len(kinds)} entries for {count} layers")
        return _period([_KINDS.get(str(kind), "full") for kind in kinds]) or ["full"]

    def _quant(self) -> str:
        quantised = self.get("quantization_config")
        if not isinstance(quantised, Mapping):
            return "bf16"
        said = [quantised.get("format"), quantised.get("quant_algo")]
        groups = quantised.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            said += [group.get("format")] if isinstance(group, Mapping) else []
        if not any(one in _NVFP4_FORMATS for one in said):
            known = ", ".join(str(one) for one in said if one) or "no format"
            self.problems.append(f"quantization_config says {known}, expected {' or '.join(_NVFP4_FORMATS)}")
        return "nvfp4"

    def _attention(self) -> dict[str, Any]:
        return {
            "heads": self.need("num_attention_heads"),
            "kv_heads": self.need("num_key_value_heads"),
            "head_dim": self.need("head_dim"),
            "gated": not self._is_drafter and bool(self.get("attn_output_gate", True)),
            "qk_norm": True,
        }

    def _gdn(self) -> dict[str, Any]:
        names = {
            "key_heads": "linear_num_key_heads",
            "key_dim": "linear_key_head_dim",
            "value_heads": "linear_num_value_heads",
            "value_dim": "linear_value_head_dim",
            "conv_width": "linear_conv_kernel_dim",
        }
        return {mine: self.need(theirs) for mine, theirs in names.items()}

    def _moe(self) -> dict[str, Any]:
        return {
            "experts": self.need("num_experts"),
            "top_k": self.need("num_experts_per_tok"),
            "intermediate_size": self.need("moe_intermediate_size"),
            "shared_intermediate_size": self.get("shared_expert_intermediate_size"),
            "router": "softmax",
            "renormalise": bool(self.get("norm_topk_prob", True)),
        }

    def _rope(self) -> dict[str, Any]:
        """Read rope parameters of either generation of configs."""
        ropes = [self.get(name) for name in ("rope_parameters", "rope_scaling")]
        rope: dict[str, Any] = next((dict(one) for one in ropes if isinstance(one, Mapping)), {})
        theta = rope.get("rope_theta", self.get("rope_theta"))
        if theta is None:
            self.problems.append("rope_theta is missing")
        kind = rope.get("rope_type", rope.get("type", "default"))
        found: dict[str, Any] = {
            "theta": None if theta is None else float(theta),
            "partial_factor": float(rope.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))),
            "mrope_sections": list(rope.get("mrope_section", ())),
            "mrope_interleaved": bool(rope.get("mrope_interleaved", False)),
        }
        if kind == "yarn":
            found["yarn_factor"] = float(rope.get("factor", 0.0))
            found["yarn_original_context"] = rope.get("original_max_position_embeddings")
            self._refuse_yarn_options(rope)
        elif kind not in ("default", "mrope"):
            self.problems.append(f"rope_type is {kind!r}, expected default, mrope or yarn")
        return {key: value for key, value in found.items() if value is not None}

    def _refuse_yarn_options(self, rope: Mapping[str, Any]) -> None:
        """Refuse what the YaRN kernel has built in with other values."""
        expected: dict[str, Callable[[Any], bool]] = {
            "beta_fast": lambda value: float(value) == 32.0,
            "beta_slow": lambda value: float(value) == 1.0,
            "truncate": lambda value: value is True,
            "attention_factor": lambda value: False,
            "mscale": lambda value: False,
            "mscale_all_dim": lambda value: False,
        }
        for key, holds in expected.items():
            if rope.get(key) is not None and not holds(rope[key]):
                self.problems.append(f"rope {key} is {rope[key]!r}, which the YaRN kernel does not take")

    def _mtp(self) -> dict[str, Any] | None:
        layers = self.get("mtp_num_hidden_layers", self.get("num_nextn_predict_layers"))
        return {"layers": layers} if layers else None

    def drafter(self, target: str | None) -> dict[str, Any]:
        """Return the ``[dflash]`` table of a drafter's config, else nothing."""
        own = self.get("dflash_config")
        if not isinstance(own, Mapping):
            return {}
        if target is None:
            self.problems.append("a drafter's config does not name its target: give one")
        return {
            "target": target,
            "gamma": self.need("block_size"),
            "window": self.need("sliding_window"),
            "mask_token_id": own.get("mask_token_id"),
            "target_layer_ids": own.get("target_layer_ids"),
        }


def _period(kinds: list[str]) -> list[str]:
    """Return the shortest beginning that gives the whole list when it is repeated."""
    for size in range(1, len(kinds)):
        if len(kinds) % size == 0 and kinds[:size] * (len(kinds) // size) == kinds:
            return kinds[:size]
    return kinds
