"""One fact that a ``config.json`` and a manifest state differently, and how values are written in both."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from kernel_muster.MODEL_toml.wording import shown
from kernel_muster.registry.values import frozen

#: How ``accept`` begins where no manifest can state the config's value.
NOBODY = "no manifest accepts it: "
_LONGEST = 60
#: Keys of a manifest that take a few texts only.
_CHOICES = {"moe.router": ("softmax", "sigmoid")}


@frozen
class Contradiction:
    """One fact: the field of the config and its value, the manifest's statement, and the line that would accept it.

    ``accept`` is that line, or a sentence that no line does. ``where`` is the table that has the field. A field
    ``is_built_in`` if no manifest has a key for it: a builder of other layers may read it itself.
    """

    field: str
    value: str
    stated: str
    accept: str
    where: str = ""
    is_of_layers: bool = False
    is_built_in: bool = False

    def __str__(self) -> str:
        field = f"{self.where}.{self.field}" if self.where else self.field
        remedy = self.accept if self.accept.startswith(NOBODY) else f"to accept it write {self.accept}"
        return f"config.json: {field} {self.value}; manifest: {self.stated}; {remedy}"

    @property
    def path(self) -> tuple[str, ...]:
        """The path of the manifest's key below [model], as far as there is one."""
        first = self.stated.removeprefix("no ").split(" ", 1)[0].strip(",[]").removeprefix("model.")
        return tuple(first.split("."))


def is_same(mine: Any, theirs: Any) -> bool:
    """Whether a value of a config equals one of a manifest; true is no 1, and text is no number."""
    if isinstance(mine, tuple | list):
        return isinstance(theirs, list) and len(theirs) == len(mine) and all(map(is_same, mine, theirs))
    if isinstance(mine, bool) or isinstance(theirs, bool):
        return mine is theirs
    if isinstance(mine, str):
        return isinstance(theirs, str) and mine == theirs
    return isinstance(theirs, int | float) and bool(mine == theirs)


def toml_value(value: Any) -> str | None:
    """Write a value as TOML does; None for what TOML or a line of a message has no form for."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        is_plain = value.isascii() and value.isprintable() and len(value) <= _LONGEST and not set(value) & set('"\\')
        return f'"{value}"' if is_plain else shown(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else None
    if isinstance(value, int):
        return shown(value) if value.bit_length() <= 63 else None
    if isinstance(value, list | tuple) and value:
        parts = [toml_value(one) if not isinstance(one, list | tuple) else None for one in value]
        text = f"[{', '.join(part for part in parts if part)}]"
        return text if None not in parts and len(text) <= _LONGEST else None
    return None


def written(path: str, theirs: Any, mine: Any) -> str | None:
    """Return the line of a manifest that states a config's value; None if its type is not that of the key."""
    table, _, name = path.rpartition(".")
    value = toml_value(theirs)
    if value is None or not _has_type(theirs, mine) or (path in _CHOICES and theirs not in _CHOICES[path]):
        return None
    return f"{name} = {value} under [{'.'.join(('model', table)) if table else 'model'}]"


def _has_type(value: Any, like: Any) -> bool:
    if isinstance(like, bool) or isinstance(value, bool):
        return isinstance(like, bool) and isinstance(value, bool)
    if isinstance(like, tuple):
        return isinstance(value, list) and all(type(one) is int and one > 0 for one in value)
    if isinstance(like, str):
        return isinstance(value, str)
    if isinstance(like, int):
        return isinstance(value, int) and value > 0
    return isinstance(value, int | float) and value > 0


def period(kinds: Sequence[str]) -> list[str]:
    """Return the shortest beginning that gives the whole list when it is repeated."""
    whole = list(kinds)
    for size in range(1, len(whole)):
        if len(whole) % size == 0 and whole[:size] * (len(whole) // size) == whole:
            return whole[:size]
    return whole


def compared(path: str, mine: Any, key: str, theirs: Any, where: str = "") -> Iterator[Contradiction]:
    """Yield a contradiction where both state a fact and the two differ; ``where`` is the table of the field."""
    if mine is None or theirs is None or is_same(mine, theirs):
        return
    stated = f"no {path}" if mine == () else f"{path} {toml_value(mine)}"
    accept = written(path, theirs, mine) or f"{NOBODY}expected a value like {toml_value(mine)}"
    is_of_layers = path == "num_layers"
    yield Contradiction(key, value_text(theirs), stated, accept, where=where, is_of_layers=is_of_layers)


def value_text(theirs: Any) -> str:
    """Write a config's value as a message does: as in TOML where it has a form there."""
    text = toml_value(theirs)
    return shown(theirs) if text is None else text


def read_by_builder(key: str) -> str:
    """Return the line by which a manifest leaves a field to the builder of its model."""
    return f'known_config_fields = ["{key}"] under [model], if the builder of the model computes it'
