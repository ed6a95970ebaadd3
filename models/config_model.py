"""A model straight from a Hugging Face ``config.json``: tables as a manifest's, so one builder serves both.

The text model may be nested in ``text_config``. A ``vision_config`` is noted. Its tower is not built. A missing size,
or an option that layers do not have, is refused by name, never guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernel_muster.MODEL_toml.hf.check import joined
from kernel_muster.MODEL_toml.hf.config import ROPE_TABLES, config_facts, config_of
from kernel_muster.MODEL_toml.hf.contradictions import contradictions
from kernel_muster.MODEL_toml.hf.fields import (
    ATTENTION,
    DRAFTER,
    DRAFTER_KEYS,
    DRAFTER_OPTIONS,
    GDN,
    KEYS,
    ROPE_KEYS,
    YARN,
)
from kernel_muster.MODEL_toml.hf.quantisation import PLAIN, READABLE, QuantProblem, bare_format, quantisation
from kernel_muster.MODEL_toml.hf.statements import period
from kernel_muster.MODEL_toml.schema import ModelTable
from kernel_muster.registry.errors import UsageError
from pydantic import ValidationError

_KINDS = {GDN: "gdn", ATTENTION: "full"}
_GDN_SIZES = ("key_heads", "key_dim", "value_heads", "value_dim", "conv_width")
_FLOATS = ("theta", "partial_factor", "yarn_factor")
_LAYERS_A_GROUP = 4


@dataclass(frozen=True)
class ConfigModel:
    """The builder's input: the ``[model]`` and ``[dflash]`` tables derived from a config."""

    model: ModelTable
    dflash: Mapping[str, Any] = field(default_factory=dict)
    has_vision: bool = False


