"""Small pieces of every renderer: escaped text, folded layers, sizes and aligned columns."""

import re
from collections.abc import Iterable, Sequence

_NUMBERED = re.compile(r"(.*?)\.(\d{1,9})(?:\.(.*))?\Z", re.DOTALL)
_SHORT_LIST = 3


def ascii_only(text: str) -> str:
    """Return text as printable ASCII; line ends stay, anything else is escaped."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or (c.isascii() and c.isprintable()) else _escape(c) for c in text)


def printable(text: str) -> str:
    """Return text without anything that a terminal would obey; letters of any script stay."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def fold_layers(labels: Iterable[str]) -> str:
    """Return layers in few words: ``layers.0..39 attn (40)``; the count tells where a range has gaps."""
    groups: dict[tuple[str, str], list[int] | None] = {}
    for label in labels:
        match = _NUMBERED.match(label)
        if match is None:
            groups.setdefault((label, ""), None)
        else:
            numbers = groups.setdefault((match[1], match[3] or ""), [])
            if numbers is not None:
                numbers.append(int(match[2]))
    return ", ".join(_folded(prefix, suffix, numbers) for (prefix, suffix), numbers in groups.items())


def _folded(prefix: str, suffix: str, numbers: list[int] | None) -> str:
    if numbers is None:
        return prefix
    distinct = sorted(set(numbers))
    low, high, count = distinct[0], distinct[-1], len(distinct)
    end = f" {suffix}" if suffix else ""
    if count == 1:
        return f"{prefix}.{low}{end}"
    if count <= _SHORT_LIST and high - low >= count:
        return f"{prefix}.{','.join(map(str, distinct))}{end}"
    return f"{prefix}.{low}..{high}{end} ({count})"


def size_text(size_bytes: int) -> str:
    """Return a size in binary units: ``1.4 GiB``."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def plural(count: int, noun: str) -> str:
    """Return ``1 note``, ``2 notes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> list[str]:
    """Return a table as aligned lines; nothing is cut and nothing wraps."""
    table = [tuple(header), *(tuple(cell.replace("\n", " ") for cell in row) for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    ]
