"""The report on a terminal: the same sections in colour. The only renderer that imports rich."""

from collections.abc import Iterable
from typing import TextIO

from kernel_muster.audit.render.plain import columns, printable
from kernel_muster.audit.render.sections import Entry, Section, Table, headline, sections, tone_of
from kernel_muster.audit.render.text import entry_lines
from kernel_muster.audit.report import Report
from kernel_muster.registry.foreign_text import written
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

#: So many rows of a section have colour and fitted columns, at up to 1 ms each. The rest is plain text.
MOST_STYLED = 200
#: So many letters of one line are wrapped between words.
MOST_LETTERS = 10_000
_STYLES = {"refuse": "bold red", "warn": "yellow", "note": "cyan"}
_LABELS = {"remedy": "green", "log": "dim", "explains": "dim"}


def print_report(report: Report, file: TextIO, *, verbose: bool = False) -> None:
    """Print the report in colour, wrapped to the terminal's width."""
    style = _STYLES.get(tone_of(report), "bold green")
    print_sections(sections(report, verbose=verbose), file, headline(report), headline(report), style)


def print_sections(
    parts: Iterable[Section], file: TextIO, first: str = "", last: str = "", style: str = "bold"
) -> None:
    """Print sections, a blank line between them, between a first and a last line of one style."""
    console = Console(file=file, highlight=False, width=getattr(file, "columns", None))
    if first:
        console.print(_text(first, style))
    for position, section in enumerate(parts):
        if first or position:
            console.print()
        _print_section(console, section)
    if last:
        console.print()
        console.print(_text(last, style))


def _print_section(console: Console, section: Section) -> None:
    console.print(_text(section.title, _STYLES.get(section.tone, "bold")))
    for place, entry in enumerate(section.entries):
        if place < MOST_STYLED and not _is_long(entry):
            _print_entry(console, entry, _STYLES.get(section.tone, "bold"))
        else:
            _print_plain(console, entry_lines(entry))
    for line in section.lines[:MOST_STYLED]:
        _print_line(console, line)
    _print_plain(console, (f"  {line}" for line in section.lines[MOST_STYLED:]))
    if section.table is not None and len(section.table.rows) > MOST_STYLED:
        _print_plain(console, columns(section.table.header, section.table.rows))
    elif section.table is not None:
        _print_table(console, section.table)


def _print_plain(console: Console, lines: Iterable[str]) -> None:
    """Print lines as they are; the terminal wraps them."""
    for line in lines:
        console.file.write(f"{printable(line)}\n")


def _is_long(entry: Entry) -> bool:
    """Whether a field of a finding is so long that wrapping it takes seconds."""
    return any(len(line) > MOST_LETTERS for _, lines in entry.fields for line in lines)


def _print_line(console: Console, line: str) -> None:
    """Print a line, wrapped between words; one with a word that is too long, a path, is left to the terminal.

    What we broke could not be copied whole.
    """
    if max(map(len, line.split()), default=0) > console.width - 2:
        console.print(_text(f"  {line}"), soft_wrap=True)
    else:
        console.print(Padding(_text(line), (0, 0, 0, 2)))


def _print_entry(console: Console, entry: Entry, style: str) -> None:
    title = Text(f"{entry.number:3}. ")
    title.append(entry.code, style)
    title.append(f" {written(entry.subject, 'terminal')}", "bold")
    console.print(title)
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, lines in entry.fields:
        for position, line in enumerate(lines):
            grid.add_row(label if position == 0 else "", _text(line, _LABELS.get(label, "")))
    console.print(Padding(grid, (0, 0, 0, 5)))


def _print_table(console: Console, table: Table) -> None:
    """Print a table; where its words do not fit side by side, row by row, each cell on a line of its own."""
    widths = fitted_widths(table, console.width)
    if widths is not None:
        console.print(rich_table(table, widths))
        return
    label = max(map(len, table.header))
    for row in table.rows:
        console.print()
        for position, (name, cell) in enumerate(zip(table.header, row, strict=True)):
            line = (
                Text().append(f"{name:{label}}  ", "dim").append(written(cell, "terminal"), "" if position else "bold")
            )
            console.print(Padding(line, (0, 0, 0, 2)))


def fitted_widths(table: Table, width: int) -> list[int] | None:
    """Return widths of columns in which no word is broken, the narrowest wishes first; None if there are none."""
    cells = list(zip(table.header, *table.rows, strict=True))
    least = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in cells]
    wanted = [max(map(len, column)) for column in cells]
    spare = width - sum(least) - 3 * (len(cells) - 1) - 2  # a gap, and the box's edges
    if spare < 0:
        return None
    widths = list(least)
    for i in sorted(range(len(cells)), key=lambda i: wanted[i] - least[i]):
        more = min(spare, wanted[i] - least[i])
        widths[i], spare = widths[i] + more, spare - more
    return widths


def rich_table(table: Table, widths: Iterable[int]) -> RichTable:
    """Return a table whose cells are taken literally."""
    made = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for name, width in zip(table.header, widths, strict=True):
        made.add_column(name, width=width)
    for row in table.rows:
        made.add_row(*map(_text, row))
    return made


def _text(text: str, style: str = "") -> Text:
    return Text(written(text, "terminal"), style)
