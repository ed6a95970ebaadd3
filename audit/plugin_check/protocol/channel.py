"""The channel on which the process of ``muster plugin check`` reports: lines that only the check's own code can write.

A plugin shares the process, and may write to file descriptors that it has not opened. Each line therefore has a number
and a code (HMAC) over number and content, made with a key that the parent gave to this code alone. The parent drops
and counts everything else. A plugin that searches the memory of its process for the key is not kept from it: it is
code that its user chose to run.
"""

import hashlib
import hmac
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_muster.audit.plugin_check.protocol.events import Event

KEY_BYTES = 32
#: A process that cannot report any more ends with this code.
CANNOT_REPORT = 71
_DIGEST = "sha256"
_HEX = hashlib.new(_DIGEST).digest_size * 2
#: What is no line by then is none: a compiler's log, the longest there is, has some megabytes.
_LONGEST = 64 << 20
# A plugin may replace what it finds in a module; these are taken before any of its code runs.
_write, _getpid, _exit, _dumps = os.write, os.getpid, os._exit, json.dumps


class Sender:
    """Writes events, in the process that made it: what a plugin forks and lets go on here speaks for nobody."""

    def __init__(self, descriptor: int, name: str, key: bytes) -> None:
        self._descriptor, self._name = descriptor, name
        self._code = hmac.new(key, digestmod=_DIGEST)
        self._process = _getpid()
        self._count = 0
        self._lock = threading.Lock()

    def send(self, event: "Event") -> None:
        """Write one event. A process whose channel is closed ends at once: its work would count for nothing."""
        if _getpid() != self._process:
            _exit(CANNOT_REPORT)
        content = _dumps(_encodable(asdict(event))).encode()
        with self._lock:
            head = f"{self._name} {self._count}".encode()
            self._count += 1
            # In a line of its own, whatever was written before.
            line = b"\n%s %s %s\n" % (head, _signed(self._code, head, content), content)
            try:
                while line:
                    line = line[_write(self._descriptor, line) :]
            except OSError:
                _exit(CANNOT_REPORT)


class Receiver:
    """Takes lines apart: events of the senders whose keys it has, and what is none."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._codes = {name.encode(): hmac.new(key, digestmod=_DIGEST) for name, key in keys.items()}
        self._next = dict.fromkeys(self._codes, 0)
        self._rest = b""
        self.dropped = 0  # lines

    def events(self, data: bytes) -> Iterator["Event"]:
        """Yield the events that are complete with this data."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            self._rest = b""
            self.dropped += 1
        for line in filter(None, lines):
            event = self._event(line)
            if event is not None:
                yield event
            else:
                self.dropped += 1

    def end(self) -> None:
        """Count what never became a line."""
        self.dropped += bool(self._rest)
        self._rest = b""

    def _event(self, line: bytes) -> "Event | None":
        from kernel_muster.audit.plugin_check.protocol.events import events

        name, _, rest = line.partition(b" ")
        number, _, rest = rest.partition(b" ")
        code, content = rest[:_HEX], rest[_HEX + 1 :]
        if name not in self._codes:
            return None
        expected = _signed(self._codes[name], b"%s %s" % (name, number), content)
        if not hmac.compare_digest(code, expected) or int(number) < self._next[name]:  # the second of two copies
            return None
        self._next[name] = int(number) + 1
        with suppress(ValueError):
            return events().validate_json(content, strict=True)
        return None


def _signed(code: "hmac.HMAC", head: bytes, content: bytes) -> bytes:
    made = code.copy()
    made.update(head + b" " + content)
    return made.hexdigest().encode()


def _encodable(value: Any) -> Any:
    """Spell out what JSON in UTF-8 cannot hold: a file's name may be any bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value
