"""What is wrong with a trace, in sentences: where, what was expected, what stands there, and what was meant."""

import re
import reprlib
from collections.abc import Iterable

from kernel_muster.registry.keys import did_you_mean
from pydantic_core import ErrorDetails

_ARM = re.compile(r"(?:constrained-)?(?:str|int|bool|float)|(?:list|tuple)\[.*\]|function-after\[.*\]")
# What pydantic calls it, and what was expected there.
_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def problem_text(problem: ErrorDetails, keys: Iterable[str]) -> str:
    """Return one problem as a sentence; ``keys`` are those of the table that it lies in."""
    path = _path(problem["loc"])
    table, _, last = path.rpartition(".")
    kind, context, got = problem["type"], problem.get("ctx", {}), reprlib.repr(problem["input"])
    if kind == "missing":
        return f"{table or 'the trace'}: {last!r} is missing" if "[" not in last else f"{path}: is missing"
    if kind == "extra_forbidden":
        return f"{table or 'the trace'}: there is no key {last!r}{did_you_mean(last, keys)}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        hint = did_you_mean(str(problem["input"])[:80], choices)
        return f"{path}: expected {' or '.join(choices)}, got {got}{hint}"
    return f"{path}: {_said(problem)}, got {got}"


def _said(problem: ErrorDetails) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}"
    if kind in ("too_long", "string_too_long"):
        return f"is longer than {context.get('max_length')}"
    if kind in ("too_short", "string_too_short"):
        return "is empty"
    if kind == "greater_than_equal":
        return f"expected at least {context.get('ge')}"
    if kind == "less_than":
        return f"expected less than {context.get('lt')}"
    if kind == "string_pattern_mismatch":
        return f"does not match {context.get('pattern')}"
    return problem["msg"].removeprefix("Value error, ")


def _path(parts: tuple[int | str, ...]) -> str:
    """Return ``lookups[3].site``; what pydantic calls the arms of a union is left out."""
    shown = [part for part in parts if isinstance(part, int) or not _ARM.fullmatch(part)]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:80]}" for part in shown).lstrip(".")
