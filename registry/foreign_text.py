"""Text that others wrote (names, reasons, sites), made harmless for each kind of output.

A name may hold escape sequences that a terminal obeys, line breaks that begin a line of their own, marks that turn
the direction of writing, letters without width, and halves of a character. It may be of any length. JSON does without
this module: its strings hold all of that.
"""

import re
import unicodedata
from typing import Literal

#: ``terminal`` keeps letters of any script. ``plain`` is ASCII: files, pipes. ``log``, ``exception`` and ``markdown``
#: are ASCII too; ``exception`` keeps line breaks, for a message may be a list.
Medium = Literal["terminal", "plain", "log", "exception", "markdown"]
#: What is longer is cut in its middle. Sentences that list names stay below it.
MOST_CHARACTERS = 10_000
# Printable for Python, and yet nothing to see: fillers, joiners and selectors of variants.
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {chr(0xFE00 + one) for one in range(16)}
_SPECIAL = re.compile(r"([\\`*_<>|\[\]~$&])")
# At the beginning of a line: a list, a heading or a rule.
_FIRST = re.compile(r"\A\s*(?:(?=[-+=#])|\d{1,9}(?=[.)]))")
# What GitHub makes a mention, a link to an issue or a commit, or an address of.
_LIVE = re.compile(
    r"\S*(?:@[A-Za-z0-9]|#\d|\bGH-\d|://|\bwww\.|\bmailto:|\b[0-9a-f]{7,40}\b)\S*",
    re.IGNORECASE,
)


def written(text: str, medium: Medium, most: int = MOST_CHARACTERS) -> str:
    """Return foreign text for one kind of output: on one line, bounded, and obeyed by nobody."""
    text = text if len(text) <= most else _cut(text, most)
    keeps_lines = medium == "exception"
    if not (text.isascii() and text.isprintable()):
        keeps_letters = medium == "terminal"
        text = "".join(_character(one, keeps_letters, keeps_lines) for one in text)
    return _markdown(text) if medium == "markdown" else text


def code_span(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return foreign text as code in Markdown; backticks in it become apostrophes."""
    return "`" + (written(text, "plain", most).replace("`", "'") or " ") + "`"


def _character(one: str, keeps_letters: bool, keeps_lines: bool) -> str:
    if one == "\n" and keeps_lines:
        return one
    is_plain = one.isprintable() and (one.isascii() or (keeps_letters and one not in _UNSEEN and not _is_mark(one)))
    return one if is_plain else one.encode("unicode_escape").decode("ascii")


def _is_mark(one: str) -> bool:
    """Whether a character has no width and no letter of its own: marks that enclose others cover what stands there."""
    return unicodedata.category(one) == "Me"


def _cut(text: str, most: int) -> str:
    half = max(1, most // 2 - 20)
    return f"{text[:half]}...({len(text) - 2 * half} characters)...{text[-half:]}"


def _markdown(text: str) -> str:
    parts, at = [], 0
    for live in _LIVE.finditer(text):
        parts += [_SPECIAL.sub(r"\\\1", text[at : live.start()]), code_span(live[0])]
        at = live.end()
    parts.append(_SPECIAL.sub(r"\\\1", text[at:]))
    made = "".join(parts).strip()
    return _FIRST.sub(lambda found: f"{found[0]}\\", made)
