"""What the process of a check prints: passed on line by line, and its end kept for findings."""

import codecs
from collections.abc import Callable
from typing import Any

_LAST_BYTES, _LAST_LINES = 1 << 16, 60
#: A plugin that prints without end fills no terminal and no log of a CI.
MOST_CHARACTERS = 1 << 20
_LONGEST_LINE = 2000
NO_MORE = "(what follows is not shown)"


class Printed:
    """Takes bytes as they come, and gives lines to ``say``."""

    def __init__(self, say: Callable[[str], Any] | None) -> None:
        self._say = say
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._line = ""
        self._left = MOST_CHARACTERS
        self._tail = b""

    def take(self, data: bytes) -> None:
        """Pass on the lines that are complete."""
        self._tail = (self._tail + data)[-_LAST_BYTES:]
        if self._say is None or self._left <= 0:
            return
        *lines, self._line = (self._line + self._decoder.decode(data)).replace("\r\n", "\n").split("\n")
        for line in lines:
            self._pass_on(line)
        while len(self._line) > _LONGEST_LINE:
            self._pass_on(self._line[:_LONGEST_LINE])
            self._line = self._line[_LONGEST_LINE:]

    def end(self) -> None:
        """Pass on a last line without an end."""
        if self._line:
            self._pass_on(self._line)
        self._line = ""

    def _pass_on(self, line: str) -> None:
        if self._say is None or self._left <= 0:
            return
        self._left -= len(line) + 1
        self._say(line)
        if self._left <= 0:
            self._say(NO_MORE)

    @property
    def log(self) -> str:
        """The last lines."""
        return "\n".join(self._tail.decode(errors="backslashreplace").splitlines()[-_LAST_LINES:])
