"""How values, paths and reasons are written in messages, and which reasons say nothing."""

import re
import unicodedata
from collections.abc import Sequence

PathPart = str | int
_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_NOT_A_WORD = re.compile(r"[\W_]+")
_PLACEHOLDERS = frozenset({"", "todo", "tbd", "na", "none", "fixme", "xxx", "unknown", "reason", "because"})
_BEGINS_UNFINISHED = re.compile(r"\W*(?:todo|tbd|fixme|xxx)\b", re.IGNORECASE)
_LONGEST_SHOWN = 80

TYPE_NAMES = {
    bool: "a boolean",
    dict: "a table",
    float: "a number",
    int: "an integer",
    list: "a list",
    str: "text",
}


def type_name(value: object) -> str:
    """Name a TOML or JSON value's type in words."""
    if value is None:
        return "null"
    return TYPE_NAMES.get(type(value), f"a {type(value).__name__}")


def shown(value: object) -> str:
    """Show a value in a message: bounded, on one line, in printable ASCII, whatever it holds."""
    if isinstance(value, dict | list | tuple):
        return type_name(list(value) if isinstance(value, tuple) else value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_SHOWN + 2 else f"{text[:_LONGEST_SHOWN]}...'"


def plain(text: str) -> str:
    """Write a name bare where that is safe in a message, else quoted and bounded."""
    return text if text.isascii() and text.isprintable() and len(text) <= 300 else shown(text)


def dotted(path: Sequence[PathPart]) -> str:
    """Write a path as TOML does: ``target.sm_90a.expected_absent``, list items as ``[0]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE.match(part) else shown(part))
    return text


def tidy(text: str) -> str:
    """Put a text on one line."""
    return " ".join(text.split())


def reason_problem(text: str) -> str | None:
    """Say why a reason says nothing, or None: blank, a placeholder, one word, or not printable."""
    plain = _NOT_A_WORD.sub("", unicodedata.normalize("NFKC", text)).casefold()
    if not tidy(text).isprintable():
        return "the reason holds control characters, expected one printable sentence"
    if not plain:
        return f"the reason {shown(text)} is blank, expected why this model may lack (or must have) the kernel"
    if plain in _PLACEHOLDERS or _BEGINS_UNFINISHED.match(unicodedata.normalize("NFKC", text)):
        return f"the reason {shown(text)} is a placeholder, expected why this model may lack (or must have) the kernel"
    if len(text.split()) == 1 and text.isascii():  # some languages write sentences without blanks
        return f"the reason {shown(text)} is one word, expected why this model may lack (or must have) the kernel"
    return None
