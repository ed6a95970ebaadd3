"""Where a ``config.json`` and a manifest state different facts: then it is another model, whatever its type and size.

``fields`` has the table of fields. Only stated facts are compared. Two absences count as statements: a config
that describes its layers and gives no number of MTP layers has none, and so has a manifest without ``[model.mtp]``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernel_muster.MODEL_toml.hf.config import ROPE_TABLES, TIE, HfConfig, config_of
from kernel_muster.MODEL_toml.hf.fields import (
    ATTENTION,
    BESIDE_ROPE,
    BUILT_IN,
    DRAFTER,
    DRAFTER_KEYS,
    DRAFTER_OPTIONS,
    GDN,
    KEYS,
    NOT_YARN,
    ROPE_KEYS,
    WINDOW,
    YARN,
    YARN_OPTIONS,
)
from kernel_muster.MODEL_toml.hf.quant_contradictions import quant_contradictions
from kernel_muster.MODEL_toml.hf.statements import Contradiction, is_same, period, toml_value, written
from kernel_muster.MODEL_toml.schema import ModelTable, RopeTable
from kernel_muster.MODEL_toml.wording import shown

#: Whether norms multiply by 1 + weight, by model type. Configs do not say; the classes of Hugging Face transformers do
#: (Qwen3NextRMSNorm and its successors; Qwen2RMSNorm, Qwen3RMSNorm, LlamaRMSNorm).
_ZERO_CENTRED = {
    "qwen3_next": True,
    "qwen3_5": True,
    "qwen3_5_moe": True,
    "qwen3_6_moe": True,
    "qwen3": False,
    "qwen3_moe": False,
    "qwen2": False,
    "qwen2_moe": False,
    "llama": False,
    "mistral": False,
}
_NORM_RULES = {True: "1 + weight", False: "the weight alone"}
_MTP = "mtp.layers"
_APART = ("moe.shared_intermediate_size", "intermediate_size", _MTP)  # paths with rules of their own
_NOBODY = "no manifest accepts it: "
_NOT_HERE = _NOBODY + "no layer here computes another"
_SAME = _NOBODY + "it must be as stated"


def contradictions(
    model: ModelTable,
    config: "HfConfig | Mapping[str, Any]",
    *,
    dflash: Mapping[str, Any] | None = None,
    known: Collection[str] | None = (),
    has_all_layers: bool = True,
) -> tuple[Contradiction, ...]:
    """Compare a config with a manifest's [model] and [dflash]; the text model may be nested.

    Fields in ``known`` are those that the builder of the model reads itself; None: the layers of this project build it.
    Without ``has_all_layers`` the manifest may describe some layers of that model.
    """
    hf = config_of(config)
    checks: tuple[Callable[[ModelTable, HfConfig], Iterable[Contradiction]], ...] = (
        _plain, _mtp, _tie, _norms, _context, _layers, _rope, quant_contradictions,
    )  # fmt: skip
    found = [one for check in checks for one in check(model, hf)]
    found += _drafter(dflash or {}, hf)
    found += _window(hf, is_drafter=bool(dflash))
    found += _built_in(hf, is_drafter=bool(dflash))
    kept = [one for one in found if one.field not in (known or ()) and (has_all_layers or not one.is_of_layers)]
    if known is None:
        kept = [replace(one, accept=_NOT_HERE) if one.is_built_in else one for one in kept]
    return tuple(dict.fromkeys(kept))


def _plain(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    for path, keys in KEYS.items():
        table, _, name = path.rpartition(".")
        owner = getattr(model, table) if table else model
        if owner is not None and path not in _APART:
            yield from _compared(path, getattr(owner, name), config.key_of(*keys), config.get(*keys))
    if model.ffn == "dense":
        key = "intermediate_size"
        yield from _compared(key, model.intermediate_size, key, config.get(key))
        if experts := config.get(*KEYS["moe.experts"]):
            key = config.key_of(*KEYS["moe.experts"])
            yield Contradiction(key, shown(experts), 'ffn "dense"', 'ffn = "moe" under [model], and [model.moe]')
    path = "moe.shared_intermediate_size"
    if model.moe is not None:
        mine, key = model.moe.shared_intermediate_size, KEYS[path][0]
        size = config.get(key)
        if mine is None and size:
            yield Contradiction(key, shown(size), f"no {path}", written(path, size, 0) or _SAME)
        yield from _compared(path, mine, key, size)


def _compared(path: str, mine: Any, key: str, theirs: Any, where: str = "") -> Iterator[Contradiction]:
    """Yield a contradiction where both state a fact and the two differ; ``where`` is the table of the field."""
    if mine is None or theirs is None or is_same(mine, theirs):
        return
    stated = f"no {path}" if mine == () else f"{path} {toml_value(mine)}"
    accept = written(path, theirs, mine) or f"{_NOBODY}expected a value like {toml_value(mine)}"
    is_of_layers = path == "num_layers"
    yield Contradiction(key, _value(theirs), stated, accept, where=where, is_of_layers=is_of_layers)


def _value(theirs: Any) -> str:
    text = toml_value(theirs)
    return shown(theirs) if text is None else text


def _mtp(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    """Compare the MTP head; a config without a number has none, if it describes the layers of its model."""
    keys = KEYS[_MTP]
    key, theirs = config.key_of(*keys), config.get(*keys)
    mine = 0 if model.mtp is None else model.mtp.layers
    if theirs is None:
        is_null = any(name in table for _, table in config.levels for name in keys)
        if mine and (is_null or config.gives_layers):
            got = "null" if is_null else "missing"
            yield Contradiction(key, got, f"{_MTP} {mine}", "no [model.mtp] table")
    elif not is_same(mine, theirs) and (mine or model.num_layers is not None):
        accept = written(_MTP, theirs, 1) if theirs else "no [model.mtp] table"
        yield Contradiction(key, _value(theirs), f"{_MTP} {mine}" if mine else "no [model.mtp]", accept or _SAME)


def _tie(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    """Compare by the one rule for tied embeddings; levels that disagree are both shown."""
    tie, mine = config.tie, model.tie_word_embeddings
    if tie.value is None or tie.value is mine:
        return
    accept = written(TIE, tie.value, mine) or f"{_NOBODY}expected true or false"
    got = f"{shown(tie.outer)} (text_config: {shown(tie.nested)})" if tie.is_contested else shown(tie.value)
    yield Contradiction(TIE, got, f"{TIE} {shown(mine)}", accept)


def _norms(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    """Compare the factor of norms, which a model type of Hugging Face decides; no norm, no rule."""
    if model.rms_norm_eps is None and "rms_norm_zero_centred" not in model.model_fields_set:
        return
    kind = config.get("model_type")
    theirs = _ZERO_CENTRED.get(kind.removesuffix("_text")) if isinstance(kind, str) else None
    mine = model.rms_norm_zero_centred
    if theirs is not None and theirs is not mine:
        path = "rms_norm_zero_centred"
        got = f"{_value(kind)}, whose norms multiply by {_NORM_RULES[theirs]}"
        stated = f"{path} {shown(mine)}, {_NORM_RULES[mine]}"
        yield Contradiction("model_type", got, stated, written(path, theirs, mine) or _SAME)


def _context(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    """Compare the context: a manifest may give a model less than its config, and as much more as YaRN stretches it."""
    key, path = "max_position_embeddings", "context_length"
    mine, theirs = model.context_length, config.get(key)
    if mine is None or theirs is None:
        return
    rope = model.rope
    stretched = 0.0 if rope is None else (rope.yarn_factor or 0.0) * (rope.yarn_original_context or 0)
    is_number = isinstance(theirs, int | float) and not isinstance(theirs, bool)
    if not is_number or not mine <= max(theirs, stretched):
        accept = written(path, theirs, mine) or f"{_NOBODY}expected an integer"
        yield Contradiction(key, _value(theirs), f"{path} {mine}", accept)


def _layers(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    """Compare the kind of every layer; attention to a window counts as full attention, and is judged elsewhere."""
    kinds = model.layer_kinds
    stated, every = config.get("layer_types"), config.get("full_attention_interval")
    if not kinds:
        return
    if isinstance(stated, list):
        yield from _kinds_stated(kinds, stated)
    elif stated is not None:
        got = _NOBODY + "expected a list of the kind of each layer"
        yield Contradiction("layer_types", _value(stated), "layer_pattern", got, is_of_layers=True)
    if every is None:
        return
    key = "full_attention_interval"
    if isinstance(every, bool) or not isinstance(every, int | float) or every < 1 or every != every // 1:
        accept = _NOBODY + "expected a positive integer"
        yield Contradiction(key, _value(every), "layer_pattern", accept, is_of_layers=True)
        return
    theirs = ["gdn" if (at + 1) % every else "full" for at in range(len(kinds))]
    if tuple(theirs) != kinds:
        yield Contradiction(key, _value(every), _pattern(kinds), _accept_pattern(theirs), is_of_layers=True)


def _kinds_stated(kinds: tuple[str, ...], stated: list[Any]) -> Iterator[Contradiction]:
    known = (GDN, ATTENTION, WINDOW)
    if unknown := next((_value(kind) for kind in stated if kind not in known), None):
        accept = f"{_NOBODY}expected {' or '.join(known[:2])}"
        yield Contradiction("layer_types", f"{unknown} among them", _pattern(kinds), accept, is_of_layers=True)
        return
    theirs = ["gdn" if kind == GDN else "full" for kind in stated]
    if tuple(theirs) != kinds:
        accept = _accept_pattern(theirs)
        yield Contradiction("layer_types", _counted(theirs), _pattern(kinds), accept, is_of_layers=True)


def _pattern(kinds: tuple[str, ...]) -> str:
    return f"layer_pattern over {len(kinds)} layers, {_counted(kinds)}"


def _accept_pattern(kinds: list[str]) -> str:
    pattern = toml_value(period(kinds)) or f"[the kinds of all {len(kinds)} layers]"
    return f"layer_pattern = {pattern} and num_layers = {len(kinds)} under [model]"


def _counted(kinds: "tuple[str, ...] | list[str]") -> str:
    if not kinds:
        return "none"
    first = next((at for at, kind in enumerate(kinds) if kind == "full"), None)
    where = "" if first is None else f", the first full one at {first}"
    return f"{kinds.count('gdn')} gdn and {kinds.count('full')} full{where}"


def _rope(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    """Compare rope parameters wherever they stand: which of two tables a loader takes depends on its release."""
    for key in ROPE_TABLES:
        if (table := config.get(key)) is not None and not isinstance(table, Mapping):
            yield Contradiction(key, shown(table), "[model.rope]", _NOBODY + "expected an object")
    if model.rope is not None:
        for where, table in _rope_tables(config):
            yield from _one_rope(model.rope, table, where)


def _one_rope(rope: RopeTable, table: Mapping[str, Any], where: str) -> Iterator[Contradiction]:
    for name, key in ROPE_KEYS.items():
        yield from _compared(f"rope.{name}", getattr(rope, name), key, table.get(key), where)
    is_yarn, factor = rope.yarn_factor is not None, table.get("factor")
    stated = "rope.yarn_factor" if is_yarn else "no rope.yarn_factor"
    kinds = [(key, kind) for key in ("rope_type", "type") if (kind := table.get(key)) is not None]
    for key, kind in kinds:
        if kind != YARN and kind not in NOT_YARN:
            accept = f"{_NOBODY}expected {' or '.join((*NOT_YARN, YARN))}"
            yield Contradiction(key, _value(kind), stated, accept, where=where)
        elif (kind == YARN) is not is_yarn:
            yield Contradiction(key, _value(kind), stated, _accept_yarn(table), where=where)
    if not kinds and factor is not None and not is_same(1, factor):
        accept = f"{_NOBODY}a factor needs its rope_type"
        yield Contradiction("factor", f"{_value(factor)} without rope_type", stated, accept, where=where)
    for key, built_in in YARN_OPTIONS.items() if is_yarn else ():
        if (value := table.get(key)) is not None and (built_in is None or not is_same(built_in, value)):
            wanted = f"{'none' if built_in is None else toml_value(built_in)}, built into the YaRN kernel"
            yield Contradiction(key, _value(value), wanted, _read_by_builder(key), where=where, is_built_in=True)


def _accept_yarn(table: Mapping[str, Any]) -> str:
    if YARN not in (table.get("rope_type"), table.get("type")):
        return "no yarn_factor under [model.rope]"
    keys = ("yarn_factor", "yarn_original_context")
    values = [toml_value(table.get(ROPE_KEYS[key])) or "..." for key in keys]
    return " and ".join(f"{key} = {value}" for key, value in zip(keys, values, strict=True)) + " under [model.rope]"


def _rope_tables(config: HfConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tables of rope parameters, those in them for a kind of attention, and what stands beside them."""
    for key in ROPE_TABLES:
        table = config.get(key)
        if isinstance(table, Mapping):
            yield key, table
            for kind in (ATTENTION, WINDOW):
                if isinstance(own := table.get(kind), Mapping):
                    yield f"{key}.{kind}", own
    yield "", {key: value for key in BESIDE_ROPE if (value := config.get(key)) is not None}


