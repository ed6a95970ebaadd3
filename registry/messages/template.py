"""The template language: ``str.format`` with a few formats of our own.

========================  ==================================================================
``{name}``                the value; of a sequence, its items with commas
``{name:semicolons}``     the items of a sequence with semicolons; ``or`` and ``and`` likewise
``{name:hint}``           ``; did you mean a or b?``, or nothing for an empty sequence
``{name:# kernel}``       a count with its noun: ``1 kernel``, ``2 kernels``
``{--stage name}``        the audience's spelling of an option, with its value
``{--manifest FILE}``     the same with a placeholder in capitals; ``{--quant}`` the option alone
========================  ==================================================================
"""

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Spell an option for an audience: its name with ``--``, and its value if it has one.
Option = Callable[[str, str | None], str]


def plain_option(name: str, value: str | None) -> str:
    """Spell an option as the command line does: ``--stage proven``."""
    return name if value is None else f"{name} {value}"


def fill(template: str, values: Mapping[str, object], option: Option = plain_option) -> str:
    """Return a template's text; KeyError for a value that is missing."""
    return _Filler(option).vformat(template, (), values)


def fields_of(template: str) -> frozenset[str]:
    """Return the names of the values that a template reads."""
    names = set()
    for _, field, _, _ in string.Formatter().parse(template):
        if field is None:
            continue
        name, argument = _split_option(field)
        if name is None:
            names.add(field)
        elif argument is not None and not argument.isupper():
            names.add(argument)
    return frozenset(names)


def _split_option(field: str) -> tuple[str | None, str | None]:
    """Return the option that a field names, and its argument."""
    if not field.startswith("--"):
        return None, None
    name, _, argument = field.partition(" ")
    return name, argument or None


class _Filler(string.Formatter):
    def __init__(self, option: Option) -> None:
        self._option = option

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        name, argument = _split_option(field_name)
        if name is None:
            return kwargs[field_name], field_name
        value = argument if argument is None or argument.isupper() else _text(kwargs[argument])
        return self._option(name, value), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in _JOINED:
            return _JOINED[format_spec].join(map(str, value))
        if format_spec == "hint":
            return f"; did you mean {' or '.join(map(str, value))}?" if value else ""
        if format_spec.startswith("# "):
            noun = format_spec.removeprefix("# ")
            return f"{value} {noun}" if value == 1 else f"{value} {noun}s"
        return format(value, format_spec) if format_spec else _text(value)


_JOINED = {"semicolons": "; ", "or": " or ", "and": " and ", "commas": ", "}


def _text(value: object) -> str:
    # a key is a named tuple with a text of its own
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return ", ".join(map(str, value)) if is_list else str(value)  # type: ignore[call-overload]
