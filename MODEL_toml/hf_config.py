"""What resolution reads from a Hugging Face ``config.json``.

``architectures`` is ignored: it names code, not shapes.
"""

import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernel_muster.MODEL_toml.wording import shown, type_name
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen

CONFIG_NAME = "config.json"
MOST_BYTES = 4 * 1024 * 1024
_TEXT_SUFFIX = "_text"
# Same type, other rotary layout: these checkpoints are served by the builder of the later type.
_INTERLEAVED_TYPE = {"qwen3_5_moe": "qwen3_6_moe", "qwen3_5_moe_text": "qwen3_6_moe"}
_ROPE_TABLES = ("rope_parameters", "rope_scaling")


@frozen
class ConfigFacts:
    """The model types that a config claims, and its hidden size. ``steps`` says how they were read."""

    model_types: tuple[str, ...]
    hidden_size: int | None
    steps: tuple[str, ...]

    @property
    def label(self) -> str:
        """The types in words; ``qwen3_5_text`` goes without saying beside ``qwen3_5``."""
        redundant = {f"{name}{_TEXT_SUFFIX}" for name in self.model_types}
        return " or ".join(shown(name).strip("'") for name in self.model_types if name not in redundant)


def read_config(path: Path) -> dict[str, Any]:
    """Read a ``config.json``, or the one in a folder; UsageError if that cannot be done."""
    try:
        if path.is_dir():
            path = path / CONFIG_NAME
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path} is no regular file")
        with path.open("rb") as stream:
            raw = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{shown(str(path))} cannot be read: {why}") from None
    if len(raw) > MOST_BYTES:
        raise UsageError(f"{path} has more than {MOST_BYTES} bytes, which no config.json has")
    return _object(path, raw)


def _object(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unique)
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ones
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds {type_name(value)}, expected an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {shown(next(name for name in table if names.count(name) > 1))} stands twice")
    return table


def config_facts(config: Mapping[str, Any]) -> ConfigFacts:
    """Read the facts; ValueError says what is malformed."""
    text = _text_config(config)
    types = list(dict.fromkeys(_model_types(config, text)))
    if not types:
        raise ValueError("it has no model_type")
    hidden = _hidden_size(config, text)
    steps = [f"config.json: model_type {' or '.join(map(shown, types))}, hidden_size {hidden or 'not given'}"]
    if _is_interleaved(config, text) and not _INTERLEAVED_TYPE.keys().isdisjoint(types):
        types = list(dict.fromkeys(_INTERLEAVED_TYPE.get(name, name) for name in types))
        steps.append(f"its rope parameters are interleaved mrope, so it counts as {' or '.join(types)}")
    return ConfigFacts(tuple(types), hidden, tuple(steps))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    if text is None:
        return {}
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config is {type_name(text)}, expected an object")
    return text


def _model_types(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    """The types of both levels, each once; ``qwen3_5_text`` is the text part of ``qwen3_5``."""
    for table, where in ((text, "text_config.model_type"), (config, "model_type")):
        name = table.get("model_type")
        if name is None:
            continue
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{where} is {shown(name)}, expected text")
        yield from (one for one in (name.removesuffix(_TEXT_SUFFIX), name) if one)


def _hidden_size(config: Mapping[str, Any], text: Mapping[str, Any]) -> int | None:
    for table, where in ((text, "text_config.hidden_size"), (config, "hidden_size")):
        size = table.get("hidden_size")
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{where} is {shown(size)}, expected a positive integer")
        return size
    return None


def _is_interleaved(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    return any(_flags(text)) if list(_ropes(text)) else any(_flags(config))


def _flags(table: Mapping[str, Any]) -> list[bool]:
    flags = []
    for where, rope in _ropes(table):
        flag = rope.get("mrope_interleaved")
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"{where}.mrope_interleaved is {shown(flag)}, expected true or false")
        flags.append(bool(flag))
    return flags


def _ropes(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rope tables: one, or one for each kind of layer."""
    for name in _ROPE_TABLES:
        rope = table.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ValueError(f"{name} is {type_name(rope)}, expected an object")
        yield name, rope
        for kind, inner in rope.items():
            if isinstance(inner, Mapping):
                yield f"{name}.{kind}", inner