def _drafter(dflash: Mapping[str, Any], config: HfConfig) -> Iterator[Contradiction]:
    """Compare a drafter's options with the [dflash] table; a model that drafts for none has no such options."""
    options = config.get(DRAFTER)
    if not dflash:
        if options is not None:
            yield Contradiction(DRAFTER, shown(options), "no [dflash]", "a [dflash] table")
        return
    own = options if isinstance(options, Mapping) else {}
    keys = DRAFTER_KEYS | DRAFTER_OPTIONS
    found = [(name, key, own.get(key), DRAFTER) for name, key in keys.items()]
    found += [(name, key, config.get(key), "") for name, key in DRAFTER_KEYS.items()]
    for name, key, theirs, where in found:
        mine = dflash.get(name)
        mine = tuple(mine) if isinstance(mine, list) else mine
        if mine is not None and theirs is not None and not is_same(mine, theirs):
            accept = f"{name} = {toml_value(theirs) or '...'} under [dflash]"
            yield Contradiction(key, _value(theirs), f"dflash.{name} {toml_value(mine)}", accept, where=where)


def _window(config: HfConfig, *, is_drafter: bool) -> Iterator[Contradiction]:
    """Find attention to a window, which drafters alone have; without ``use_sliding_window`` its size has no effect."""
    if is_drafter:
        return
    kinds, size, uses = config.get("layer_types"), config.get("sliding_window"), config.get("use_sliding_window")
    found = {"layer_types": f"{_value(WINDOW)} among them"} if isinstance(kinds, list) and WINDOW in kinds else {}
    found |= {"sliding_window": _value(size)} if size is not None and uses is None else {}
    for key, got in found.items():
        whole = "attention to the whole context, built in"
        yield Contradiction(key, got, whole, _read_by_builder(key), is_built_in=True)


def _built_in(config: HfConfig, *, is_drafter: bool) -> Iterator[Contradiction]:
    """Find options of a config that no layer here has; a drafter attends to a window anyway."""
    for key, values in BUILT_IN.items():
        theirs = None if is_drafter and key == "use_sliding_window" else config.get(key)
        if theirs is None or any(is_same(value, theirs) for value in values):
            continue
        wanted = toml_value(values[0]) or "none" if values else "none"
        yield Contradiction(key, _value(theirs), f"{wanted}, built in", _read_by_builder(key), is_built_in=True)


def _read_by_builder(key: str) -> str:
    return f'known_config_fields = ["{key}"] under [model], if the builder of the model computes it'
