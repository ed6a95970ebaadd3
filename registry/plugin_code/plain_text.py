"""Text of values that may be anybody's, made without a call of their own methods."""

from typing import Any

_NAME = type.__dict__["__name__"]
_CONSTANTS = (bool, int, float, complex, bytes, type(None), type(Ellipsis))


def class_name(value: object) -> str:
    """Return the name of a value's class."""
    return str(_NAME.__get__(type(value)))


def plain_text(value: Any) -> str:
    """Return a value as text: text as it is, plain values as Python writes them, of any other the class alone.

    A class derived from ``str``, an enumeration for instance, counts as its text.
    """
    return str.__str__(value) if issubclass(type(value), str) else _written(value, depth=4)


def _written(value: Any, depth: int) -> str:
    kind = type(value)
    if kind in _CONSTANTS:
        return repr(value)
    if issubclass(kind, str):
        return repr(str.__str__(value))
    if depth and kind in (list, tuple, set, frozenset):
        inner = [_written(one, depth - 1) for one in value]
        if kind is tuple:
            return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
        left, right = "[]" if kind is list else "{}"
        return f"{left}{', '.join(inner)}{right}"
    if depth and kind is dict:
        pairs = (f"{_written(key, depth - 1)}: {_written(one, depth - 1)}" for key, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    return f"<{class_name(value)}>"
