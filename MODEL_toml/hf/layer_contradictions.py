"""Whether the layers of a config are those of a manifest: the kind of each, listed or by an interval."""

from collections.abc import Iterator, Sequence
from typing import Any

from kernel_muster.MODEL_toml.hf.config import HfConfig
from kernel_muster.MODEL_toml.hf.fields import ATTENTION, GDN, WINDOW
from kernel_muster.MODEL_toml.hf.statements import NOBODY, Contradiction, period, toml_value, value_text
from kernel_muster.MODEL_toml.schema import ModelTable


def layer_contradictions(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    """Compare the kind of every layer; attention to a window counts as full attention, and is judged elsewhere."""
    kinds = model.layer_kinds
    stated, every = config.get("layer_types"), config.get("full_attention_interval")
    if not kinds:
        return
    if isinstance(stated, list):
        yield from _kinds_stated(kinds, stated)
    elif stated is not None:
        got = NOBODY + "expected a list of the kind of each layer"
        yield Contradiction("layer_types", value_text(stated), "layer_pattern", got, is_of_layers=True)
    if every is None:
        return
    key = "full_attention_interval"
    if isinstance(every, bool) or not isinstance(every, int | float) or every < 1 or every != every // 1:
        accept = NOBODY + "expected a positive integer"
        yield Contradiction(key, value_text(every), "layer_pattern", accept, is_of_layers=True)
        return
    theirs = ["gdn" if (at + 1) % every else "full" for at in range(len(kinds))]
    if tuple(theirs) != kinds:
        yield Contradiction(key, value_text(every), _pattern(kinds), _accept_pattern(theirs), is_of_layers=True)


def _kinds_stated(kinds: tuple[str, ...], stated: list[Any]) -> Iterator[Contradiction]:
    known = (GDN, ATTENTION, WINDOW)
    if unknown := next((value_text(kind) for kind in stated if kind not in known), None):
        accept = f"{NOBODY}expected {' or '.join(known[:2])}"
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


def _counted(kinds: Sequence[str]) -> str:
    if not kinds:
        return "none"
    first = next((at for at, kind in enumerate(kinds) if kind == "full"), None)
    where = "" if first is None else f", the first full one at {first}"
    return f"{kinds.count('gdn')} gdn and {kinds.count('full')} full{where}"
