"""The text report: plain ASCII, for logs, files and exceptions."""

from collections.abc import Iterable, Iterator

from kernel_muster.audit.render.plain import ascii_only, columns
from kernel_muster.audit.render.sections import Entry, Section, headline, sections
from kernel_muster.audit.report import Report, check_report
from kernel_muster.registry.foreign_text import written


def render_text(report: Report, *, verbose: bool = False) -> str:
    """Return the report as plain ASCII: the verdict, what to do about it, and the verdict again.

    UsageError for anything else.
    """
    check_report(report)
    return render_sections(sections(report, verbose=verbose), headline(report), headline(report))


def render_sections(parts: Iterable[Section], first: str = "", last: str = "") -> str:
    """Return sections as plain ASCII, a blank line between them, between a first and a last line."""
    blocks = ["\n".join((section.title, *_body(section))) for section in parts]
    return ascii_only("\n\n".join(block for block in (first, *blocks, last) if block))


def _body(section: Section) -> Iterator[str]:
    for entry in section.entries:
        yield from entry_lines(entry)
    for line in section.lines:
        yield f"  {_one_line(line)}"
    if section.table is not None:
        yield from columns(section.table.header, section.table.rows, indent="  ")


def entry_lines(entry: Entry) -> Iterator[str]:
    """Yield one numbered finding."""
    yield f"{entry.number:3}. {entry.code} {_one_line(entry.subject)}"
    width = max((len(label) for label, _ in entry.fields), default=0)
    for label, lines in entry.fields:
        for position, line in enumerate(lines):
            yield f"     {label if position == 0 else '':{width}}  {_one_line(line)}"


def _one_line(text: str) -> str:
    """No name may begin a line of its own: it could look like a verdict."""
    return written(text, "plain")
