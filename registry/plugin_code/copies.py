"""Copies of what plugins register: of exactly our classes, and of text that is nothing but text.

What a plugin keeps hold of it may change later, and a class of its own may answer otherwise each time it is asked.
"""

import os
from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

_MOST = 100_000


def copy_of(item: Any, kind: type) -> Any:
    """Return a plugin's item as one of its kind that the plugin does not hold; TypeError for a class of its own."""
    if kind is Path:
        return Path(_plain(os.fspath(item)))
    if type(item) is not kind:
        own = f"{type(item).__name__}, a class of its own"
        raise TypeError(f"expected {kind.__name__} itself, got {own}: what it does otherwise would not be known")
    return kind(**{one.name: _plain(getattr(item, one.name)) for one in fields(kind)})


def _plain(value: Any) -> Any:
    """Return text as nothing but text, in a tuple or a mapping too; anything else as it is."""
    if isinstance(value, str) and type(value) is not str:
        return str.__str__(value)
    if type(value) is tuple:
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        pairs = list(islice(value.items(), _MOST + 1))
        if len(pairs) > _MOST:
            raise TypeError(f"a mapping has more than {_MOST} items")
        return {_plain(key): _plain(one) for key, one in pairs}
    return value
