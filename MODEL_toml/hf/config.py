"""The content of a checkpoint's ``config.json``: one reader for resolution, for boots and for weights.

The text model may be nested in ``text_config``. A null counts as absent. ``architectures`` is ignored: it names code,
not shapes. A quantisation config may stand in ``config.json`` or, in older exports, in ``hf_quant_config.json``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_muster.MODEL_toml.hf.json_files import JsonProblem, read_json_object
from kernel_muster.MODEL_toml.wording import shown, type_name
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen

CONFIG_NAME, HF_QUANT_NAME = "config.json", "hf_quant_config.json"
# A quantisation config may list every expert of every layer by name: 30,000 names of 120 bytes have been published.
MOST_BYTES = 64 * 1024 * 1024
TIE = "tie_word_embeddings"
ROPE_TABLES = ("rope_parameters", "rope_scaling")
_TEXT_SUFFIX = "_text"
# Same type, other rotary layout: these checkpoints are served by the builder of the later type.
_INTERLEAVED_TYPE = {"qwen3_5_moe": "qwen3_6_moe", "qwen3_5_moe_text": "qwen3_6_moe"}
_INTERLEAVED = "mrope_interleaved"


@frozen
class HfConfig:
    """A config's content. ``file`` is where it was read; ``hf_quant`` is the content of ``hf_quant_config.json``."""

    content: Mapping[str, Any]
    file: Path | None = None
    hf_quant: Mapping[str, Any] | None = None

    @property
    def text(self) -> Mapping[str, Any]:
        """The nested text model, or an empty table."""
        nested = self.content.get("text_config")
        return nested if isinstance(nested, Mapping) else {}

    @property
    def levels(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """The outer table and the nested one, each with the prefix of its fields in messages."""
        return (("", self.content), ("text_config.", self.text)) if self.text else (("", self.content),)

    def get(self, *keys: str) -> Any:
        """Return the first of these fields that is not null; the nested text model comes first."""
        found = (table.get(key) for table in (self.text, self.content) for key in keys)
        return next((value for value in found if value is not None), None)

    def key_of(self, *keys: str) -> str:
        """Return the name under which a field is given; the first one if it is not."""
        return next((key for key in keys if self.get(key) is not None), keys[0])

    @property
    def gives_layers(self) -> bool:
        """Whether the config describes a whole model, not only its type and size."""
        return self.get("num_hidden_layers", "layer_types", "num_attention_heads") is not None

    @property
    def tie(self) -> "Tie":
        """How the config ties the output head to the embedding."""
        return Tie(*(table.get(TIE) for table in (self.content, self.text)))


@frozen
class Tie:
    """``tie_word_embeddings`` of both levels: the only rule in this project for it.

    The outer level belongs to the class that has the head, and decides where it is given. transformers 5 writes both
    levels on each save, the nested one from the defaults of the text model alone. A checkpoint without a head may use
    the embedding only where no level contradicts.
    """

    outer: Any = None
    nested: Any = None

    @property
    def value(self) -> Any:
        """Whether the head is tied; None if no level gives it."""
        return self.nested if self.outer is None else self.outer

    @property
    def is_contested(self) -> bool:
        """Whether the levels disagree."""
        return self.outer is not None and self.nested is not None and self.outer is not self.nested

    def __str__(self) -> str:
        """Name each level that gives it, with its value."""
        levels = ((TIE, self.outer), (f"text_config.{TIE}", self.nested))
        return ", ".join(f"{name} {shown(value)}" for name, value in levels if value is not None) or f"no {TIE}"


def read_config(path: Path) -> HfConfig:
    """Read a ``config.json``, or the one in a folder, with its neighbour; UsageError if that cannot be done."""
    try:
        file = path / CONFIG_NAME if path.is_dir() else path
        beside = file.parent / HF_QUANT_NAME
        has_quant = beside.exists()
    except (OSError, ValueError):  # the reader below gives the reason
        file, beside, has_quant = path, path, False
    try:
        content = read_json_object(file, MOST_BYTES)
        return HfConfig(content, file, read_json_object(beside, MOST_BYTES) if has_quant else None)
    except JsonProblem as problem:
        raise UsageError(str(problem)) from None


def config_at(cwd: Path, path: str | Path) -> HfConfig:
    """Read a config whose relative path starts at ``cwd``; messages name the path as it was written."""
    read = read_config(cwd / path)
    name = "" if read.file is None or read.file == cwd / path else read.file.name
    return replace(read, file=Path(path) / name)


def config_of(config: "str | Path | Mapping[str, Any] | HfConfig") -> HfConfig:
    """Return a config from its path, its folder or its content; UsageError if a file cannot be read."""
    if isinstance(config, HfConfig):
        return config
    return HfConfig(config) if isinstance(config, Mapping) else read_config(Path(config))


@frozen
class ConfigFacts:
    """The model types of a config and its hidden size. ``steps`` tells how they were read.

    ``ranks`` are groups of types, the likeliest first: a manifest of an earlier group wins. ``stated`` are all types
    as they stand in the file, before interleaved mrope makes another type of them.
    """

    ranks: tuple[tuple[str, ...], ...]
    stated: tuple[str, ...]
    hidden_size: int | None
    steps: tuple[str, ...]

    @property
    def model_types(self) -> tuple[str, ...]:
        """The types of all groups."""
        return tuple(name for rank in self.ranks for name in rank)

    @property
    def label(self) -> str:
        """The types in words, without ``qwen3_5_text`` beside ``qwen3_5``."""
        redundant = {f"{name}{_TEXT_SUFFIX}" for name in self.model_types}
        return " or ".join(shown(name).strip("'") for name in self.model_types if name not in redundant)


def config_facts(config: HfConfig) -> ConfigFacts:
    """Read type and size; ValueError names what is malformed."""
    nested = config.content.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ValueError(f"text_config is {type_name(nested)}, expected an object")
    exact = tuple(dict.fromkeys(_model_types(config)))
    if not exact:
        raise ValueError("it has no model_type")
    bare = tuple(name for one in exact if (name := one.removesuffix(_TEXT_SUFFIX)) and name not in exact)
    stated = tuple(dict.fromkeys((*exact, *bare)))
    hidden = _hidden_size(config)
    read = sorted(stated, key=lambda name: name.endswith(_TEXT_SUFFIX))
    steps = [f"config.json: model_type {' or '.join(map(shown, read))}, hidden_size {hidden or 'not given'}"]
    ranks = tuple((name,) for name in exact) + ((bare,) if bare else ())
    if is_interleaved(config) and not _INTERLEAVED_TYPE.keys().isdisjoint(stated):
        types = tuple(dict.fromkeys(_INTERLEAVED_TYPE.get(name, name) for name in stated))
        ranks = (types,)
        steps.append(f"its rope parameters are interleaved mrope, so it counts as {' or '.join(types)}")
    return ConfigFacts(ranks, stated, hidden, tuple(steps))


def _model_types(config: HfConfig) -> Iterator[str]:
    """The types of both levels as they stand there, the outer one first."""
    for prefix, table in config.levels:
        name = table.get("model_type")
        if name is None:
            continue
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{prefix}model_type is {shown(name)}, expected text")
        yield name


def _hidden_size(config: HfConfig) -> int | None:
    for prefix, table in reversed(config.levels):
        size = table.get("hidden_size")
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{prefix}hidden_size is {shown(size)}, expected a positive integer")
        return size
    return None


def is_interleaved(config: HfConfig) -> bool:
    """Whether the rope parameters are interleaved mrope; ValueError if one of them is malformed."""
    for _, table in reversed(config.levels):
        if flags := list(_flags(table)):
            return any(flags)
    return False


def _flags(table: Mapping[str, Any]) -> Iterator[bool]:
    """The flag of each rope table; some exports have it beside the table."""
    for where, rope in (("", table), *rope_tables(table)):
        flag = rope.get(_INTERLEAVED)
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"{where and where + '.'}{_INTERLEAVED} is {shown(flag)}, expected true or false")
        if where or flag is not None:
            yield bool(flag)


def rope_tables(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rope tables with their names: one, or one for each kind of layer; ValueError if one is no table."""
    for name in ROPE_TABLES:
        rope = table.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ValueError(f"{name} is {type_name(rope)}, expected an object")
        yield name, rope
        for kind, inner in rope.items():
            if isinstance(inner, Mapping):
                yield f"{name}.{kind}", inner
