"""A reader of 64-bit little-endian ELF that trusts nothing: sections, symbols, notes.

Own code rather than pyelftools: that one raises a dozen kinds of exception on damaged files, knows nothing of NVIDIA's
sections, and this is a hundred lines. Source: System V ABI, "Object Files". Every offset is checked before use.
"""

import struct
from collections.abc import Iterator
from functools import cached_property

from kernel_muster.registry.values import frozen

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
SYMBOL_TABLE, NO_BITS = 2, 8
FUNCTION = 2
# More than any real cubin has; a damaged count must not make us build millions of objects.
_MOST_SECTIONS, _MOST_SYMBOLS = 60_000, 1_000_000


class BadElf(ValueError):
    """The bytes are no ELF file, or a damaged one; the message says what is wrong."""


@frozen
class Section:
    """One section; ``data`` is empty if it takes no room in the file."""

    name: str
    kind: int
    flags: int
    size: int
    link: int
    info: int
    data: bytes


@frozen
class Symbol:
    """One entry of the symbol table; ``section`` is 0 if it is defined elsewhere."""

    name: str
    kind: int
    binding: int
    other: int
    section: int
    value: int
    size: int


class Elf:
    """The sections and symbols of one file; BadElf if it is damaged."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        if len(data) < _HEADER.size or data[:4] != b"\x7fELF":
            raise BadElf(f"not an ELF file: {len(data)} bytes beginning with {data[:4]!r}")
        if data[4:6] != b"\x02\x01":
            raise BadElf(f"ELF class and byte order are {data[4:6].hex()}, expected 0201 (64 bit, little-endian)")
        fields = _HEADER.unpack_from(data)
        self.abi = data[7], data[8]
        self.machine, self.flags = fields[2], fields[7]
        self._read_sections(offset=fields[6], entry=fields[11], count=fields[12], names=fields[13])
        self._check_segments(offset=fields[5], entry=fields[9], count=fields[10])

    def _read_sections(self, offset: int, entry: int, count: int, names: int) -> None:
        if not 0 < count <= _MOST_SECTIONS or entry != _SECTION.size:
            raise BadElf(f"the section table has {count} entries of {entry} bytes, expected at least 1 of 64")
        rows = list(_SECTION.iter_unpack(self._slice(offset, count * _SECTION.size, "section table")))
        if names >= count:
            raise BadElf(f"section names are in section {names} of {count}")
        texts = self._slice(rows[names][4], rows[names][5], "section names")
        self.sections = tuple(
            Section(
                _text(texts, name, "section name"), kind, flags, size, link, info,
                b"" if kind in (0, NO_BITS) else self._slice(start, size, f"section {number}"),
            )
            for number, (name, kind, flags, _, start, size, link, info, _, _) in enumerate(rows)
        )  # fmt: skip

    def _check_segments(self, offset: int, entry: int, count: int) -> None:
        """Only see that they are whole: the driver loads by them, and they are the last thing in a cubin."""
        if count and entry != _SEGMENT.size:
            raise BadElf(f"the segment table has entries of {entry} bytes, expected {_SEGMENT.size}")
        table = self._slice(offset, count * entry, "segment table")
        for number, row in enumerate(_SEGMENT.iter_unpack(table)):
            self._slice(row[2], row[5], f"segment {number}")

    def _slice(self, start: int, size: int, what: str) -> bytes:
        if start + size > len(self._data):
            raise BadElf(f"{what} ends at byte {start + size} of {len(self._data)}: the file is truncated or damaged")
        return self._data[start : start + size]

    @cached_property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbol table; empty if there is none."""
        table = next((section for section in self.sections if section.kind == SYMBOL_TABLE), None)
        if table is None:
            return ()
        if table.link >= len(self.sections) or len(table.data) % _SYMBOL.size:
            raise BadElf(f"the symbol table has {len(table.data)} bytes and names in section {table.link}")
        if len(table.data) // _SYMBOL.size > _MOST_SYMBOLS:
            raise BadElf(f"{len(table.data) // _SYMBOL.size} symbols, expected at most {_MOST_SYMBOLS}")
        names = self.sections[table.link].data
        return tuple(
            Symbol(_text(names, name, "symbol name"), info & 15, info >> 4, other, section, value, size)
            for name, info, other, section, value, size in _SYMBOL.iter_unpack(table.data)
        )

    def section(self, name: str) -> Section | None:
        """Return the first section of this name."""
        return next((section for section in self.sections if section.name == name), None)


def notes(section: Section) -> Iterator[bytes]:
    """Yield the descriptions of a note section."""
    rest = section.data
    while len(rest) >= 12:
        name_size, size, _ = struct.unpack_from("<III", rest)
        start = 12 + (name_size + 3 & ~3)
        yield rest[start : start + size]
        rest = rest[start + (size + 3 & ~3) :]


def _text(table: bytes, offset: int, what: str) -> str:
    end = table.find(b"\0", offset)
    if offset >= len(table) or end < 0:
        raise BadElf(f"{what} at offset {offset} of a string table of {len(table)} bytes")
    try:
        return table[offset:end].decode()
    except UnicodeDecodeError:
        raise BadElf(f"{what} at offset {offset} is not text") from None
