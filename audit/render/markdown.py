"""The Markdown report, for pull requests and job summaries."""

import re
from collections.abc import Iterable, Iterator

from kernel_muster.audit.render.plain import ascii_only
from kernel_muster.audit.render.sections import Entry, Section, Table, headline, sections
from kernel_muster.audit.report import Report, check_report
from kernel_muster.registry.foreign_text import code_span, written


def render_markdown(report: Report, *, verbose: bool = False) -> str:
    """Return the report as Markdown in ASCII; UsageError for anything else."""
    check_report(report)
    return render_markdown_sections(headline(report), sections(report, verbose=verbose))


def render_markdown_sections(verdict: str, parts: Iterable[Section]) -> str:
    """Return sections as Markdown in ASCII, between a verdict and the verdict again."""
    lines = [f"## {escaped(verdict)}", ""]
    for section in parts:
        lines += [f"### {escaped(section.title)}", "", *_body(section), ""]
    return ascii_only("\n".join((*lines, f"**{escaped(verdict)}**", "")))


def _body(section: Section) -> Iterator[str]:
    for entry in section.entries:
        yield from _entry(entry)
    yield from (f"- {escaped(line)}" for line in section.lines)
    if section.table is not None:
        yield from ("", *table_lines(section.table))


def _entry(entry: Entry) -> Iterator[str]:
    yield f"{entry.number}. **{entry.code}** {code_span(entry.subject)}"
    for label, lines in entry.fields:
        if label == "log":
            yield from _fenced(lines)
        elif len(lines) == 1:
            yield f"    - {label}: {_inline(label, lines[0])}"
        else:
            yield f"    - {label}:"
            yield from (f"        - {_inline(label, line)}" for line in lines)


def _inline(label: str, line: str) -> str:
    return code_span(line) if label == "where" else escaped(line)


def _fenced(lines: Iterable[str]) -> Iterator[str]:
    """A fence longer than any run of backticks in the text, so that the text cannot end it."""
    text = tuple(lines)
    longest = max((len(run) for line in text for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from ("    - log:", "", f"      {fence}text", *(f"      {line}" for line in text), f"      {fence}", "")


def table_lines(table: Table) -> Iterator[str]:
    """Yield a table in the notation of GitHub."""
    yield "| " + " | ".join(map(_cell, table.header)) + " |"
    yield "|" + " --- |" * len(table.header)
    for row in table.rows:
        yield "| " + " | ".join(map(_cell, row)) + " |"


def escaped(text: str) -> str:
    """Return text on one line that Markdown takes literally; mentions, references and addresses in it become code."""
    return written(text, "markdown")


def _cell(text: str) -> str:
    """Return text for a table, where a bar ends a cell in code too."""
    return re.sub(r"(?<!\\)\|", r"\\|", escaped(text))
