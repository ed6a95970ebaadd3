"""Where a ``config.json`` and a manifest state different facts: then it is another model, whatever its type and size.

``fields`` has the table of fields. Only stated facts are compared. Two absences count as statements: a config
that describes its layers and gives no number of MTP layers has none, and so has a manifest without ``[model.mtp]``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernel_muster.MODEL_toml.hf.config import TIE, HfConfig, config_of
from kernel_muster.MODEL_toml.hf.fields import BUILT_IN, DRAFTER, DRAFTER_KEYS, DRAFTER_OPTIONS, KEYS, WINDOW
from kernel_muster.MODEL_toml.hf.layer_contradictions import layer_contradictions
from kernel_muster.MODEL_toml.hf.quant_contradictions import quant_contradictions
from kernel_muster.MODEL_toml.hf.rope_contradictions import rope_contradictions
from kernel_muster.MODEL_toml.hf.statements import (
    NOBODY,
    Contradiction,
    compared,
    is_same,
    read_by_builder,
    toml_value,
    value_text,
    written,
)
from kernel_muster.MODEL_toml.schema import ModelTable
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
_NOT_HERE = NOBODY + "no layer here computes another"
_SAME = NOBODY + "it must be as stated"


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
        _plain, _mtp, _tie, _norms, _context, layer_contradictions, rope_contradictions, quant_contradictions,
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
            yield from compared(path, getattr(owner, name), config.key_of(*keys), config.get(*keys))
    if model.ffn == "dense":
        key = "intermediate_size"
        yield from compared(key, model.intermediate_size, key, config.get(key))
        if experts := config.get(*KEYS["moe.experts"]):
            key = config.key_of(*KEYS["moe.experts"])
            yield Contradiction(key, shown(experts), 'ffn "dense"', 'ffn = "moe" under [model], and [model.moe]')
    path = "moe.shared_intermediate_size"
    if model.moe is not None:
        mine, key = model.moe.shared_intermediate_size, KEYS[path][0]
        size = config.get(key)
        if mine is None and size:
            yield Contradiction(key, shown(size), f"no {path}", written(path, size, 0) or _SAME)
        yield from compared(path, mine, key, size)


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
        yield Contradiction(key, value_text(theirs), f"{_MTP} {mine}" if mine else "no [model.mtp]", accept or _SAME)


def _tie(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    """Compare by the one rule for tied embeddings; levels that disagree are both shown."""
    tie, mine = config.tie, model.tie_word_embeddings
    if tie.value is None or tie.value is mine:
        return
    accept = written(TIE, tie.value, mine) or f"{NOBODY}expected true or false"
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
        got = f"{value_text(kind)}, whose norms multiply by {_NORM_RULES[theirs]}"
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
        accept = written(path, theirs, mine) or f"{NOBODY}expected an integer"
        yield Contradiction(key, value_text(theirs), f"{path} {mine}", accept)


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
            yield Contradiction(key, value_text(theirs), f"dflash.{name} {toml_value(mine)}", accept, where=where)


def _window(config: HfConfig, *, is_drafter: bool) -> Iterator[Contradiction]:
    """Find attention to a window, which drafters alone have; without ``use_sliding_window`` its size has no effect."""
    if is_drafter:
        return
    kinds, size, uses = config.get("layer_types"), config.get("sliding_window"), config.get("use_sliding_window")
    found = {"layer_types": f"{value_text(WINDOW)} among them"} if isinstance(kinds, list) and WINDOW in kinds else {}
    found |= {"sliding_window": value_text(size)} if size is not None and uses is None else {}
    for key, got in found.items():
        whole = "attention to the whole context, built in"
        yield Contradiction(key, got, whole, read_by_builder(key), is_built_in=True)


def _built_in(config: HfConfig, *, is_drafter: bool) -> Iterator[Contradiction]:
    """Find options of a config that no layer here has; a drafter attends to a window anyway."""
    for key, values in BUILT_IN.items():
        theirs = None if is_drafter and key == "use_sliding_window" else config.get(key)
        if theirs is None or any(is_same(value, theirs) for value in values):
            continue
        wanted = toml_value(values[0]) or "none" if values else "none"
        yield Contradiction(key, value_text(theirs), f"{wanted}, built in", read_by_builder(key), is_built_in=True)
