"""JSON that says one thing: no key twice in an object, no NaN, no infinity."""

import json
import reprlib
from collections import Counter
from typing import Any


def loads(text: str) -> Any:
    """Read a document; ValueError says what is no JSON, RecursionError that it is nested too deeply."""
    return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"key {reprlib.repr(twice)} stands twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
