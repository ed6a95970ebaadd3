"""On which line each key of a TOML text stands. The text has already been parsed: it is valid."""

import re
from collections.abc import Mapping, Sequence

import tomli
from kernel_muster.MODEL_toml.wording import PathPart

Lines = Mapping[tuple[PathPart, ...], int]

# One pass, no nested quantifiers: linear in the text.
_TOKEN = re.compile(
    r'(?P<multi>"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5})'
    r'|(?P<string>"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\')'
    r"|(?P<comment>#[^\n]*)"
    r"|(?P<newline>\n)"
    r"|(?P<mark>[\[\]{}=,.])"
    r"|(?P<bare>[^\s\[\]{}=,.#\"']+)"
    r"|(?P<space>[^\S\n]+)",
    re.DOTALL,
)


def key_lines(text: str) -> dict[tuple[PathPart, ...], int]:
    """Return the line of every key, table and list item, by path."""
    return _Walk(text).run()


def line_of(lines: Lines, path: Sequence[PathPart]) -> int:
    """Return the line of a path, or of what encloses it; 1 for the file itself."""
    for length in range(len(path), 0, -1):
        line = lines.get(tuple(path[:length]))
        if line is not None:
            return line
    return lines.get((), 1)


class _Walk:
    """Follow the tokens: ``table`` is the current header's path, ``stack`` the open lists and inline tables."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines: dict[tuple[PathPart, ...], int] = {}
        self.line = 1
        self.table: tuple[PathPart, ...] = ()
        self.counts: dict[tuple[PathPart, ...], int] = {}
        self.stack: list[tuple[str, tuple[PathPart, ...], int]] = []
        self.key: list[str] = []
        self.value_path: tuple[PathPart, ...] | None = None
        self.header = ""

    def run(self) -> dict[tuple[PathPart, ...], int]:
        for token in _TOKEN.finditer(self.text):
            kind, text = token.lastgroup or "", token.group()
            if kind == "newline":
                self._end_of_line()
            elif kind in ("bare", "string", "multi"):
                self._word(kind, text)
            elif kind == "mark":
                self._mark(text, token.end())
            self.line += text.count("\n")
        return self.lines

    def _end_of_line(self) -> None:
        if not self.stack:
            self.key, self.value_path, self.header = [], None, ""

    def _word(self, kind: str, text: str) -> None:
        if self.stack and self.stack[-1][0] == "[":
            self._note(self._item_path())
        elif self.value_path is None:
            self.key.append(_unquoted(text) if kind == "string" else text)

    def _mark(self, mark: str, end: int) -> None:
        in_key = self.value_path is None and not (self.stack and self.stack[-1][0] == "[")
        if mark == "=" and in_key:
            self._key_ends()
        elif mark == "[" and in_key and not self.stack:
            self.header += "["
        elif mark == "]" and self.header and not self.stack:
            if self.text[end - 2 : end] != "]]" or self.header == "[":
                self._header_ends()
        elif mark in "[{":
            self._open(mark)
        elif mark in "]}" and self.stack:
            self._close()
        elif mark == "," and self.stack:
            self._next()

    def _note(self, path: tuple[PathPart, ...]) -> None:
        self.lines.setdefault(path, self.line)

    def _key_ends(self) -> None:
        path = self.stack[-1][1] if self.stack else self.table
        for part in self.key:
            path = (*path, part)
            self._note(path)
        self.key, self.value_path = [], path

    def _header_ends(self) -> None:
        path: tuple[PathPart, ...] = ()
        for position, part in enumerate(self.key):
            path = (*path, part)
            self._note(path)
            if self.header == "[[" and position == len(self.key) - 1:
                self.counts[path] = self.counts.get(path, 0) + 1
            if path in self.counts:
                path = (*path, self.counts[path] - 1)
                self._note(path)
        self.table, self.key, self.header = path, [], ""
        self.value_path = ()  # nothing but a comment may follow on this line

    def _item_path(self) -> tuple[PathPart, ...]:
        _, path, index = self.stack[-1]
        return (*path, index)

    def _open(self, mark: str) -> None:
        if self.stack and self.stack[-1][0] == "[":
            path = self._item_path()
            self._note(path)
        else:
            path = self.value_path or ()
        self.stack.append((mark, path, 0))
        self.key, self.value_path = [], None

    def _close(self) -> None:
        _, self.value_path, _ = self.stack.pop()

    def _next(self) -> None:
        mark, path, index = self.stack[-1]
        self.stack[-1] = (mark, path, index + 1)
        self.key, self.value_path = [], None


def _unquoted(text: str) -> str:
    if text[0] == "'" or "\\" not in text:
        return text[1:-1]
    return str(tomli.loads(f"k = {text}")["k"])