def config_model(config: Mapping[str, Any], name: str, target: str | None = None) -> ConfigModel:
    """Read a config's content. UsageError lists all missing or unsupported fields.

    ``target`` is the model of a drafter, which its config does not contain.
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
    # A field may stand in several places: they must agree (two tables of rope parameters).
    if found := joined(contradictions(model, config, dflash=dflash, known=None)):
        raise UsageError(f"{name}: the config.json cannot be built from, it contradicts itself or the layers: {found}")
    return ConfigModel(model, dflash, bool(config.get("vision_config")))


def config_differences(manifest: ModelTable, found: ModelTable) -> tuple[str, ...]:
    """Return the differences between a manifest's dimensions and a config's, except quantisation."""
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
    """Reads one config, and collects its errors."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.hf, self.name = config_of(config), name
        self.problems: list[str] = []

    def at(self, path: str, default: Any = None) -> Any:
        """Return the value for a manifest's key, under any of its names in configs."""
        value = self.hf.get(*KEYS[path])
        return default if value is None else value

    def need(self, path: str) -> Any:
        """Return the value for a manifest's key, which must exist."""
        value = self.at(path)
        if value is None:
            self.problems.append(f"{KEYS[path][0]} is missing")
        return value

    def table(self) -> dict[str, Any]:
        """Return the ``[model]`` table."""
        has_experts = bool(self.at("moe.experts"))
        pattern = self._pattern()
        return {
            "name": self.name,
            "quant": self._quant(),
            "model_type": self._type(),
            "hidden_size": self.need("hidden_size"),
            "num_layers": self.need("num_layers"),
            "layer_pattern": pattern,
            "ffn": "moe" if has_experts else "dense",
            "intermediate_size": None if has_experts else self.need("intermediate_size"),
            "vocab_size": self.need("vocab_size"),
            "context_length": self.hf.get("max_position_embeddings"),
            "tie_word_embeddings": self.hf.tie.value is True,
            "rms_norm_eps": self.need("rms_norm_eps"),
            # Qwen3-Next and its successors store norm weights around zero, Qwen3 (the drafter) around one.
            "rms_norm_zero_centred": not self._is_drafter,
            "attention": self._attention() if "full" in pattern else None,
            "gdn": {name: self.need(f"gdn.{name}") for name in _GDN_SIZES} if "gdn" in pattern else None,
            "moe": self._moe() if has_experts else None,
            "rope": self._rope() if "full" in pattern else None,
            "mtp": {"layers": layers} if (layers := self.at("mtp.layers")) else None,
        }

    @property
    def _is_drafter(self) -> bool:
        return isinstance(self.hf.get(DRAFTER), Mapping)

    def _type(self) -> str | None:
        if self._is_drafter:
            return "dflash"
        try:
            types = config_facts(self.hf).model_types
        except ValueError as error:
            self.problems.append(str(error))
            return None
        return next((name for name in types if not name.endswith("_text")), types[0])

    def _pattern(self) -> list[str]:
        """Return the kind of every layer, folded to its shortest period."""
        count, kinds = self.at("num_layers"), self.hf.get("layer_types")
        if not isinstance(kinds, list):
            every = self.hf.get("full_attention_interval") or (1 if self._is_drafter else _LAYERS_A_GROUP)
            return ["gdn"] * (every - 1) + ["full"] if isinstance(every, int) and every > 0 else ["full"]
        if self._is_drafter:
            return ["full"]
        if unknown := sorted({str(kind) for kind in kinds if kind not in _KINDS}):
            self.problems.append(f"layer_types holds {', '.join(unknown)}, expected {' or '.join(_KINDS)}")
        if len(kinds) != count:
            self.problems.append(f"layer_types has {len(kinds)} entries for {count} layers")
        return period([_KINDS.get(str(kind), "full") for kind in kinds]) or ["full"]

    def _quant(self) -> str:
        """Return nvfp4 or bf16; a config with a format but without weights counts by its format."""
        try:
            quants = {group.quant for group in quantisation(self.hf).groups}
        except QuantProblem as problem:
            if not problem.is_incomplete:
                self.problems.append(str(problem))
                return PLAIN
            quants = {bare_format(self.hf) or problem.got}
        if strangers := sorted(quants.difference(READABLE)):
            self.problems.append(f"its weights are {', '.join(strangers)}, expected {' or '.join(READABLE)}")
        return "nvfp4" if quants else PLAIN

    def _attention(self) -> dict[str, Any]:
        return {
            **{name: self.need(f"attention.{name}") for name in ("heads", "kv_heads", "head_dim")},
            "gated": not self._is_drafter and bool(self.at("attention.gated", True)),
            "qk_norm": True,
        }

    def _moe(self) -> dict[str, Any]:
        return {
            **{name: self.need(f"moe.{name}") for name in ("experts", "top_k", "intermediate_size")},
            "shared_intermediate_size": self.at("moe.shared_intermediate_size"),
            "router": self.at("moe.router", "softmax"),
            "renormalise": bool(self.at("moe.renormalise", True)),
        }

    def _rope(self) -> dict[str, Any]:
        """Read rope parameters of either generation of configs; contradictions() judges their options."""
        ropes = [self.hf.get(name) for name in ROPE_TABLES]
        rope: Mapping[str, Any] = next((one for one in ropes if isinstance(one, Mapping)), {})
        found: dict[str, Any] = {}
        for name, key in ROPE_KEYS.items():
            value = rope.get(key) if key == "factor" or rope.get(key) is not None else self.hf.get(key)
            if value is not None and (not name.startswith(YARN) or YARN in (rope.get("rope_type"), rope.get("type"))):
                found[name] = float(value) if name in _FLOATS and isinstance(value, int) else value
        if "theta" not in found:
            self.problems.append("rope_theta is missing")
        return found

    def drafter(self, target: str | None) -> dict[str, Any]:
        """Return the ``[dflash]`` table of a drafter's config, else an empty one."""
        own = self.hf.get(DRAFTER)
        if not isinstance(own, Mapping):
            return {}
        if target is None:
            self.problems.append("a drafter's config does not name its target: give one")
        found = {name: self.hf.get(key) or own.get(key) for name, key in DRAFTER_KEYS.items()}
        self.problems += [f"{DRAFTER_KEYS[name]} is missing" for name, value in found.items() if value is None]
        return {"target": target, **found, **{name: own.get(key) for name, key in DRAFTER_OPTIONS.items()}}
